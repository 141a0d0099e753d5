"""Sources that are damaged, hostile or not what they say: each is named, and the rest goes on."""

from __future__ import annotations

import gzip
import io
import json
import os
import random
import struct
import tarfile
import zipfile
from pathlib import Path

import pytest
from corpora import MIT, made, source, tar

from stretto.config import ConfigError
from stretto.midtrain.corpus import rows

pytest.importorskip("rensa", reason="the [corpus] extra is not installed")


def test_a_line_of_200_megabytes_is_named_and_never_held(tmp_path: Path) -> None:
    import resource

    with (tmp_path / "rows.jsonl").open("wb") as file:
        file.write(b'{"text": "')
        for _ in range(200):
            file.write(b"x" * (1 << 20))
        file.write(b'", "license": "MIT"}\n' + json.dumps({"text": source(1), "lang": "py", "license": "MIT"}).encode())
    kept, left, _ = made(tmp_path, ["rows.jsonl"], secrets=False)
    assert set(kept) == {"rows.jsonl/rows.jsonl:2"} and left["row too long"] == ["rows.jsonl:1"]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < 2 << 20, "KiB"


def test_a_parquet_file_without_a_column_and_one_that_is_none_are_named(tmp_path: Path) -> None:
    arrow = pytest.importorskip("pyarrow")
    parquet = pytest.importorskip("pyarrow.parquet")
    parquet.write_table(arrow.table({"body": [source(1)], "license": ["MIT"]}), tmp_path / "a.parquet")
    (tmp_path / "b.parquet").write_bytes(b"PAR1 no")
    (tmp_path / "c.jsonl").write_bytes(
        b'{"text": "caf\xe9"}\n' + json.dumps({"text": source(2), "lang": "py", "license": "MIT"}).encode()
    )
    kept, left, _ = made(tmp_path, ["a.parquet", "b.parquet", "c.jsonl"], secrets=False)
    assert (
        left["no text column"] == ["a.parquet:1"]
        and len(left["unreadable"]) == 2
        and set(kept) == {"c.jsonl/c.jsonl:2"}
    )


def test_what_is_no_archive_and_what_is_empty_is_named(tmp_path: Path) -> None:
    noise = random.Random(0).randbytes(3000)
    endings = ("tar.gz", "tar.xz", "tar.bz2", "tar", "zip", "whl", "jsonl.gz", "jsonl.zst", "parquet", "bundle")
    for ending in endings:
        (tmp_path / f"noise.{ending}").write_bytes(noise)
        (tmp_path / f"empty.{ending}").write_bytes(b"")
    tar(tmp_path / "hollow.tar.gz", {})
    (tmp_path / "good.jsonl").write_text(json.dumps({"text": source(1), "lang": "python", "license": "MIT"}))
    kept, _, manifest = made(tmp_path, ["*.*"], secrets=False)
    assert len(kept) == 1 and manifest["left_out"]["unreadable"]["files"] >= 2 * len(endings) + 1
    said = (tmp_path / "out/left_out.jsonl").read_text()
    assert all(f"noise.{ending}" in said and f"empty.{ending}" in said for ending in endings)
    assert "hollow.tar.gz: it holds nothing" in said


def test_one_damaged_member_of_a_zip_is_left_out_alone(tmp_path: Path) -> None:
    for name, kind in (("a.zip", zipfile.ZIP_LZMA), ("b.zip", zipfile.ZIP_DEFLATED)):
        with zipfile.ZipFile(tmp_path / name, "w", kind) as archive:
            archive.writestr("LICENSE", MIT)
            archive.writestr("bad.py", source(1, 40))
            archive.writestr("good.py", source(len(name) + kind))
        body = bytearray((tmp_path / name).read_bytes())
        at = body.find(b"bad.py") + 30
        body[at : at + 60] = b"\xff" * 60
        (tmp_path / name).write_bytes(body)
    kept, left, _ = made(tmp_path, ["*.zip"], secrets=False)
    assert set(kept) == {"a/good.py", "b/good.py"} and left["unreadable"] == ["bad.py", "bad.py"]


