"""One download per region: a follower hands on what it has fetched to others nearby.

    the store ◀──ocean── Cached ◀──HTTP── follower, follower, ...      stretto follow --store http://relay:PORT
                           │
                        a folder: objects, each with its hash

All objects of a chain but HEAD are immutable, so they are kept as they come; two that ask for the same one share its
download. HEAD is asked for again and again (a few bytes while it has not changed). A relay is trusted no more than a
link is: readers check every byte against HEAD's hashes, and what rotted in the folder is fetched again.

Left out: listing, and writing anything but readers' own records.
"""

from __future__ import annotations

import asyncio
import logging
import re
import threading
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import blake3
from aiohttp import web

from stretto.weights.store import Store, StoreError

_IMMUTABLE = re.compile(r"weights/([^/]+)/(?:manifests|deltas|anchors|layouts)/(\d{6,}|)[^/]*(?:/.*)?")
FRESH_SECONDS = 0.05
"""HEAD is not asked for more often than this, however many readers there are."""

_WRITABLE = re.compile(r"weights/[^/]+/readers/[^/]+")

_STORE = web.AppKey("store", Store)

log = logging.getLogger(__name__)


class Cached(Store):
    """A store behind a folder. Reads of immutable objects go to `upstream` once; all else goes there each time."""

    def __init__(self, upstream: Store, folder: Path) -> None:
        super().__init__(folder)
        self._kept = self._backend
        self._backend = upstream._backend
        self.url = upstream.url
        self.bytes_fetched = 0  # of objects
        self.bytes_kept = 0  # of objects that were answered from the folder
        self._lock = threading.Lock()
        self._underway: dict[str, threading.Lock] = {}
        self._heads: dict[str, tuple[tuple[bytes, str], float]] = {}  # HEAD's bytes and tag, when they were asked for

    def get(self, key: str) -> bytes:
        return self.get_with_tag(key)[0]

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        if key.endswith("/HEAD"):
            return self._head(key)
        if not _IMMUTABLE.fullmatch(key):
            return super().get_with_tag(key)
        with self._lock:
            turn = self._underway.setdefault(key, threading.Lock())
        with turn:
            found = self._look(key)
            if found is None:
                found = super().get_with_tag(key)[0]
                self.bytes_fetched += len(found)
                try:
                    self._kept.put(key, blake3.blake3(found).digest() + found)
                except OSError as error:
                    log.warning("%s is not kept: %s", key, error)
            else:
                self.bytes_kept += len(found)
        with self._lock:
            self._underway.pop(key, None)
        return found, blake3.blake3(found).hexdigest(16)

    def get_if_changed(self, key: str, tag: str) -> tuple[bytes, str] | None:
        found = self.get_with_tag(key)
        return None if found[1] == tag else found

    def _head(self, key: str) -> tuple[bytes, str]:
        """All who ask at about the same time get one answer; upstream sends it only when it has changed."""
        with self._lock:
            turn = self._underway.setdefault(key, threading.Lock())
        with turn:
            known = self._heads.get(key)
            if known is not None and time.monotonic() - known[1] < FRESH_SECONDS:
                return known[0]
            found = super().get_with_tag(key) if known is None else super().get_if_changed(key, known[0][1])
            if found is None and known is not None:
                found = known[0]
            assert found is not None
            self._heads[key] = found, time.monotonic()
            return found

    def forget(self, chain: str, before: int) -> None:
        """Delete kept objects of versions below `before`, and of other chains."""
        for key in self._kept.list(""):
            match = _IMMUTABLE.fullmatch(key)
            if match and (match[1] != chain or (match[2] and int(match[2]) < before)):
                self._kept.delete(key)

    def _look(self, key: str) -> bytes | None:
        try:
            data = self._kept.get_with_tag(key)[0]
        except KeyError:
            return None
        if blake3.blake3(data[32:]).digest() != data[:32]:
            log.warning("%s rotted in the relay's folder and is fetched again", key)
            return None
        return data[32:]


@asynccontextmanager
async def serving(store: Store, host: str, port: int) -> AsyncIterator[int]:
    """Hand on `store` over HTTP while the context lasts; gives the port. OSError when the address is taken."""
    app = web.Application(client_max_size=1 << 20)
    app[_STORE] = store
    app.add_routes([web.get("/{key:.+}", _read), web.put("/{key:.+}", _write), web.delete("/{key:.+}", _write)])
    runner = web.AppRunner(app, access_log=None)
    await runner.setup()
    try:
        site = web.TCPSite(runner, host, port)
        await site.start()
        yield runner.addresses[0][1]
    finally:
        await runner.cleanup()


async def _read(request: web.Request) -> web.Response:
    key, store = request.match_info["key"], request.app[_STORE]
    try:
        data, tag = await asyncio.to_thread(store.get_with_tag, key)
    except KeyError:
        return web.Response(status=404, text=f"there is no {key} in {store.url}")
    except (StoreError, OSError) as error:
        return web.Response(status=502, text=str(error))
    quoted = f'"{tag.strip(chr(34))}"'
    if request.headers.get("If-None-Match") == quoted:
        return web.Response(status=304, headers={"ETag": quoted})
    return web.Response(body=data, headers={"ETag": quoted})


async def _write(request: web.Request) -> web.Response:
    key, store = request.match_info["key"], request.app[_STORE]
    if not _WRITABLE.fullmatch(key):
        return web.Response(status=403, text=f"a relay takes readers' records only, not {key}")
    try:
        if request.method == "DELETE":
            await asyncio.to_thread(store.delete, key)
        else:
            await asyncio.to_thread(store.put, key, await request.read())
    except (StoreError, OSError) as error:
        return web.Response(status=502, text=str(error))
    return web.Response(status=204)
