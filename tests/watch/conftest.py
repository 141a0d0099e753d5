"""A run that never happened: metrics, configuration and rollouts as a real one leaves them."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path

import pytest

from stretto.config import dump, parse
from stretto.records import CallStatus, Message, Outcome, Rollout, ToolCall, encode
from stretto.watch.metrics import Metrics

CODE = "1\tdef total(nums):\n2\t    acc = 1\n3\t    for n in nums:\n4\t        acc = acc + n\n5\t    return acc"
ENGINES = {"cluster-0": "http://127.0.0.1:4101", "cluster-1": "http://127.0.0.1:4102"}


class Clock:
    def __init__(self) -> None:
        self.now = 1_790_000_000.0

    def __call__(self) -> float:
        return self.now


def call(name: str, arguments: str) -> Message:
    text = f'<tool_call>\n{{"name": "{name}", "arguments": {arguments}}}\n</tool_call><|im_end|>'
    return Message(role="assistant", text=text)


def rollout(id: str, purpose: str, solved: bool) -> Rollout:
    text = "    acc = 0" if solved else "    acc = n"
    messages = [
        Message(role="user", text="Fix solution.py: `total` returns the sum of the numbers."),
        call("read_file", '{"path": "solution.py"}'),
        Message(role="tool", text=CODE),
        call("edit_file", f'{{"path": "solution.py", "line": 2, "text": "{text}"}}'),
        Message(role="tool", text="ok"),
        call("run_tests", "{}"),
        Message(role="tool", text="passed 2 of 2" if solved else "FAILED total([]) raised NameError: name 'n'"),
        Message(role="assistant", text="<tool_call>\n{broken\n</tool_call>") if not solved else call("submit", "{}"),
        Message(role="tool", text="submitted" if solved else "the call is not valid JSON"),
    ]
    return Rollout(
        id=id, group="g", task="total/17", purpose=purpose, outcome=Outcome.SCORED, reward=float(solved),
        rewards={"solved": float(solved)}, solved=solved, segments=[], messages=messages, turns=4, engine="",
        calls=[ToolCall(name="read_file", status=CallStatus.OK, segment=0, start=0, end=1)], worker="worker-0",
        started=0.0, ended=1.0, reason="" if solved else "3 of 24 hidden calls differ",
    )  # fmt: skip


def make_run(run: Path, steps: int = 30, seed: int = 1) -> Path:
    """Write a finished run of `steps` steps below `run`; the solve rate climbs from about 0.35 to 0.65."""
    rng, clock = random.Random(seed), Clock()
    run.mkdir(parents=True)
    config = parse({"run": {"name": run.name, "root": str(run.parent)}, "trainer": {"steps": steps}})
    (run / "config.toml").write_text(dump(config))
    logs = {
        name: Metrics(run / "metrics.jsonl", name, clock)
        for name in ("launcher", "orchestrator", "trainer", "worker-0", "cluster-0-engine", "cluster-1-engine")
    }
    swaps = Metrics(run / "metrics.jsonl", "follower", clock)
    launcher, orchestrator, trainer = logs["launcher"], logs["orchestrator"], logs["trainer"]
    numbers = iter(range(10**6))

    def ended(purpose: str, version: int, solved: bool, cluster: str = "cluster-0") -> None:
        id = f"{purpose}-{next(numbers)}"
        outcome = "scored" if solved or rng.random() < 0.7 else rng.choice(["truncated", "fault", "truncated", "infra"])
        key = f"rollouts/{id}.msgpack"
        if purpose != "train":
            (run / "store" / "rollouts").mkdir(parents=True, exist_ok=True)
            (run / "store" / key).write_bytes(encode(rollout(id, purpose, solved)))
        orchestrator.log(
            "rollout", rollout=id, group="g", task="total/17", purpose=purpose, outcome=outcome, solved=solved, key=key,
            reward=float(solved), oldest_version=version, newest_version=version, tokens=300, turns=4, seconds=1.2,
            engine=ENGINES[cluster], behaviour={"read": 1.0, "tested": 1.0, "retried": float(rng.random() < 0.3)},
        )  # fmt: skip

    def evaluation(name: str, split: str, version: int, rate: float, tasks: int, attempts: int, t: float) -> None:
        solved = [sum(rng.random() < (rate + d) for _ in range(attempts)) for d in _spread(rng, tasks)]
        mean = sum(solved) / tasks / attempts
        behaviour = {"read": 0.8 + rate / 4, "tested": 0.3 + rate / 2, "retried": 0.1 + rate / 3, "calls": 4.0}
        for _ in range(20):
            ended(name, version, rng.random() < mean)
        clock.now += tasks * attempts / 60
        orchestrator.log(
            "eval", name=name, split=split, version=version, temperature=t, tasks=tasks, attempts=attempts,
            solved=solved, valid=[attempts] * tasks, ids=[f"{split}/{n}" for n in range(tasks)],
            behaviour=behaviour, outcomes={"scored": tasks * attempts},
        )  # fmt: skip

    def evaluations(phase: str, version: int, rate: float) -> None:
        evaluation(f"{phase}-heldout", "heldout", version, rate, 200, 4, 1.0)
        evaluation(f"{phase}-new_templates", "new_templates", version, 0.5 * rate, 100, 4, 1.0)
        evaluation(f"{phase}-heldout-greedy", "heldout", version, rate + 0.1, 200, 1, 0.0)
        evaluation(f"{phase}-new_templates-greedy", "new_templates", version, 0.5 * rate + 0.05, 100, 1, 0.0)

    def swap(cluster: str, version: int) -> None:
        pause = rng.gauss(0.014, 0.003)
        swaps.log(
            "swap", cluster=cluster, version=version, form="delta", bytes=5e5, fetch_s=0.02, apply_s=0.06, pause_s=pause
        )

    launcher.log("stage", name="starting")
    launcher.log(
        "service", name="cluster-0-engine", url=ENGINES["cluster-0"], pid=1, role="engine", cluster="cluster-0"
    )
    clock.now += 9
    trainer.log("publish", version=0, form="anchor", bytes=2_260_000, bytes_full=2_260_000, changed=1.0, seconds=0.1)
    swap("cluster-0", 0)
    launcher.log("stage", name="evaluation before")
    evaluations("before", 0, 0.35)
    launcher.log("stage", name="training")
    for version in range(1, steps + 1):
        rate = 0.35 + 0.3 * (1 - 2.7 ** (-3 * version / steps))
        wait, compute = (3.0 if version == 1 else abs(rng.gauss(0.3, 0.3))), rng.gauss(3.0, 0.25)
        begun = clock.now
        clusters = ["cluster-0"] if version <= 4 else list(ENGINES)
        for index in range(int((wait + compute) / 0.5)):
            for cluster in clusters:
                logs[f"{cluster}-engine"].log(
                    "busy",
                    start=begun + index / 2,
                    end=begun + index / 2 + 0.5,
                    what="engine",
                    share=rng.uniform(0.7, 1),
                )
            logs["worker-0"].log(
                "busy",
                start=begun + index / 2,
                end=begun + index / 2 + 0.5,
                what="rollouts",
                share=rng.uniform(0.6, 0.9),
            )
        trainer.log("busy", start=begun, end=begun + wait, what="wait")
        trainer.log("busy", start=begun + wait, end=begun + wait + compute, what="compute")
        clock.now += wait + compute
        ages = [rng.choice([0, 1, 1, 1, 2]) for _ in range(128)]
        solved = [rng.random() < rate for _ in ages]
        for age, good in zip(ages, solved):
            ended("train", max(0, version - 1 - age), good, rng.choice(clusters))
        trainer.log(
            "step", version=version, rollouts=128, groups=8, tokens=38_000, trained_tokens=14_000, loss=0.01,
            solve_rate=sum(solved) / 128, reward=rate, grad_norm=0.4, lr=6e-4, entropy=0.3, ratio_mean=1.0,
            ratio_max=1.9, clipped=0.01, staleness=ages, dropped_equal=1,
            seconds={"wait": wait, "load": 0.05, "compute": compute, "publish": 0.02},
        )  # fmt: skip
        anchor = version % 20 == 0
        trainer.log("busy", start=clock.now, end=clock.now + 0.3, what="publish")
        trainer.log(
            "publish", version=version, form="anchor" if anchor else "delta", bytes=2_260_000 if anchor else
            rng.randint(480_000, 620_000), bytes_full=2_260_000, changed=0.6, seconds=0.3,
        )  # fmt: skip
        if version == 3:
            launcher.log(
                "service", name="cluster-1-engine", url=ENGINES["cluster-1"], pid=2, role="engine", cluster="cluster-1"
            )
        for cluster in clusters:
            swap(cluster, version)
        if version % 4 == 0:
            trainer.log(
                "mismatch", version=version, tokens=9000, k1=1e-6, k3=rng.uniform(1, 3) * 1e-7,
                k3_without_replay=rng.uniform(1, 4) * 1e-4, max_dlogp=1e-3, max_dlogp_without_replay=0.4,
                disagreement=0.004, coverage=0.99,
            )  # fmt: skip
        if version % 10 == 0 and version < steps:
            evaluation(f"during-{version:06d}", "heldout", version, rate, 64, 1, 1.0)
    launcher.log("stage", name="evaluation after")
    evaluations("after", steps, 0.35 + 0.3 * 0.95)
    launcher.log("stage", name="done")
    return run


def _spread(rng: random.Random, tasks: int) -> list[float]:
    """Tasks differ in difficulty; their mean is that of the split."""
    spread = [rng.uniform(-0.3, 0.3) for _ in range(tasks)]
    return [value - sum(spread) / tasks for value in spread]


@pytest.fixture(scope="session")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_run(tmp_path_factory.mktemp("runs") / "synthetic")


@pytest.fixture
def make_rollout() -> Callable[[str, str, bool], Rollout]:
    """(id, purpose, solved) -> a rollout with a conversation."""
    return rollout
