"""Which language a file is in: by name and first line, as `identify` (pre-commit's library) tells them apart."""

from __future__ import annotations

from pathlib import PurePosixPath

from stretto.midtrain.corpus.document import Blob

ALIASES = {"py": "python", "python3": "python", "js": "javascript", "ts": "typescript", "cpp": "c++", "golang": "go"}


def language(blob: Blob, wanted: tuple[str, ...]) -> tuple[str, bool]:
    """(the language, whether it is wanted). What a row says of itself goes before its name."""
    if blob.language:
        said = blob.language.lower()
        said = ALIASES.get(said, said)
        return said, said in wanted
    from identify import identify

    name = PurePosixPath(blob.path).name
    tags = identify.tags_from_filename(name)
    if not tags and blob.data[:2] in (b"#!", "#!"):
        head = blob.data[:200] if isinstance(blob.data, bytes) else blob.data[:200].encode()
        words = head.partition(b"\n")[0][2:].decode(errors="replace").split()
        program = words[-1] if words and words[0].endswith("/env") else (words or [""])[0]
        tags = identify.tags_from_interpreter(PurePosixPath(program).name)
    for tag in wanted:
        if tag in tags:
            return tag, True
    named = sorted(tags - {"text", "binary", "executable", "non-executable", "file"})
    return ",".join(named) or "unknown", False
