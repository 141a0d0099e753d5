"""Where the flow stands: `GET /status`, the `queue` metric, and the sentence that says who keeps everybody waiting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from stretto.records import EngineStatus
from stretto.rollouts import batches, recall
from stretto.rollouts.flow import Flow
from stretto.rollouts.groups import TRAIN
from stretto.rollouts.staleness import fits

STALL_SECONDS = 20.0
"""After so long without progress an event names who has not answered; again after twice as long, and so on."""
RATE_SECONDS = 15.0


def status(flow: Flow) -> dict[str, Any]:
    now = flow.clock()
    ages = [age for _, step in flow.steps for age in step]
    rates = [rate for rate, _ in flow.steps]
    trained = recall.groups_below(flow.ledger, flow.version or 0)
    return {
        "run": flow.config.run.name,
        "version": flow.version,
        "chain": flow.chain,
        "next_step": flow.next_step,
        "flowing": flow.flowing,
        "capacity": flow.capacity(flow.version or 0),
        "in_flight": len(flow.leases.out),
        "groups": {
            "open": sum(not group.finished for group in flow.training.values()),
            "ready": _ready(flow),
            "batched": flow.fates["batched"] - trained,
            "trained": trained,
            "dropped": {fate[8:]: count for fate, count in flow.fates.items() if fate.startswith("dropped:")},
        },
        "solve_rate": sum(rates) / len(rates) if rates else None,
        "staleness": {"mean": sum(ages) / len(ages) if ages else None, "max": max(ages, default=None)},
        "rollouts_per_second": sum(now - ended <= RATE_SECONDS for ended in flow.ended) / RATE_SECONDS,
        "engines": [
            {
                "url": e.url,
                "cluster": e.cluster,
                "version": e.version,
                "in_flight": flow.leases.load(e.url),
                "renewed_seconds_ago": _ago(now, flow.engines.heard(e.url)),
            }
            for e in flow.engines.by_url.values()
        ],
        "trainer_heard_seconds_ago": _ago(now, flow.trainer_heard),
        "workers": {
            name: {"in_flight": len(flow.leases.by_worker[name]), "heard_seconds_ago": round(now - heard, 1)}
            for name, heard in sorted(flow.leases.heard.items())
        },
        "evaluations": [
            {"id": id, "finished": tally.finished, "total": tally.total}
            for id, tally in flow.evaluations.tallies.items()
        ],
        "recent": list(flow.recent),
        "stall": waiting_for(flow) if _expecting(flow) and now - flow.progress > STALL_SECONDS else None,
    }


def _ago(now: float, at: float | None) -> float | None:
    return None if at is None else round(now - at, 1)


def queue(flow: Flow) -> dict[str, Any]:
    """Values of the `queue` metric."""
    return {
        "version": flow.version,
        "capacity": flow.capacity(flow.version or 0),
        "in_flight": len(flow.leases.out),
        "ready_groups": _ready(flow),
        "engines": flow.engines.clusters(),
    }


class StallWatch:
    """Says once that nothing moves and why, then again after twice the time."""

    def __init__(self) -> None:
        self._since = self._said = 0.0

    def report(self, flow: Flow) -> None:
        quiet = flow.clock() - flow.progress
        if flow.progress != self._since:
            self._since, self._said = flow.progress, 0.0
        if _expecting(flow) and quiet > max(STALL_SECONDS, 2 * self._said):
            self._said = quiet
            flow.event(f"no progress for {quiet:.0f} s: {waiting_for(flow)}")


def waiting_for(flow: Flow) -> str:
    """Who has not answered, as far as the orchestrator can see."""
    reasons = []
    if not flow.leases.heard:
        reasons.append("no worker has asked for work")
    reasons += _engines(flow)
    if flow.splits_needed:
        reasons.append(f"the tasks of {', '.join(sorted(flow.splits_needed))} are not loaded")
    now = flow.clock()
    if flow.leases.out:
        shares = [f"{name} has {len(held)}" for name, held in sorted(flow.leases.by_worker.items()) if held]
        oldest = next(iter(flow.leases.out.values()))
        reasons.append(
            f"{len(flow.leases.out)} rollouts are out ({', '.join(shares)}); the oldest, {oldest.rollout} on engine "
            f"{oldest.engine}, must be answered in {oldest.deadline - now:.0f} s"
        )
    held = flow.brake.held(now)
    if held:
        reasons.append(f"rollouts on {', '.join(sorted(held))} end as infra, so it is held for a while")
    if flow.version is None:
        reasons.append("the trainer has not said its version")
    elif flow.next_step > flow.version:
        reasons.append(f"the trainer has not committed batch {flow.version}")
    elif flow.flowing and batches.choose(list(flow.training.values()), flow.next_step, flow.admission):
        reasons.append(f"the trainer has not asked for batch {flow.next_step}, which is ready")
    return "; ".join(reasons) or "the reason is not known"


def _engines(flow: Flow) -> list[str]:
    engines = list(flow.engines.by_url.values())
    if not engines:
        return ["no engine is registered"]
    needs: list[tuple[str, int, Callable[[EngineStatus], bool]]] = []
    for tally in flow.evaluations.tallies.values():
        least = tally.asked.version
        needs.append((f"evaluation {tally.asked.name}", least, lambda e, least=least: e.version >= least))
    if flow.flowing:
        bound = flow.admission.max_staleness
        least = max(0, flow.next_step - bound)
        needs.append((TRAIN, least, lambda e: fits(flow.next_step, e.version, bound)))
    serving = ", ".join(f"{engine.url} of {engine.cluster}: {engine.version}" for engine in engines)
    return [
        f"no engine is fit for {what}, which needs version {least} (engines serve {serving})"
        for what, least, fit in needs
        if not any(fit(engine) for engine in engines)
    ]


def _ready(flow: Flow) -> int:
    return sum(group.finished for group in flow.training.values())


def _expecting(flow: Flow) -> bool:
    return flow.flowing or bool(flow.evaluations.tallies)
