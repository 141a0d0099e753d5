"""`stretto train`: a whole run on this machine, from a configuration to a report.

    starting ─▶ evaluation before ─▶ training ─▶ evaluation after ─▶ report
                                     │ late clusters join, short evaluations in between

The training itself happens in the services; this process starts them, watches them, starts again those that die, and
asks the orchestrator for evaluations. What must survive it lies in metrics.jsonl, the ledger and the checkpoints.

Whatever dies is started again with the same name, port and command, and finds its place by itself: the orchestrator in
the ledger, the trainer in its checkpoint and the batches, a follower in the chain; an engine gets weights from its
follower before it serves, and a worker leases anew. Only the launcher knows at once that a worker is dead: it says so.
"""

from __future__ import annotations

import asyncio
import errno
import itertools
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from stretto.config import Config
from stretto.engine.client import EngineError
from stretto.engine.fit import fitting, whole
from stretto.engine.probe import RoutesMissing, probe
from stretto.grading.oracle import try_references
from stretto.launch import evaluations, run_folder
from stretto.launch.client import Evaluation, Orchestrator, Refused, Unanswered
from stretto.launch.inquiry import Inquiry
from stretto.launch.local import Child, LaunchError, Processes, free_port, service
from stretto.launch.restarts import Restarts
from stretto.launch.vigil import Vigil
from stretto.model.spec import load_spec
from stretto.sandbox import check
from stretto.watch import report, summary
from stretto.watch.display import Display
from stretto.watch.metrics import Metrics, Tail, read
from stretto.watch.shares import Shares
from stretto.weights.store import Store

STALLED_SECONDS = 300.0
"""A run in which for so long no rollout ends and no version appears is ended."""


def train(config: Config, console: Console, resume: bool = False) -> dict[str, Any]:
    """Run to `trainer.steps` versions and return the summary. `resume`: the folder exists and goes on.

    Raises RunError, SandboxUnavailable or LaunchError with a sentence; KeyboardInterrupt when the user stops it.
    """
    check.require(config.sandbox.backend)
    Store(config.store_url)  # a mistake in its URL, or in the user's tasks, is found before there is a run
    fitting(config.model.folder, config.engine)  # and one in the model's folder
    whole(config.model.folder)
    own = run_folder.own_tasks(config) if not resume else None
    if own:
        asyncio.run(try_references(itertools.chain.from_iterable(own.values()), config.grading, config.sandbox))
    run = config.run_dir if resume else run_folder.create(config)
    with run_folder.locked(run), interruptible(), Metrics(run / "metrics.jsonl", "launcher") as metrics:
        if config.tasks.source != "repair":  # generated ones are laid while the services start
            run_folder.lay_tasks(config, run, own)
        sizes = run_folder.sizes(config, run)
        with Display(config, run, console, evaluations.held(sizes)) as display:
            launch = _Run(config, run, sizes, display, metrics)
            try:
                _explained(launch, run)
            except LaunchError as error:
                with suppress(OSError):
                    metrics.log("event", text=" ".join(str(error).split()), alarm=True, final=True)
                raise
            finally:
                launch.stop()
                run_folder.sweep(config)
            launch.stage("report")
            result = summary.write(run)
            report.write(run)
        metrics.log("stage", name="done")
    return result


def _explained(launch: _Run, run: Path) -> None:
    """`launch.go`, with a LaunchError for whatever ends it early."""
    try:
        launch.go()
    except Unanswered as error:
        time.sleep(0.5)
        launch.processes.check()  # if somebody is dead, that is the reason
        raise LaunchError(str(error)) from error
    except OSError as error:
        if error.errno != errno.ENOSPC:
            raise
        raise LaunchError(f"no space is left below {run}: make room first") from error


