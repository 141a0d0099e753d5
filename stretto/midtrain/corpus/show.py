"""The counts of a corpus, for people."""

from __future__ import annotations

from typing import Any

from rich.console import Console
from rich.table import Table


def summary(tree: dict[str, Any], console: Console) -> None:
    """The counts of a manifest."""
    table = Table(title="What was read, left out and kept")
    table.add_column("")
    table.add_column("files", justify="right")
    table.add_column("MB", justify="right")
    table.add_row("read", f"{tree['read']['files']:,}", f"{tree['read']['bytes'] / 1e6:.2f}")
    for reason, count in tree["left_out"].items():
        table.add_row(f"  − {reason}", f"{count['files']:,}", f"{count['bytes'] / 1e6:.2f}")
    table.add_row("kept", f"{tree['kept']['files']:,}", f"{tree['kept']['bytes'] / 1e6:.2f}", style="bold")
    console.print(table)
    for what in ("languages", "licences"):
        shares = ", ".join(f"{name} {size / 1e6:.2f} MB" for name, size in list(tree[what].items())[:8])
        console.print(f"{what}: {shares}", markup=False)
    evaluation = tree["evaluation"]
    console.print(f"compared with {evaluation['answers']} solutions and tests of evaluation tasks", markup=False)
