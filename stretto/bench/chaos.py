"""`stretto bench chaos`: random processes of a real run are killed with -9, again and again; nothing may be lost.

Two runs of the same configuration and seed, one after the other: one in peace, and one in which trainer, engines,
workers, orchestrator and followers are killed at random moments while it trains. At its end every prompt must have been
trained exactly once or be accounted for, no token may have been too old, every published version must be intact, the
solve rate on held-out tasks must be that of the peaceful run, and nothing may be left of any process or sandbox.

The kills are spread over the steps, so that each of them meets a run that goes on. What it does not do: take whole
machines, disks or networks away.
"""

from __future__ import annotations

import contextlib
import json
import math
import os
import random
import shutil
import signal
import sqlite3
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from rich.console import Console
from rich.table import Table

from stretto.launch.run_folder import unfinished
from stretto.records import Batch, decode
from stretto.rollouts.census import census
from stretto.sandbox.premises import PREFIX
from stretto.watch.metrics import read
from stretto.weights.inspect import chain_ids, verify
from stretto.weights.store import Store

SETTINGS = [
    "rollouts.groups_per_step=4",
    "rollouts.group_size=4",
    "rollouts.workers=2",
    "rollouts.concurrency=24",
    "engine.slots=48",
    "tasks.train=2000",
    "tasks.heldout=48",
    "tasks.new_templates=0",
    "trainer.checkpoint_every=1",
    "trainer.lr=3e-4",
    "trainer.mismatch_every=0",
    "eval.attempts=2",
    "eval.every=0",
    "launch.late_join_version=0",
    "launch.restarts=100000",
]
STEPS = 50
GONE_SECONDS = 10.0
"""After the end of the run, whatever it had started must be gone within this time."""
STUCK_SECONDS = 240.0
"""A run whose version has not grown for so long is ended and counts as failed."""


@dataclass
class Run:
    """What became of one run."""

    folder: Path
    code: int | None = None
    seconds: float = 0.0
    kills: Counter[str] = field(default_factory=Counter)  # by role
    left: list[str] = field(default_factory=list)  # processes, control groups, folders and files that outlived it
    said: str = ""  # its last words


def chaos(kills: int, seed: int, json_file: Path | None, console: Console, steps: int = STEPS) -> bool:
    """Run both, of `steps` steps each, and compare; True when every check holds. The folders are removed unless
    something failed."""
    folder = Path(tempfile.mkdtemp(prefix="stretto-chaos-"))
    console.print(f"Two runs of {steps} steps, the second with {kills} kills; logs in {folder}")
    peace = turn(folder, "peace", steps, 0, seed, SETTINGS)
    console.print(f"  in peace: {peace.seconds:.0f} s")
    war = turn(folder, "chaos", steps, kills, seed, SETTINGS)
    console.print(f"  with {sum(war.kills.values())} kills: {war.seconds:.0f} s")
    result = {"kills": sum(war.kills.values()), "steps": steps, "seed": seed}
    result |= {"peace": account(peace), "chaos": account(war)}
    result["checks"] = checks(result, kills)
    console.print(_table(result))
    if json_file is not None:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
    good = all(check["ok"] for check in result["checks"].values())
    if good:
        shutil.rmtree(folder)
    else:
        console.print(f"Something did not hold; everything is kept in {folder}", style="bold red")
    return good


def turn(folder: Path, name: str, steps: int, kills: int, seed: int, settings: list[str]) -> Run:
    """One whole run of `stretto train`, with `kills` kills spread over its steps."""
    run = Run(folder / "runs" / name)
    words = [*settings, f"trainer.steps={steps}", f"run.seed={seed}"]
    command = [sys.executable, "-m", "stretto.cli", "train", "--name", name, *words]
    draw = random.Random(seed)
    due = sorted(draw.uniform(0.0, steps - 1.0) for _ in range(kills))  # in versions
    started = time.monotonic()
    witness = Witness(run.folder)
    with (folder / f"{name}.log").open("w+") as output:
        process = subprocess.Popen(command, cwd=folder, stdout=output, stderr=subprocess.STDOUT)
        try:
            version, moved = -1.0, time.monotonic()
            while process.poll() is None:
                time.sleep(0.05)
                now = witness.progress()
                if now != version:
                    version, moved = now, time.monotonic()
                if time.monotonic() - moved > STUCK_SECONDS:
                    break
                while due and witness.training and due[0] <= version + draw.random():
                    role = witness.kill(draw)
                    if role is not None:  # else all of them are dead at the moment
                        due.pop(0)
                        run.kills[role] += 1
                    time.sleep(draw.expovariate(2.0))
        finally:
            if process.poll() is None:
                process.send_signal(signal.SIGINT)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(60)
                process.kill()
        run.code = process.wait()
        output.seek(0)
        run.said = output.read()[-2000:]
    run.seconds = time.monotonic() - started
    run.left = witness.left()
    return run


