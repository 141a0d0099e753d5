"""Runs inside the box: shows lines of a file, or the entries of a folder. Reads a request as a Python literal, answers
`ok` or `no` on a line and the text. Only built-in modules: importing json or os would take longer than all the rest.
"""

import _stat
import posix
import sys

WIDTH = 2000
"""Characters of one line that are shown."""
PROBE = 8192
"""Bytes looked at to tell text from other things."""
MOST = 1 << 28
"""Bytes of a file that are read at most to count its lines."""


class Problem(Exception):
    pass


def printable(name):
    return "".join(letter if letter.isprintable() else repr(letter)[1:-1] for letter in name)


def read(path, start, lines):
    kind = posix.stat(path)
    if _stat.S_ISDIR(kind.st_mode):
        raise Problem(f"{path} is a folder; list_dir shows what is in it")
    if not _stat.S_ISREG(kind.st_mode):
        raise Problem(f"{path} is not a regular file")
    with open(path, "rb") as file:
        if b"\0" in file.read(PROBE):
            raise Problem(f"{path} is a binary file of {kind.st_size} bytes")
        file.seek(0)
        shown, foreign, number, taken = [], False, 0, 0
        while taken < MOST:
            line = file.readline(MOST)
            if not line:
                break
            number, taken = number + 1, taken + len(line)
            if start <= number < start + lines:
                head = line.rstrip(b"\r\n")[: 4 * WIDTH]
                text = head.decode("utf-8", "replace")
                foreign = foreign or "\ufffd" in text.rstrip("\ufffd")
                if len(text) > WIDTH or len(line) > 4 * WIDTH:
                    text = f"{text[:WIDTH]} [cut: a line of {len(line)} bytes]"
                shown.append(f"{number}\t{text}")
    if not number:
        return f"{path} is empty"
    if not shown:
        raise Problem(f"{path} has {number} lines; there is no line {start}")
    last = start + len(shown) - 1
    if last < number or start > 1:
        more = "at least " if taken >= MOST else ""
        shown.append(f"[lines {start}-{last} of {more}{number}]")
    if foreign:
        shown.append("[not UTF-8: bytes that are no text are shown as \ufffd]")
    return "\n".join(shown)


def listing(path, depth, entries):
    found = []

    def walk(folder, indent):
        with posix.scandir(folder) as scan:
            items = []
            for item in scan:
                items.append(item)
                if len(items) > 20 * entries:  # thousands more: which ones are first no longer matters
                    break
        for item in sorted(items, key=lambda item: (not item.is_dir(follow_symlinks=False), item.name)):
            if len(found) > entries:
                return
            name = printable(item.name)
            if item.is_symlink():
                found.append(f"{indent}{name} -> {printable(posix.readlink(item.path))}")
            elif item.is_dir(follow_symlinks=False):
                found.append(f"{indent}{name}/")
                if len(indent) // 2 + 1 < depth:
                    try:
                        walk(item.path, indent + "  ")
                    except OSError as error:
                        found.append(f"{indent}  [{(error.strerror or 'closed').lower()}]")
            elif item.is_file(follow_symlinks=False):
                found.append(f"{indent}{name} {item.stat(follow_symlinks=False).st_size}")
            else:
                found.append(f"{indent}{name} [not a regular file]")

    if not _stat.S_ISDIR(posix.stat(path).st_mode):
        raise Problem(f"{path} is not a folder")
    walk(path, "")
    if len(found) > entries:
        found[entries:] = [f"[cut: more than {entries} entries; list a folder below]"]
    return "\n".join(found) or ("the workspace is empty" if path == "." else f"{path} is empty")


def main():
    request = eval(sys.stdin.read())  # ours: no policy writes it
    path, answer = request["path"], "no"
    try:
        if request["do"] == "read":
            text = read(path, request["start"], request["lines"])
        else:
            text = listing(path, min(request["depth"], 8), request["entries"])
        answer = "ok"
    except Problem as problem:
        text = str(problem)
    except FileNotFoundError:
        text = f"{path}: no such file or folder"
    except OSError as error:
        text = f"{path}: {(error.strerror or 'can not be read').lower()}"
    sys.stdout.buffer.write(f"{answer}\n{text}".encode("utf-8", "replace"))


main()
