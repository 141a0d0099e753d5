"""`stretto tasks check DIR`: admission of a folder of tasks, as a table or as JSON."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

from stretto.grading.attack import Library
from stretto.tasks.admission import Checked, check_all, task_roots

if TYPE_CHECKING:
    from rich.console import Console


def check(root: Path, attacks: Path | None, times: int, as_json: bool, console: Console) -> bool:
    """Whether every task is admitted. Raises TaskError and AttackError."""
    library = Library.load(attacks)
    started = time.monotonic()

    def tell(checked: Checked) -> None:
        if not as_json:
            mark = "[red]quarantined[/]" if checked.reason else "admitted"
            console.print(f"{mark}  {Path(checked.folder).name}  ({checked.seconds:.1f} s)", soft_wrap=True)

    found = asyncio.run(check_all(task_roots(root), library, times, tell))
    refused = [checked for checked in found if checked.reason]
    if as_json:
        print(json.dumps(summary(found, len(library), times, time.monotonic() - started), indent=1))
    else:
        show(found, refused, console)
    return not refused


def summary(found: list[Checked], attacks: int, times: int, seconds: float) -> dict[str, object]:
    """What `--json` prints."""
    return {
        "tasks": len(found),
        "admitted": sum(not checked.reason for checked in found),
        "quarantined": {checked.folder: checked.reason for checked in found if checked.reason},
        "attacks": attacks,
        "times": times,
        "gradings": sum(checked.grades for checked in found),
        "seconds": round(seconds, 1),
        "checked": [
            {
                "id": checked.task,
                "folder": checked.folder,
                "admitted": not checked.reason,
                "reason": checked.reason,
                "gradings": checked.grades,
                "seconds": round(checked.seconds, 2),
                "voided": checked.detected,
            }
            for checked in found
        ],
    }


def show(found: list[Checked], refused: list[Checked], console: Console) -> None:
    from rich.markup import escape
    from rich.table import Table

    kinds = Counter(checked.reason.partition(":")[0] for checked in refused)
    counts = "".join(f", {number} {kind}" for kind, number in kinds.items())
    console.print(f"{len(found) - len(refused)} of {len(found)} tasks admitted{counts}")
    if refused:
        table = Table("task", "reason", box=None)
        for checked in refused:
            table.add_row(escape(Path(checked.folder).name), escape(checked.reason))
        console.print(table)
        console.print("They are named in quarantine.json beside them; no run takes them until they pass.")