class Witness:
    """Sees from outside how a run goes on, kills its processes, and remembers all that ever belonged to it."""

    def __init__(self, run: Path) -> None:
        self.run = run
        self.training = False
        self._seen: dict[int, psutil.Process] = {}
        self._folders: set[str] = set()  # of sandboxes, on the host
        self._looked = 0.0
        self._version = -1

    def progress(self) -> float:
        """The version reached; also looks who is there, a few times a second."""
        if time.monotonic() - self._looked > 0.3:
            self._looked = time.monotonic()
            lines = read(self.run / "metrics.jsonl")
            stages = [line["name"] for line in lines if line["kind"] == "stage"]
            self.training = stages[-1:] == ["training"]
            self._version = max((line["version"] for line in lines if line["kind"] == "step"), default=-1)
            for child in self.children().values():
                self._remember(child["pid"])
        return max(self._version, 0) if self.training else self._version - 0.5

    def kill(self, draw: random.Random) -> str | None:
        """Kill one of the processes that live; its role. None when there is none."""
        children = self.children()
        living = sorted(name for name, child in children.items() if _lives(child["pid"]))
        if not living:
            return None
        child = children[draw.choice(living)]
        self._remember(child["pid"])
        try:
            os.kill(child["pid"], signal.SIGKILL)
        except ProcessLookupError:
            return None
        return str(child["role"])

    def left(self) -> list[str]:
        """What is still there after the end."""
        _, alive = psutil.wait_procs(list(self._seen.values()), timeout=GONE_SECONDS)
        names = [f"process {process.pid}" for process in alive if process.is_running()]
        pids = {str(pid) for pid in self._seen}
        for group in Path("/sys/fs/cgroup").glob("**/stretto-*-*"):  # stretto-<pid of the worker>-<number>
            if group.name.split("-")[1] in pids:
                names.append(f"control group {group}")
        names += [f"folder {folder} of a sandbox" for folder in sorted(self._folders) if Path(folder).exists()]
        names += [f"unfinished {path}" for path in unfinished(self.run, str(self.run / "store"))]
        mounts = Path("/proc/mounts")
        if mounts.exists() and str(self.run) in mounts.read_text():
            names.append(f"a mount below {self.run}")
        return names

    def children(self) -> dict[str, dict[str, Any]]:
        try:
            return json.loads((self.run / "pids.json").read_text())["children"]
        except (OSError, ValueError):
            return {}

    def _remember(self, pid: int) -> None:
        """This process and those it started: the spawner of a worker, its boxes."""
        with contextlib.suppress(psutil.Error):
            process = psutil.Process(pid)
            for member in (process, *process.children(recursive=True)):
                self._seen.setdefault(member.pid, member)
        with contextlib.suppress(OSError):  # a worker holds a lock on the folder of its sandboxes
            links = [os.readlink(link) for link in Path(f"/proc/{pid}/fd").iterdir()]
            self._folders |= {link for link in links if Path(link).name.startswith(PREFIX)}


def _lives(pid: int) -> bool:
    try:
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    except psutil.Error:
        return False


def account(run: Run) -> dict[str, Any]:
    """The books of a run, from its ledger, its store and its summary."""
    ledger, store = run.folder / "ledger.sqlite", Store(run.folder / "store")
    lines = read(run.folder / "metrics.jsonl")
    counts = census(ledger)
    tree: dict[str, Any] = {
        "code": run.code,
        "seconds": round(run.seconds, 1),
        "kills": dict(run.kills),
        "left": run.left,
        "said": run.said if run.code else "",
        "ledger": counts,
        "restarts": sum(bool(line.get("restarts")) for line in lines if line["kind"] == "service"),
        "alarms": [line["text"] for line in lines if line["kind"] == "event" and line.get("alarm")],
        "solve_rate": None,
        "solve_rate_se": None,
    }
    if counts is None:
        return tree
    ordinals = counts["ordinals"]
    known = sum(ordinals[state] for state in ("open", "ready", "batched", "trained"))
    trained = [item.rollout for batch in _batches(ledger) for item in batch.items]
    slots = [rollout.partition("r")[0] for rollout in trained]  # without the number of the attempt
    ages = [age for batch in _batches(ledger) for age in batch.staleness]
    summary = json.loads((run.folder / "summary.json").read_text()) if (run.folder / "summary.json").exists() else {}
    tree |= {
        "unaccounted": ordinals["opened"] - known - sum(ordinals["dropped"].values()) + _holes(ledger),
        "trained_twice": len(slots) - len(set(slots)),
        "staleness_max_over_bound": max(ages, default=0) - _bound(run.folder),
        "chains": len(chain_ids(store)),
        "broken_versions": [problem for chain in chain_ids(store) for problem in verify(store, chain)],
        "train_s": summary.get("train_s"),
    }
    rate = summary.get("solve_rate") or {}
    if rate.get("after") is not None:
        low, high = rate["after_ci95"]
        tree |= {"solve_rate": rate["after"], "solve_rate_se": (high - low) / 2 / 1.96}
    return tree