def test_bombs_are_stopped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A zip whose 400 entries are one and the same member, an archive of zeros, rows of one letter."""
    monkeypatch.setattr(rows, "ALWAYS", 8 << 20)
    monkeypatch.setattr(rows, "EXPANSION", 20)
    with zipfile.ZipFile(tmp_path / "a.zip", "w", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("x.py", b"a = 1\n" * 200_000)
    body = (tmp_path / "a.zip").read_bytes()
    first, last = body.find(b"PK\x01\x02"), body.find(b"PK\x05\x06")
    directory, end = body[first:last] * 400, bytearray(body[last:])
    struct.pack_into("<HHII", end, 8, 400, 400, len(directory), first)
    (tmp_path / "a.zip").write_bytes(body[:first] + directory + end)
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz") as archive:
        for number in range(20):
            member = tarfile.TarInfo(f"{number}.py")
            member.size = 1 << 20
            archive.addfile(member, io.BytesIO(bytes(1 << 20)))
    with gzip.open(tmp_path / "c.jsonl.gz", "wb") as file:
        for _ in range(20):
            file.write(b'{"text": "' + b"x" * (1 << 20) + b'"}\n')
    _, left, _ = made(tmp_path, ["*.*"], secrets=False)
    said = [json.loads(line) for line in (tmp_path / "out/left_out.jsonl").read_text().splitlines()]
    assert sum("unpacks to more than" in one["detail"] for one in said) == 3
    assert sum(len(paths) for paths in left.values()) < 40


def test_names_and_encodings_that_are_no_unicode_do_not_stop_the_build(tmp_path: Path) -> None:
    folder = tmp_path / "repo"
    folder.mkdir()
    (folder / "LICENSE").write_text(MIT)
    odd = {
        "utf16": source(1).encode("utf-16"),
        "undefined": b"# coding: undefined\n\xe9\n" + source(2).encode(),
        "surrogate": b"# -*- coding: unicode_escape -*-\nx = '\\ud800\xe9'\n" + source(3).encode(),
        "nowhere": b"# coding: nowhere\n\xe9\n" + source(4).encode(),
        "hex": b"# coding: hex\n\xe9\n" + source(5).encode(),
    }
    for name, body in odd.items():
        (folder / f"{name}.py").write_bytes(body)
    (folder / "bom.py").write_bytes(b"\xef\xbb\xbf" + source(6).encode())
    with open(os.fsencode(folder) + b"/caf\xe9.py", "w") as file:
        file.write(source(7))
    for name, target in (("passwd.py", "/etc/passwd"), ("up", "/etc"), ("loop", "."), ("nowhere.py.lnk", "gone")):
        (folder / name).symlink_to(target)
    with tarfile.open(tmp_path / "b.tar.gz", "w:gz", encoding="utf-8", errors="surrogateescape") as archive:
        for number, name in enumerate(("LICENSE", "caf\udce9.py", "..\\up.py", "C:\\x.py", "a/../../x.py", "./in.py")):
            body = (MIT if name == "LICENSE" else source(20 + number)).encode()
            member = tarfile.TarInfo(name)
            member.size = len(body)
            archive.addfile(member, io.BytesIO(body))
    kept, left, _ = made(tmp_path, ["repo", "b.tar.gz"], secrets=False)
    assert set(kept) == {"repo/bom.py", "repo/caf\ufffd.py", "b/caf\ufffd.py", "b/in.py"}
    assert sorted(left["encoding"]) == ["hex.py", "nowhere.py", "surrogate.py", "undefined.py"]
    assert left["binary"] == ["utf16.py"] and len(left["not a file"]) == 4 and len(left["unsafe path"]) == 3


def test_rows_of_every_wrong_kind_are_named(tmp_path: Path) -> None:
    good = {"text": source(1), "lang": "python", "license": "MIT", "path": "good.py", "repo": "r"}
    lines = [
        b"\xef\xbb\xbf" + json.dumps(good).encode(),
        json.dumps(good | {"path": "../../etc/x.py", "text": source(2)}).encode(),
        json.dumps({"path": "LICENSE", "text": MIT, "repo": "r"}).encode(),  # one row's licence is not the next one's
        json.dumps({"path": "bare.py", "text": source(3), "lang": "python", "repo": "r"}).encode(),
        b'{"text": "\\ud800"}',
        b"[" * 50_000,
        b"null",
    ]
    (tmp_path / "a.jsonl").write_bytes(b"\r\n".join(lines))
    kept, left, _ = made(tmp_path, ["a.jsonl"], secrets=False)
    assert set(kept) == {"r/good.py"} and left["unsafe path"] == ["a.jsonl:2"]
    assert left["licence"] == ["bare.py"] and left["unreadable"] == ["a.jsonl:5", "a.jsonl:6", "a.jsonl:7"]


def test_parquet_of_bytes_and_of_much_text_in_few_bytes(tmp_path: Path) -> None:
    import resource

    arrow, parquet = pytest.importorskip("pyarrow"), pytest.importorskip("pyarrow.parquet")
    licences, languages = ["MIT"] * 3, ["python"] * 3
    texts = arrow.array([source(1).encode(), b"\xff\xfe", None], arrow.binary())
    parquet.write_table(arrow.table({"content": texts, "license": licences, "lang": languages}), tmp_path / "a.parquet")
    long = arrow.array(["x" * (40 << 20), source(2), ""])
    parquet.write_table(arrow.table({"text": long, "license": licences, "lang": languages}), tmp_path / "b.parquet")
    same = arrow.DictionaryArray.from_arrays(arrow.array([0] * 300), arrow.array(["y" * (8 << 20)]))
    parquet.write_table(arrow.table({"text": same}), tmp_path / "c.parquet")
    before = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss
    kept, left, _ = made(tmp_path, ["*.parquet"], secrets=False)
    assert set(kept) == {"a.parquet/a.parquet:1", "b.parquet/b.parquet:2"}
    assert left["encoding"] == ["a.parquet:2"] and left["row too long"] == ["b.parquet:1"]
    assert resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss < max(before, 2 << 20), "KiB"


def test_a_folder_that_cannot_hold_a_corpus_is_refused_with_a_sentence(tmp_path: Path) -> None:
    (tmp_path / "out").write_text("a file")
    tar(tmp_path / "a.tar.gz", {"LICENSE": MIT})
    with pytest.raises(ConfigError, match="can't hold a corpus: Not a directory"):
        made(tmp_path, ["a.tar.gz"])
