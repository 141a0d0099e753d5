"""What an evaluation's counts say: solve rate and pass@k, strict and permissive, with intervals; how it is shown."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from stretto.launch.local import LaunchError
from stretto.watch import statistics


def scores(result: Mapping[str, Any]) -> dict[str, Any]:
    """`strict` and `permissive`: solve rate and pass@k of the counts per task, each with a 95 % bootstrap interval over
    tasks. The strict ones' also at the top. Raises LaunchError when no attempt was valid."""
    if not any(result["valid"]):
        raise LaunchError(f"every attempt ended as infra, so there is nothing to count: {result.get('infra', '')}")
    both = {"strict": _score(result), "permissive": _score({**result, "solved": result["agreed"]})}
    top = {"solve_rate": both["strict"]["solve_rate"], "ci95": both["strict"]["ci95"]}
    return {**top, "pass_at_4": statistics.pass_at(4, result), **both}


def _score(line: Mapping[str, Any]) -> dict[str, Any]:
    values = statistics.rates(line)
    passes = {}
    for k in sorted({2**power for power in range(8) if 2**power <= line["attempts"]} | {line["attempts"]}):
        chances = {
            id: statistics.pass_at_k(solved, valid, k)
            for id, solved, valid in zip(line["ids"], line["solved"], line["valid"], strict=True)
            if valid >= k
        }
        if chances:
            passes[str(k)] = {"value": statistics.mean(chances), "ci95": statistics.interval(chances)}
    return {"solve_rate": statistics.mean(values), "ci95": statistics.interval(values), "pass_at_k": passes}


def show(result: dict[str, Any], as_json: bool) -> None:
    if as_json:
        print(json.dumps(result, indent=2))
        return
    low, high = result["ci95"]
    print(
        f"{result['model']}: {result['solve_rate']:.1%} solved [{low:.1%}, {high:.1%}], "
        f"{result['tasks']} tasks × {result['attempts']} attempts at temperature {result['temperature']:g}"
    )
    print(f"  {'':<10} {'strict':<24} permissive")
    for k, strict in result["strict"]["pass_at_k"].items():
        both = (strict, result["permissive"]["pass_at_k"][k])
        columns = [f"{c['value']:6.1%} [{c['ci95'][0]:.1%}, {c['ci95'][1]:.1%}]" for c in both]
        print(f"  {f'pass@{k}':<10} {columns[0]:<24} {columns[1]}")
    print(f"  outcomes   {', '.join(f'{name} {count}' for name, count in result['outcomes'].items())}")
    print(f"  behaviour  {', '.join(f'{name} {value:.2f}' for name, value in result['behaviour'].items())}")
    print(f"  rollouts   {result['run']}/store/rollouts/")
