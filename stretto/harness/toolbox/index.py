"""Runs inside the box: an index of the workspace's code, and what of it fits a query best. Reads a request as a Python
literal, answers `ok` on a line and the text.

SQLite's full-text search (FTS5) ranks by BM25. Code is cut at definitions; identifiers are also indexed by their words,
so that "parse retry" finds parseRetryAfter and parse_retry. The index lies in /tmp and follows the files by their
times and sizes; one that is damaged is made again.
"""

import os
import re
import sqlite3
import sys

PLACE = "/tmp/.index.sqlite"
MOST_FILES = 20_000
MOST_BYTES = 1 << 19
"""Larger files are data more often than code."""
MOST_DEPTH = 48
LONGEST = 60
"""Lines of one passage."""
PASSED_OVER = {"__pycache__", "node_modules", "venv", "dist", "build"}
DEFINITION = re.compile(
    r"^\s*(?:(?:export|public|private|protected|static|async|pub|abstract|final|default)\s+)*"
    r"(?:def|class|function|func|fn|struct|enum|trait|impl|interface|type|module|sub)\s+([A-Za-z_][\w.]*)"
)
WORD = re.compile(r"[A-Za-z][a-z0-9]*|[A-Z]+(?![a-z])|\d+")


def words(text):
    """Identifiers' words: parseHTTPHeader -> parse HTTP Header."""
    return " ".join(word.lower() for word in WORD.findall(text) if len(word) > 1)


def walk(root):
    """Path, time and size of each file that may hold code."""
    stack, count = [(root, 0)], 0
    while stack:
        folder, depth = stack.pop()
        try:
            with os.scandir(folder) as scan:
                for item in scan:
                    if item.name.startswith(".") or item.is_symlink():
                        continue
                    if item.is_dir():
                        if depth < MOST_DEPTH and item.name not in PASSED_OVER:
                            stack.append((item.path, depth + 1))
                    elif item.is_file():
                        kind = item.stat()
                        count += 1
                        if 0 < kind.st_size <= MOST_BYTES:
                            yield item.path[2:], f"{kind.st_mtime_ns}.{kind.st_size}"
                        if count >= MOST_FILES:
                            return
        except OSError:
            continue


def passages(text):
    """(first line, name, lines) of each."""
    begin, name, lines = 1, "", []
    for number, line in enumerate(text.splitlines(), 1):
        definition = DEFINITION.match(line)
        if lines and (definition or len(lines) >= LONGEST):
            yield begin, name, lines
            begin, lines = number, []
            name = "" if definition else name
        if definition:
            name = definition[1]
        lines.append(line)
    if any(line.strip() for line in lines):
        yield begin, name, lines


def opened():
    base = sqlite3.connect(PLACE, isolation_level=None)
    base.execute("PRAGMA journal_mode = OFF")
    base.execute("PRAGMA synchronous = OFF")
    base.execute("CREATE TABLE IF NOT EXISTS files (path TEXT PRIMARY KEY, stamp TEXT, first INTEGER, last INTEGER)")
    base.execute(
        "CREATE TABLE IF NOT EXISTS places (id INTEGER PRIMARY KEY, path TEXT, first INTEGER, head TEXT, last INTEGER)"
    )
    base.execute(
        "CREATE VIRTUAL TABLE IF NOT EXISTS passages USING fts5 (name, path, body, tokenize = 'porter unicode61')"
    )
    return base


def follow(base):
    """Make the index what the files are now."""
    known = {path: (stamp, first, last) for path, stamp, first, last in base.execute("SELECT * FROM files")}
    base.execute("BEGIN")
    for path, stamp in walk("."):
        held = known.pop(path, None)
        if held and held[0] == stamp:
            continue
        if held:
            forget(base, path, held)
        add(base, path, stamp)
    for path, held in known.items():
        forget(base, path, held)
    base.execute("COMMIT")


def forget(base, path, held):
    base.execute("DELETE FROM passages WHERE rowid BETWEEN ? AND ?", held[1:])
    base.execute("DELETE FROM places WHERE id BETWEEN ? AND ?", held[1:])
    base.execute("DELETE FROM files WHERE path = ?", (path,))


def add(base, path, stamp):
    try:
        path.encode()
        with open(path, "rb") as file:
            data = file.read(MOST_BYTES + 1)
    except (OSError, UnicodeEncodeError):
        return
    text = "" if b"\0" in data[:8192] else data.decode("utf-8", "replace")
    (top,) = base.execute("SELECT coalesce(max(id), 0) FROM places").fetchone()
    first = id = top + 1
    for begin, name, lines in passages(text):
        body = "\n".join(lines)
        head = next((line.strip() for line in lines if line.strip()), "")[:120]
        base.execute("INSERT INTO places VALUES (?, ?, ?, ?, ?)", (id, path, begin, head, begin + len(lines) - 1))
        row = (id, f"{name} {words(name)}", words(path), f"{body}\n{words(body)}")
        base.execute("INSERT INTO passages (rowid, name, path, body) VALUES (?, ?, ?, ?)", row)
        id += 1
    base.execute("INSERT INTO files VALUES (?, ?, ?, ?)", (path, stamp, first, id - 1))


def search(base, query, below, places):
    asked = dict.fromkeys(word.lower() for word in re.findall(r"\w+", f"{query} {words(query)}"))
    if not asked:
        return []
    match = " OR ".join(f'"{word}"' for word in list(asked)[:40])
    prefix = "" if below == "." else below.rstrip("/") + "/"
    return base.execute(
        "SELECT places.path, places.first, places.last, places.head "
        "FROM passages JOIN places ON places.id = passages.rowid "
        "WHERE passages MATCH ? AND substr(places.path, 1, ?) = ? "
        "ORDER BY bm25(passages, 8.0, 2.0, 1.0), places.id LIMIT ?",
        (match, len(prefix), prefix, places),
    ).fetchall()


def printable(name):
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)


def main():
    request = eval(sys.stdin.read())  # ours: no policy writes it
    try:
        base = opened()
        follow(base)
    except sqlite3.DatabaseError:
        os.remove(PLACE)
        base = opened()
        follow(base)
    found = search(base, request["query"], request["path"], request["places"])
    lines = [f"{printable(path)}:{first}-{last}  {printable(head)}" for path, first, last, head in found]
    text = "\n".join(lines) or "nothing in the workspace fits"
    sys.stdout.buffer.write(f"ok\n{text}".encode("utf-8", "replace"))


main()
