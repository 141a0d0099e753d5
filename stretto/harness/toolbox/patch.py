"""Edits of a text: exact replacement, and unified diffs, whose every hunk is an exact replacement of whole lines. Pure.

Patches by policies have wrong line numbers more often than wrong text, so a hunk is found by its text, the place
nearest to its number first; nothing is matched by similarity.
"""

from __future__ import annotations

import re

from stretto.harness.toolbox.workspace import Refused

Places = list[tuple[int, int]]
"""First and last line of each change, in the new text."""
_HEADER = re.compile(r"^@@ -(\d+)(?:,\d+)? \+\d+(?:,\d+)? @@")
_SHOWN = 10


def replace_text(text: str, old: str, new: str, everywhere: bool, path: str) -> tuple[str, Places]:
    """Raises Refused unless `old` occurs exactly once, or at least once where all are meant."""
    if "\r\n" in text and "\r\n" not in old:
        old, new = old.replace("\n", "\r\n"), new.replace("\n", "\r\n")
    if old == new:
        raise Refused("old and new are the same")
    count = text.count(old)
    if count == 0:
        raise Refused(f"old does not occur in {path}; it must be the same to the last space")
    if count > 1 and not everywhere:
        raise Refused(f"old occurs {count} times in {path}; give more lines around it, or all = true")
    pieces = text.split(old)
    places, line = [], 1
    for piece in pieces[:-1]:
        line += piece.count("\n")
        places.append((line, line + new.rstrip("\n").count("\n")))
        line += new.count("\n")
    return new.join(pieces), places[:_SHOWN]


def apply_patch(text: str, patch: str, path: str) -> tuple[str, Places]:
    """Raises Refused, and changes nothing, unless every hunk's text is found."""
    lines = text.splitlines(keepends=True)
    ending = "\r\n" if "\r\n" in text else "\n"
    places: Places = []
    shift = 0
    for number, (at, old, new) in enumerate(_hunks(patch), 1):
        have = [line.rstrip("\r\n") for line in lines]
        found = [place for place in range(len(have) - len(old) + 1) if have[place : place + len(old)] == old]
        if not found:
            raise Refused(f"hunk {number} does not fit: its lines with ' ' and '-' do not occur in {path}")
        place = min(found, key=lambda place: abs(place - (at - 1 + shift))) if old else max(at - 1 + shift, 0)
        if place > len(lines):
            raise Refused(f"hunk {number} does not fit: {path} has {len(lines)} lines")
        if place and not lines[place - 1].endswith("\n"):
            lines[place - 1] += ending
        lines[place : place + len(old)] = [line + ending for line in new]
        shift += len(new) - len(old)
        places.append((place + 1, place + max(len(new), 1)))
    changed = "".join(lines)
    if text and not text.endswith("\n") and changed.endswith(ending) and not changed.endswith(ending * 2):
        changed = changed.removesuffix(ending)
    if changed == text:
        raise Refused("the patch changes nothing")
    return changed, places[:_SHOWN]


def _hunks(patch: str) -> list[tuple[int, list[str], list[str]]]:
    """(line number, old lines, new lines) of each hunk."""
    hunks: list[tuple[int, list[str], list[str]]] = []
    for line in patch.splitlines():
        header = _HEADER.match(line)
        if header or line.startswith("@@"):
            hunks.append((int(header[1]) if header else 1, [], []))
        elif not hunks or line.startswith("\\"):
            continue  # the names before the first hunk; "No newline at end of file"
        elif line[:1] in ("-", "+", " ", ""):
            mark, content = line[:1] or " ", line[1:]
            if mark in "- ":
                hunks[-1][1].append(content)
            if mark in "+ ":
                hunks[-1][2].append(content)
        else:
            raise Refused(f"the patch can't be read: a line of a hunk begins with {line[:1]!r}, not ' ', '-' or '+'")
    if not hunks:
        raise Refused("the patch has no hunk; a hunk begins with @@ -line,count +line,count @@")
    return hunks