@contextmanager
def interruptible() -> Iterator[None]:
    """SIGTERM and SIGHUP end the block as Ctrl-C does, also where SIGINT was ignored (a shell's background job)."""

    def interrupt(number: int, frame: object) -> None:
        raise KeyboardInterrupt

    before = {number: signal.signal(number, interrupt) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@dataclass
class _Cluster:
    name: str
    engine: Child
    follower: Child | None = None
    chain: str = ""  # what the follower follows


class _Run:
    """One launch: `go` returns when the evaluation after training is done; `stop` ends every process."""

    def __init__(self, config: Config, run: Path, sizes: dict[str, int], display: Display, metrics: Metrics) -> None:
        self.config = config
        self.run = run
        self.sizes = sizes  # tasks by split
        self.display = display
        self.metrics = metrics
        self.clusters: list[_Cluster] = []
        launch = config.launch
        restarts = Restarts(launch.restarts, launch.restart_seconds)
        self.processes = Processes(run, launch.start_seconds, self._log_start, self._log_death, restarts)
        self._vigil = Vigil(launch.silent_seconds, launch.start_seconds)
        self._healing = False  # from when every service has come up once
        self._shares, self._tail = Shares(), Tail(run / "metrics.jsonl")
        self._inquiry = Inquiry()
        self._looked = 0.0
        self._moved = time.monotonic()
        self._position: tuple[int, int] = (-1, -1)

    def go(self) -> None:
        self.stage("starting")
        with ThreadPoolExecutor(1) as pool:  # services load meanwhile
            laid = pool.submit(run_folder.lay_tasks, self.config, self.run)
            self._start(laid)
        laid.result()
        if not self.sizes.get("heldout"):
            what = "only new_templates is" if self.sizes.get("new_templates") else "nothing is"
            self.metrics.log("event", text=f"no tasks are held out, so {what} evaluated before and after training")
        done = evaluations.finished(read(self.run / "metrics.jsonl"), "before")
        before = evaluations.full(self.config, self.sizes, "before", done)
        if before:
            self.stage("evaluation before")
            self._evaluate(before)
        self.stage("training")
        self._train()
        after = evaluations.full(self.config, self.sizes, "after")
        if after:
            self.stage("evaluation after")
            self._evaluate(after)

    def stop(self) -> None:
        with suppress(OSError):  # a full disk must not keep the processes alive, nor hide the reason
            self.metrics.log("stage", name="stopping")
        self.processes.stop()
        self._vigil.close()
        self._inquiry.close()

    def stage(self, name: str) -> None:
        self.metrics.log("stage", name=name)
        self.display.stage(name)

    # Starting

    def _start(self, laid: Future[None]) -> None:
        config = self.config
        orchestrator = self._service("orchestrator", "orchestrator", {}, listens=True)
        self.processes.wait_ready([orchestrator], self.display.refresh)
        self.orchestrator = Orchestrator(str(orchestrator.url))
        self.orchestrator.pause()
        url = self.orchestrator.url
        self.trainer = self._service(
            "trainer", "trainer", {"orchestrator": url}, threads=config.trainer.threads, may_finish=True
        )
        for _ in range(1 if config.launch.late_join_version else config.launch.clusters):
            self._join()
        for index in range(config.rollouts.workers):
            name = f"worker-{index}"
            self._service(name, "worker", {"name": name, "orchestrator": url})
        self._until(
            lambda: laid.done() and bool(self.status.get("engines")),
            "no engine serves a version: the trainer publishes the first one, a follower delivers it",
            blame=self.trainer,
        )
        self._probe()
        self._healing = True

    def _probe(self) -> None:
        """With replay on, the engines must return routes: one token of each shows it."""
        spec = load_spec(self.config.model.folder)
        if not self.config.trainer.replay or not spec.moe_layers:
            return
        for engine in self.status["engines"]:
            try:
                asyncio.run(probe(engine["url"], spec.route_shape, spec.experts))
            except (RoutesMissing, EngineError) as error:
                raise LaunchError(f"{error}") from error

    def _join(self) -> None:
        """Start the next cluster: its engine now, its follower once the engine answers (`_follow`)."""
        name = f"cluster-{len(self.clusters)}"
        flags = {"name": f"{name}-engine", "model": self.config.model.folder, "version": -1}
        engine = self._service(
            f"{name}-engine", "engine", flags, listens=True, threads=self.config.engine.threads, cluster=name
        )
        self.clusters.append(_Cluster(name, engine))

    def _join_late(self) -> None:
        launch = self.config.launch
        while len(self.clusters) < launch.clusters and self.version >= launch.late_join_version:
            self._join()

    def _follow(self) -> None:
        """Start followers, and bring them to another chain when the trainer could not go on with the one there was."""
        chain = self.status.get("chain")
        for cluster in self.clusters:
            if not chain or cluster.chain == chain:
                continue
            flags = {
                "name": f"{cluster.name}-follower",
                "store": self.config.store_url,
                "chain": chain,
                "cluster": cluster.name,
                "engines": cluster.engine.url,
                "orchestrator": self.orchestrator.url,
                "cache": self.run / "cache" / cluster.name,
            }
            if cluster.follower is not None:
                self.processes.again(cluster.follower, service("follower", run=self.run, **flags))
            elif self.processes.answers(cluster.engine):
                cluster.follower = self._service(f"{cluster.name}-follower", "follower", flags, cluster=cluster.name)
            else:
                continue
            cluster.chain = chain

    def _service(
        self,
        name: str,
        role: str,
        flags: dict[str, Any],
        listens: bool = False,
        threads: int = 1,
        may_finish: bool = False,
        cluster: str | None = None,
    ) -> Child:
        url = None
        if listens:
            host, port = self.config.launch.host, free_port(self.config.launch.host)
            flags = {**flags, "host": host, "port": port}
            url = f"http://{host}:{port}"
        command = service(role, run=self.run, **flags)
        return self.processes.start(name, command, url, threads, may_finish, role=role, cluster=cluster)

    def _log_start(self, child: Child) -> None:
        pid, restarts = child.process.pid, child.restarts
        self.metrics.log("service", name=child.name, url=child.url, pid=pid, restarts=restarts, **child.details)

    def _log_death(self, child: Child) -> None:
        said = child.last_lines().strip().splitlines()[-1] if (child.exit_code or 0) > 0 else ""
        why = f" ({said})" if said else ""
        self.metrics.log("event", text=f"{child.name} {child.end()}{why} and is started again")
        if child.details.get("role") == "worker":
            with suppress(Unanswered):  # it restarts too: it finds out from the worker's heartbeats
                self.orchestrator.worker_left(child.name)

    # Waiting

    def _tick(self) -> None:
        """Look after everything once; about ten times a second. Waits for nobody."""
        self._inquiry.poll(self.orchestrator)
        hung = self._vigil.look(self.processes.children, self._inquiry.fresh)
        if self._healing:
            for child, why in hung:
                self.processes.kill(child, why)
            self.processes.revive()
        else:
            self.processes.check()
        if time.monotonic() - self._looked > 0.25:
            self._looked = time.monotonic()
            self._follow()
            for record in self._shares.absorb(self._tail.read()):
                self.metrics.log("shares", **record)
        self.display.update(self.status)
        self.display.refresh()
        time.sleep(0.1)

    def _patiently(self, call: Callable[[], Any]) -> Any:
        """The answer to a request that may be repeated; while the orchestrator is started again, the run is watched."""
        while True:
            try:
                return call()
            except Refused:
                raise
            except Unanswered:
                self._tick()

    def _until(self, condition: Callable[[], bool], complaint: str, blame: Child) -> None:
        deadline = time.monotonic() + self.config.launch.start_seconds
        while not condition():
            self._tick()
            if time.monotonic() > deadline:
                raise LaunchError(
                    f"{complaint} ({self.config.launch.start_seconds:g} s, launch.start_seconds). "
                    f"Last lines of {blame.name} ({blame.log}):\n{blame.last_lines()}"
                )

    def _moving(self, finished: int) -> None:
        """Raise when neither the version nor the number of finished rollouts has changed for too long."""
        position = (self.version, finished)
        if position != self._position:
            self._position, self._moved = position, time.monotonic()
        limit = STALLED_SECONDS + self.config.rollouts.deadline_seconds
        if time.monotonic() - self._moved > limit:
            raise LaunchError(
                f"nothing has moved for {limit:g} s at version {self.version}; "
                f"the logs are in {self.run / 'logs'}, the orchestrator says {self.status}"
            )

    @property
    def status(self) -> dict[str, Any]:
        """What the orchestrator said last."""
        return self._inquiry.status

    @property
    def version(self) -> int:
        version = self.status.get("version")
        return -1 if version is None else int(version)

    # Evaluating and training

    def _evaluate(self, plan: Sequence[Evaluation]) -> None:
        """Run evaluations side by side until all are done."""
        running = {
            self._patiently(lambda e=evaluation: self.orchestrator.evaluate(e)): evaluation for evaluation in plan
        }
        finished = dict.fromkeys(running, 0)
        total = dict.fromkeys(running, 0)
        asked = 0.0
        while running:
            self._tick()
            if time.monotonic() - asked < 0.5:
                continue
            asked = time.monotonic()
            for id in list(running):
                try:
                    answer = self.orchestrator.evaluation(id)
                except Unanswered:
                    break  # the next tick finds out whether it is dead, silent for too long, or only slow
                finished[id], total[id] = answer["finished"], answer["total"]
                if answer["done"]:
                    del running[id]
            self.display.evaluating(sum(finished.values()), sum(total.values()))
            self._moving(sum(finished.values()))

    def _train(self) -> None:
        config, steps = self.config, self.config.trainer.steps
        asked: set[str] = set(evaluations.finished(read(self.run / "metrics.jsonl"), "during"))
        self._patiently(self.orchestrator.start)
        while self.version < steps:
            self._tick()
            self._moving(self.display.state.answered)
            self._join_late()
            due = evaluations.during(config, self.sizes, self.version, asked)
            if due:
                asked.add(due.name)
                self._patiently(lambda due=due: self.orchestrator.evaluate(due))
            if self.trainer.exit_code == 0 and self._patiently(self.orchestrator.status)["version"] < steps:
                raise LaunchError(
                    f"the trainer ended at version {self.version} of {steps}. Its last lines "
                    f"({self.trainer.log}):\n{self.trainer.last_lines()}"
                )
        self._patiently(self.orchestrator.pause)
        self._join_late()  # a very short run may be over before anybody has looked
        self._until(lambda: self.trainer.exit_code == 0, "the trainer does not end", blame=self.trainer)
        for cluster in self.clusters:
            self._until(
                lambda name=cluster.name: served(self.status).get(name, -1) >= steps,
                f"{cluster.name} has not taken version {steps}",
                blame=cluster.follower or cluster.engine,
            )


def served(status: dict[str, Any]) -> dict[str, int]:
    """Version each cluster serves, out of the orchestrator's status."""
    return {engine["cluster"]: int(engine["version"]) for engine in status.get("engines", [])}
