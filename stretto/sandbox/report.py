"""What `stretto sandbox probe` prints."""

from __future__ import annotations

import json

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from stretto.sandbox.check import SandboxUnavailable
from stretto.sandbox.probe import Row, as_data, probe, refused


def show(as_json: bool, console: Console) -> bool:
    """Make all attempts and print them; whether every required row holds."""
    try:
        rows = probe()
    except SandboxUnavailable as error:
        if not as_json:
            raise
        print(json.dumps({"ok": False, "error": str(error), "rows": []}, indent=2))
        return False
    if as_json:
        print(json.dumps(as_data(rows), indent=2))
    else:
        console.print(table(rows))
        console.print(verdict(rows), markup=False)
    return not refused(rows)


def table(rows: list[Row]) -> Table:
    shown = Table("row", "what holds", "required", "holds", "what got through", title="attempts in real boxes")
    for row in rows:
        holds = "yes" if row.holds else "[red]NO[/red]" if row.required else "[yellow]no[/yellow]"
        shown.add_row(row.name, row.what, "yes" if row.required else "", holds, escape(row.detail))
    return shown


def verdict(rows: list[Row]) -> str:
    if broken := refused(rows):
        return f"Not held: {', '.join(row.name for row in broken)}. Nothing that a policy wrote is run on this machine."
    missing = [row.name for row in rows if not row.holds]
    without = f" Not limited here: {', '.join(missing)}." if missing else ""
    return f"All {sum(row.required for row in rows)} required rows hold.{without}"
