"""`stretto corpus build`: from sources to a folder of clean documents.

    plan ─▶ items ─▶ chunks ═▶ sift (a process per core) ═▶ duplicates, in order ─▶ documents.jsonl.zst
                                                                                  ─▶ left_out.jsonl, manifest.json

A chunk's documents wait on disk, so that memory holds some 2 KB a document. The manifest is written last: a folder
without it is no corpus. The same plan over the same files makes the same bytes.
"""

from __future__ import annotations

import json
import multiprocessing
import os
import shutil
import time
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import msgspec
import zstandard

from stretto.config import ConfigError
from stretto.midtrain.corpus import sources
from stretto.midtrain.corpus.document import LeftOut
from stretto.midtrain.corpus.duplicates import Duplicates
from stretto.midtrain.corpus.evaluation import answers, evaluation_tasks
from stretto.midtrain.corpus.licences import Licences
from stretto.midtrain.corpus.plan import Plan
from stretto.midtrain.corpus.sift import Sieve, Sifted, read_spool, sift
from stretto.midtrain.corpus.sources import Item

DOCUMENTS, LEFT_OUT, MANIFEST = "documents.jsonl.zst", "left_out.jsonl", "manifest.json"
FORMAT = 1
SMALL, LARGE = 8 << 20, 32 << 20
"""Bytes (as they lie on disk) of a chunk: enough that starting the scanners does not count, few enough for memory."""

_sieve: Sieve | None = None  # of this process; forked workers inherit it


def build(plan: Plan, base: Path, out: Path, workers: int = 0) -> dict[str, Any]:
    """Write a corpus to `out`, which must not hold one; returns the manifest. Raises ConfigError with a sentence."""
    global _sieve
    if (out / MANIFEST).exists():
        raise ConfigError(f"{out} already holds a corpus: remove it, or give another folder")
    begun = time.monotonic()
    items = sources.items(plan.source, base)
    indexed = answers(evaluation_tasks(plan.corpus.evaluation, base), plan.corpus.ngram)
    _sieve = Sieve(plan, Licences(plan.corpus.licences), indexed)
    ready = time.monotonic()
    workers = workers or os.cpu_count() or 1
    spools = out / "spool"
    shutil.rmtree(spools, ignore_errors=True)
    try:
        spools.mkdir(parents=True)
    except OSError as error:
        raise ConfigError(f"{out} can't hold a corpus: {error.strerror}") from None
    chunks = list(_chunks(items, workers))
    work = [(chunk, spools / f"{number:06d}") for number, chunk in enumerate(chunks)]
    with ProcessPoolExecutor(workers, mp_context=multiprocessing.get_context("fork")) as pool:
        made = _write(out, plan, pool.map(_work, work))
    shutil.rmtree(spools)
    seconds = time.monotonic() - ready
    cpu: dict[str, float] = made.pop("cpu_s")
    manifest = {
        "format": FORMAT,
        **made,
        "evaluation": {"answers": indexed.count, "too_short": indexed.short},
        "plan": plan.model_dump(mode="json"),
        "time": {
            "start_s": round(ready - begun, 2),
            "seconds": round(seconds, 2),
            "workers": workers,
            "mb_per_s_per_core": _rate(made["read"]["bytes"], seconds * workers),
            "mb_per_cpu_s": _rate(made["read"]["bytes"], sum(cpu.values())),
            "cpu_s": cpu,
        },
    }
    _atomically(out / MANIFEST, json.dumps(manifest, indent=1) + "\n")
    return manifest


def _rate(size: int, seconds: float) -> float:
    """MB a second; 0 where nothing was read."""
    return round(size / 1e6 / seconds, 3) if seconds > 0 else 0.0


def _work(job: tuple[list[Item], Path]) -> Sifted:
    assert _sieve is not None
    return sift(_sieve, *job)


def _chunks(items: list[Item], workers: int) -> Iterator[list[Item]]:
    """Consecutive items, so that the order of the corpus is that of the plan."""
    limit = min(LARGE, max(SMALL, sum(item.size for item in items) // (2 * workers)))
    chunk: list[Item] = []
    size = 0
    for item in items:
        chunk.append(item)
        size += item.size
        if size >= limit:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def _write(out: Path, plan: Plan, results: Iterator[Sifted]) -> dict[str, Any]:
    """Take the chunks in order, drop duplicates, write documents and what was left out; the counts."""
    known = Duplicates(plan.corpus.near_duplicate)
    counts: Counter[str] = Counter()
    by_language: Counter[str] = Counter()
    by_licence: Counter[str] = Counter()
    by_source: Counter[str] = Counter()
    reasons: dict[str, list[int]] = {}
    cpu: Counter[str] = Counter()
    encode = msgspec.json.Encoder()
    pack = zstandard.ZstdCompressor(level=3)
    with (out / DOCUMENTS).open("wb") as raw, pack.stream_writer(raw) as kept, (out / LEFT_OUT).open("wb") as left:

        def leave(one: LeftOut) -> None:
            left.write(encode.encode(one) + b"\n")
            entry = reasons.setdefault(one.reason.value, [0, 0])
            entry[0] += 1
            entry[1] += one.bytes

        for chunk in results:
            counts["read"] += chunk.read_bytes
            cpu.update(chunk.seconds)
            for one in chunk.left:
                leave(one)
            begun = time.process_time()
            for number, document in enumerate(read_spool(chunk.spool)):
                why = known.check(
                    chunk.names[number], chunk.keys[number], chunk.signatures[number], chunk.sizes[number]
                )
                if why:
                    size = len(document.text)
                    leave(LeftOut(document.source, document.repository, document.path, why[0], why[1], size))
                    continue
                kept.write(encode.encode(document) + b"\n")
                size = len(document.text)
                counts["files"] += 1
                counts["bytes"] += size
                by_language[document.language] += size
                by_licence[document.licence] += size
                by_source[document.source] += size
            chunk.spool.unlink()
            cpu["duplicates"] += time.process_time() - begun  # type: ignore[assignment]
    return {
        "read": {"bytes": counts["read"], "files": counts["files"] + sum(count for count, _ in reasons.values())},
        "kept": {"files": counts["files"], "bytes": counts["bytes"]},
        "left_out": {reason: {"files": count, "bytes": size} for reason, (count, size) in sorted(reasons.items())},
        "languages": dict(by_language.most_common()),
        "licences": dict(by_licence.most_common()),
        "sources": dict(by_source.most_common()),
        "cpu_s": {stage: round(seconds, 2) for stage, seconds in cpu.most_common()},
    }


def _atomically(path: Path, text: str) -> None:
    part = path.with_suffix(".part")
    part.write_text(text, encoding="utf-8")
    part.replace(path)
