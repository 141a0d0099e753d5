"""What `stretto train` shows while it runs: a live picture in a terminal, plain lines anywhere else.

    with Display(config, run, console) as display:
        display.stage("training")
        display.update(status)     # the orchestrator's GET /status
        display.refresh()          # reads what metrics.jsonl gained, redraws when it is time

The display only reads: nothing in a run waits for it.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from stretto.config import Config
from stretto.watch import conversation, estimate
from stretto.watch.metrics import Tail
from stretto.watch.state import RunState
from stretto.weights.store import Store

STAGES = ("starting", "evaluation before", "training", "evaluation after", "report")
REDRAW_SECONDS = 0.25
PLAIN_SECONDS = 10.0
CONVERSATION_SECONDS = 12.0
_BARS = "▁▂▃▄▅▆▇█"


def opening(config: Config, held: int) -> str:
    """The first line: what will happen, and about how long it takes. `held`: tasks evaluated before and after."""
    model = "the shipped nano model" if config.model.path == "nano" else Path(config.model.path).name
    tasks = "bug-repair tasks" if config.tasks.source == "repair" else f"tasks of {config.tasks.source}"
    evaluated = f"{held} held-out tasks before and after" if held else "no held-out tasks"
    control = (
        " Control run: rewards are shuffled, nothing should be learned." if config.grading.control != "none" else ""
    )
    return (
        f"Training {model} on {tasks}: {config.trainer.steps} steps of {estimate.step_rollouts(config)} rollouts, "
        f"{evaluated}. About {estimate.in_words(estimate.seconds(config, held))}.{control}"
    )


class Display:
    """Live when the console is a terminal. `held` counts the tasks evaluated before and after training; `state` is what
    metrics.jsonl says so far."""

    def __init__(self, config: Config, run: Path, console: Console, held: int) -> None:
        self.config = config
        self.run = run
        self.held = held
        self.store = Store(config.store_url)
        self.console = console
        self.state = RunState()
        self.status: dict[str, Any] = {}
        self._tail = Tail(run / "metrics.jsonl")
        self._stage, self._stage_since = "", time.monotonic()
        self._evaluation = (0, 0)
        self._evaluation_seconds: float | None = None
        self._live = Live(console=console, auto_refresh=False, transient=True) if console.is_terminal else None
        self._drawn = self._said = 0.0
        self._spoken: tuple[Any, ...] = ()
        self._events_seen: Sequence[str] = ()
        self._shown: tuple[float, Panel | None] = (0.0, None)

    def __enter__(self) -> Display:
        self.console.print(Text(opening(self.config, self.held), style="bold"), soft_wrap=not self._live)
        self.console.print(Text(f"Everything goes to {self.run}/; Ctrl-C stops, stretto resume goes on.", style="dim"))
        self.state.absorb(self._tail.read())  # a run that goes on
        self._events_seen = list(self.state.events)
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._live:
            self._live.stop()

    def stage(self, name: str) -> None:
        if self._stage == "evaluation before":
            self._evaluation_seconds = time.monotonic() - self._stage_since
        self._stage, self._stage_since = name, time.monotonic()
        self._evaluation = (0, 0)
        if not self._live:
            self.console.print(f"[{name}]", markup=False)
        self.refresh(force=True)

    def update(self, status: dict[str, Any]) -> None:
        self.status = status

    def evaluating(self, finished: int, total: int) -> None:
        self._evaluation = (finished, total)

    def refresh(self, force: bool = False) -> None:
        now = time.monotonic()
        if not force and now - self._drawn < REDRAW_SECONDS:
            return
        self._drawn = now
        self.state.absorb(self._tail.read())
        self.state.now = max(self.state.now, time.time())
        if self._live:
            self._live.update(self.picture(), refresh=True)
        else:
            self._speak(now)

    def picture(self) -> Panel:
        """The whole live picture."""
        rows: list[Any] = [self._stages(), self._progress(), Text("")]
        rows.append(self._numbers())
        rows += [Text(f"! {alarm}", style="bold red") for alarm in self.state.alarms]
        others = [event for event in self.state.events if event not in self.state.alarms]
        rows += [Text(f"· {event}", style="dim", overflow="ellipsis", no_wrap=True) for event in others]
        talk = self._conversation()
        if talk is not None and self.console.height >= 30:
            rows += [Text(""), talk]
        title = f"stretto · {self.config.run.name}"
        return Panel(Group(*rows), title=title, title_align="left", border_style="dim", padding=(0, 1))

    # Pieces of the picture

    def _stages(self) -> Text:
        line = Text()
        reached = STAGES.index(self._stage) if self._stage in STAGES else 0
        for index, name in enumerate(STAGES):
            style = "green" if index < reached else "bold reverse" if index == reached else "dim"
            line.append(f" {'✓ ' if index < reached else ''}{name} ", style=style)
            line.append(" ")
        return line

    def _progress(self) -> Table:
        done, total, words = self.progress()
        grid = Table.grid(padding=(0, 1))
        grid.add_column(width=40)
        grid.add_column()
        grid.add_row(ProgressBar(total=max(total, 1), completed=done, width=40), Text(words))
        return grid

    def progress(self) -> tuple[int, int, str]:
        """(done, total, sentence) of the current stage, with the time left for the run."""
        left = self.seconds_left()
        about = f", about {estimate.in_words(left)} left" if left is not None else ""
        if self._stage == "training":
            steps = self.config.trainer.steps
            version = max(0, self.state.version)
            return version, steps, f"version {version} of {steps}{about}"
        if self._stage.startswith("evaluation"):
            finished, total = self._evaluation
            return finished, total, f"{finished} of {total or '?'} rollouts{about}"
        return 0, 1, f"{self._stage}{about}"

    def seconds_left(self) -> float | None:
        """For the rest of the run, from what was measured in it where there is something yet."""
        config, state = self.config, self.state
        here = time.monotonic() - self._stage_since
        guess = estimate.evaluation_rollouts(config, self.held) / estimate.ROLLOUTS_PER_SECOND
        step = state.seconds_per_step or estimate.step_rollouts(config) * estimate.STEP_SECONDS_PER_ROLLOUT
        evaluation = self._evaluation_seconds or guess
        finished, total = self._evaluation
        if self._stage.startswith("evaluation"):
            now = here * (total - finished) / finished if finished else evaluation
            return now + (config.trainer.steps * step + now + here if self._stage.endswith("before") else 0)
        if self._stage == "training":
            return (config.trainer.steps - max(0, state.version)) * step + evaluation
        return estimate.seconds(config, self.held) if self._stage == "starting" else None

    def _numbers(self) -> Table:
        state, config = self.state, self.config
        grid = Table.grid(padding=(0, 2))
        grid.add_column(style="dim", no_wrap=True)
        grid.add_column(no_wrap=True, overflow="ellipsis")
        rates = state.solve_rates
        if rates:
            recent = sum(rates[-4:]) / len(rates[-4:])
            line = Text(f"{recent:4.0%}  ", style="bold green")
            line.append(sparkline(rates, 48), style="green")
            grid.add_row("solve rate, training", line)
        if state.before is not None:
            grid.add_row("held-out, before", f"{state.before:.0%}")
        in_flight = self.status.get("in_flight")
        flying = f", {in_flight} in flight" if in_flight is not None else ""
        grid.add_row("rollouts", f"{state.rollouts:,} ({state.rollouts_per_second:.1f}/s{flying})")
        if state.staleness:
            mean = sum(state.staleness) / len(state.staleness)
            bound = config.rollouts.max_staleness
            grid.add_row("staleness", f"mean {mean:.2f}, max {max(state.staleness)} of at most {bound} versions")
        if state.bytes_full:
            grid.add_row("weights per version", self._weights())
        idle = [("trainer", state.idle_trainer), *((name, state.idle(name)) for name in state.engines)]
        said = [f"{name} {share:.0%}" for name, share in idle if share is not None]
        if said:
            grid.add_row("idle", ", ".join(said))
        if state.clusters:
            grid.add_row("clusters", self._clusters())
        return grid

    def _weights(self) -> str:
        state = self.state
        if not state.deltas:
            return f"{size(state.bytes_full)} (first anchor)"
        typical = sorted(state.deltas)[len(state.deltas) // 2]
        return (
            f"{size(typical)} instead of {size(state.bytes_full)}: {state.bytes_full / max(1, typical):.1f} × smaller"
        )

    def _clusters(self) -> str:
        return ", ".join(
            f"{name} at v{cluster.version} (swap {pause(cluster.pause_s)})"
            for name, cluster in sorted(self.state.clusters.items())
        )

    def _conversation(self) -> Panel | None:
        """One rollout that just ended; another every few seconds."""
        shown_at, panel = self._shown
        now = time.monotonic()
        if panel is not None and now - shown_at < CONVERSATION_SECONDS:
            return panel
        room = max(6, min(18, self.console.height - 24))
        for line in reversed(self.state.last_rollouts):
            rollout = conversation.load(self.store, str(line.get("key", "")))
            if rollout is not None and rollout.messages:
                how = conversation.verdict(rollout)
                text = conversation.to_text(rollout, self.console.width - 8, room)
                style = "green" if rollout.solved else "yellow"
                panel = Panel(text, title=f"a rollout · {how[:60]}", title_align="left", border_style=style)
                break
        self._shown = (now, panel)
        return panel

    # Plain lines

    def _speak(self, now: float) -> None:
        state = self.state
        for event in state.events:
            if event not in self._events_seen and self._stage != "report":
                style = "bold red" if event in state.alarms else None
                self.console.print(f"  {event}", markup=False, soft_wrap=True, style=style)
        self._events_seen = list(state.events)
        done, total, words = self.progress()
        spoken = (self._stage, done)
        soon = now - self._said < PLAIN_SECONDS and done < total
        if self._stage not in STAGES[1:4] or spoken == self._spoken or soon or not total:
            return
        self._spoken, self._said = spoken, now
        facts = [words]
        if self._stage == "training" and state.solve_rates:
            recent = state.solve_rates[-4:]
            facts.append(f"solve rate {sum(recent) / len(recent):.0%}")
        facts.append(f"{state.rollouts_per_second:.1f} rollouts/s")
        if state.staleness:
            facts.append(f"staleness at most {max(state.staleness)}")
        if state.deltas:
            facts.append(f"{size(state.deltas[-1])} per version instead of {size(state.bytes_full)}")
        self.console.print("  " + " · ".join(facts), markup=False, soft_wrap=True)


def sparkline(values: Sequence[float], width: int) -> str:
    """The last `width` values as bars, from zero to the largest."""
    shown = values[-width:]
    top = max(shown, default=0.0) or 1.0
    return "".join(_BARS[min(7, max(0, int(value / top * 7.99)))] for value in shown)


def pause(seconds: float) -> str:
    """'13 µs', '0.4 ms', '14 ms'."""
    if seconds < 1e-4:
        return f"{seconds * 1e6:.0f} µs"
    return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"


def size(count: float) -> str:
    """'312 B', '4.7 kB', '2.3 MB', '1.1 GB'."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    raise AssertionError