def checks(result: dict[str, Any], kills: int) -> dict[str, dict[str, Any]]:
    """Each statement with what was found, the limit, and whether it holds."""
    war, peace = result["chaos"], result["peace"]
    most = {  # each must be found, and be no more than this
        "exit_code": (war["code"], 0),
        "unaccounted_prompts": (war.get("unaccounted"), 0),
        "rollouts_trained_twice": (war.get("trained_twice"), 0),
        "staleness_max_over_bound": (war.get("staleness_max_over_bound"), 0),
        "broken_versions": (None if "broken_versions" not in war else len(war["broken_versions"]), 0),
        "chains": (war.get("chains"), 1),
        "left_over": (len(war["left"]), 0),
    }
    found = {"kills": {"value": result["kills"], "limit": kills, "ok": result["kills"] >= kills}}
    for name, (value, limit) in most.items():
        found[name] = {"value": value, "limit": limit, "ok": value is not None and value <= limit}
    gap, noise = None, None
    if war["solve_rate"] is not None and peace["solve_rate"] is not None:
        gap = round(war["solve_rate"] - peace["solve_rate"], 4)
        noise = round(2.0 * math.hypot(war["solve_rate_se"], peace["solve_rate_se"]), 4)
    found["solve_rate_gap"] = {
        "value": gap,
        "limit": noise,  # two standard errors of the difference
        "ok": gap is not None and noise is not None and abs(gap) <= noise,
    }
    return found


def _batches(ledger: Path) -> list[Batch]:
    with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        return [decode(record, Batch) for (record,) in db.execute("SELECT record FROM batches ORDER BY version")]


def _holes(ledger: Path) -> int:
    """Ordinals that were skipped, or opened twice."""
    with contextlib.closing(sqlite3.connect(f"file:{ledger}?mode=ro", uri=True)) as db:
        ordinals = [ordinal for (ordinal,) in db.execute("SELECT ordinal FROM groups WHERE evaluation='train'")]
    return len(set(range(len(ordinals))) ^ set(ordinals)) + len(ordinals) - len(set(ordinals))


def _bound(run: Path) -> int:
    from stretto.config import load_run

    return load_run(run).rollouts.max_staleness


def _table(result: dict[str, Any]) -> Table:
    table = Table(title=f"{result['kills']} kills over {result['steps']} steps")
    table.add_column("")
    for name in ("peace", "chaos"):
        table.add_column(name, justify="right")

    def row(name: str, value: Any) -> None:
        table.add_row(name, *(str(value(result[side])) for side in ("peace", "chaos")))

    row("seconds", lambda side: f"{side['seconds']:.0f}")
    row("killed", lambda side: ", ".join(f"{n} {role}" for role, n in sorted(side["kills"].items())) or "–")
    row("prompts trained", lambda side: (side["ledger"] or {}).get("ordinals", {}).get("trained"))
    row("prompts dropped", lambda side: (side["ledger"] or {}).get("ordinals", {}).get("dropped") or "–")
    row("leases lapsed", lambda side: (side["ledger"] or {}).get("leases", {}).get("lapsed"))
    row("rollouts moved", lambda side: (side["ledger"] or {}).get("leases", {}).get("moved"))
    row("solve rate", lambda side: "–" if side["solve_rate"] is None else f"{side['solve_rate']:.1%}")
    table.add_section()
    for name, check in result["checks"].items():
        limit = "" if check["limit"] is None else f" (limit {check['limit']:g})"
        table.add_row(name, "holds" if check["ok"] else "[red]DOES NOT HOLD[/red]", f"{check['value']}{limit}")
    return table
