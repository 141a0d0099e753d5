"""The object store: one flat map from key to bytes, the only thing clusters share.

A folder on this machine, or S3, GCS, Azure by URL (through obstore). A key is visible when its last byte is: local
writes go to a temporary file, are flushed to the disk and renamed. Two operations make coordination possible without
a server: create-only (`put_new`) and compare-and-set (`swap`). Everything is synchronous; async callers use
`asyncio.to_thread`.

Left out: multipart streaming and listing by page. Objects are held whole in memory.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
from collections.abc import Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import blake3

PARTIAL = ".partial"
"""Folder under a local root for files that are still being written. Whatever a crash leaves there may be deleted."""


REQUEST_TIME = "30m"
"""The longest that one object may take on its way, to or from a remote store."""

SILENCE = "8s"
"""A remote store that sends nothing for so long is asked again ..."""

RETRY_TIME = timedelta(seconds=12)
"""... until so much time has gone: whoever waits hears of it within half a minute, and no thread hangs for longer."""

LARGE = 1 << 20
"""Objects of so many bytes are on their way out for a while, and the store is silent meanwhile."""


_ENDPOINTS = ("endpoint", "endpoint_url", "aws_endpoint", "aws_endpoint_url", "aws_endpoint_url_s3")
"""Options, and in capitals variables, that name a store's address."""


class StoreError(RuntimeError):
    """A sentence: which store or object could not be used, and why."""


class Store:
    """Keys are slash-separated, relative, without `.` or `..` parts.

    Example: `store = Store("runs/x/store")`, `store.put("a/b", b"1")`, `store.get("a/b")`.
    """

    def __init__(self, url: str | Path, **options: Any) -> None:
        """`url` is a folder, a `file://` URL, or `s3://`, `gs://`, `az://`, `https://`, `memory://` with obstore's
        `options` for it (region, endpoint, credentials; the usual environment variables work too)."""
        self.url = str(url)
        scheme = self.url.partition("://")[0] if "://" in self.url else ""
        if scheme in ("", "file"):
            if options:
                raise StoreError(f"{self.url} is a local folder: it takes no options, got {', '.join(sorted(options))}")
            self._backend: _Local | _Remote = _Local(Path(self.url.removeprefix("file://")))
        else:
            self._backend = _Remote(self.url, options)

    def __repr__(self) -> str:
        return f"Store({self.url!r})"

    def put(self, key: str, data: bytes) -> None:
        """Write, replacing what is there."""
        self._backend.put(_checked(key), data)

    def put_new(self, key: str, data: bytes) -> bool:
        """Write only if the key does not exist. False: it exists, nothing was written."""
        return self._backend.put_new(_checked(key), data)

    def get(self, key: str) -> bytes:
        """KeyError when there is no such object."""
        return self._backend.get_with_tag(_checked(key))[0]

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        """The object and its entity tag, to be given to `swap`. KeyError when there is no such object."""
        return self._backend.get_with_tag(_checked(key))

    def get_if_changed(self, key: str, tag: str) -> tuple[bytes, str] | None:
        """As `get_with_tag`; None, at the cost of an empty answer, while the object still has this tag."""
        return self._backend.get_if_changed(_checked(key), tag)

    def swap(self, key: str, data: bytes, expected: str | None) -> str | None:
        """Write only if the object's tag is still `expected` (None: only if it does not exist).

        Returns the new tag, or None when somebody else was faster: then nothing was written.
        """
        return self._backend.swap(_checked(key), data, expected)

    def exists(self, key: str) -> bool:
        return self._backend.exists(_checked(key))

    def modified(self, key: str) -> float:
        """When the object was last written, in seconds, by the clock of the store. KeyError when there is none.

        Only differences between two of them mean anything: no machine's own clock is to be compared with it.
        """
        return self._backend.modified(_checked(key))

    def list(self, prefix: str = "") -> list[str]:
        """Sorted keys in the folder `prefix` and below it."""
        return self._backend.list(_checked(prefix.strip("/")) if prefix.strip("/") else "")

    def delete(self, key: str) -> None:
        """Remove; a key that does not exist is no error."""
        self._backend.delete(_checked(key))


def write_file(path: Path, data: bytes, scratch: Path | None = None) -> None:
    """Replace `path` so that, whatever is killed when, it holds the old bytes or all of the new ones.

    `scratch` is a folder on the same file system for the temporary file; by default the one `path` lies in.
    """
    _make_folder(path.parent)
    with _temporary(scratch or path.parent, data) as part:
        os.replace(part, path)
    _flush_folder(path.parent)


class _Local:
    def __init__(self, root: Path) -> None:
        self.root = root.expanduser().absolute()
        self.scratch = self.root / PARTIAL

    def put(self, key: str, data: bytes) -> None:
        self.scratch.mkdir(parents=True, exist_ok=True)
        write_file(self.root / key, data, self.scratch)

    def put_new(self, key: str, data: bytes) -> bool:
        path = self.root / key
        if path.exists():
            return False
        self.scratch.mkdir(parents=True, exist_ok=True)
        _make_folder(path.parent)
        with _temporary(self.scratch, data) as part:
            try:
                os.link(part, path)
            except FileExistsError:
                return False
        _flush_folder(path.parent)
        return True

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        try:
            data = (self.root / key).read_bytes()
        except (FileNotFoundError, NotADirectoryError, IsADirectoryError):
            raise KeyError(key) from None
        return data, _tag(data)

    def get_if_changed(self, key: str, tag: str) -> tuple[bytes, str] | None:
        found = self.get_with_tag(key)
        return None if found[1] == tag else found

    def swap(self, key: str, data: bytes, expected: str | None) -> str | None:
        self.scratch.mkdir(parents=True, exist_ok=True)
        # The lock only makes read-compare-rename one step among publishers. The kernel drops it when its holder dies.
        with (self.scratch / "lock").open("a") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            try:
                tag: str | None = self.get_with_tag(key)[1]
            except KeyError:
                tag = None
            if tag != expected:
                return None
            if expected is None:
                return _tag(data) if self.put_new(key, data) else None
            self.put(key, data)
            return _tag(data)

    def exists(self, key: str) -> bool:
        return (self.root / key).is_file()

    def modified(self, key: str) -> float:
        try:
            return (self.root / key).stat().st_mtime
        except (FileNotFoundError, NotADirectoryError):
            raise KeyError(key) from None

    def list(self, prefix: str) -> list[str]:
        folder = self.root / prefix
        found = []
        for parent, folders, names in os.walk(folder):
            if Path(parent) == self.root and PARTIAL in folders:
                folders.remove(PARTIAL)
            found += [(Path(parent) / name).relative_to(self.root).as_posix() for name in names]
        return sorted(found)

    def delete(self, key: str) -> None:
        with contextlib.suppress(FileNotFoundError, NotADirectoryError):
            (self.root / key).unlink()


class _Remote:
    """obstore imports a Rust runtime, so it is loaded only for a store that needs it."""

    def __init__(self, url: str, options: dict[str, Any]) -> None:
        import obstore
        from obstore.exceptions import (
            AlreadyExistsError,
            BaseError,
            NotFoundError,
            NotModifiedError,
            PreconditionError,
        )
        from obstore.store import from_url

        self.url = url
        self.api = obstore
        self.missing = (NotFoundError, FileNotFoundError)
        self.exists_already = (AlreadyExistsError, FileExistsError)
        self.outdated = (PreconditionError, NotFoundError, FileNotFoundError)
        self.unchanged = NotModifiedError
        self.error = BaseError
        # The library's 30 s would end a large object on a slow link, and its 3 minutes of retries hold up a process.
        client = {"timeout": REQUEST_TIME, "connect_timeout": "5s"} | dict(options.pop("client_options", {}))
        retry = {"retry_timeout": RETRY_TIME} | dict(options.pop("retry_config", {}))
        places = [
            url,
            *(str(options.get(name, "")) for name in _ENDPOINTS),
            *map(os.environ.get, map(str.upper, _ENDPOINTS)),
        ]
        if any(place and place.startswith("http://") for place in places):  # asked for by name
            client["allow_http"] = True
        brisk, patient = options, options
        if not url.startswith("memory:"):
            patient = options | {"client_options": client, "retry_config": retry}
            brisk = options | {"client_options": {"read_timeout": SILENCE} | client, "retry_config": retry}
        try:
            self.store: Any = from_url(url, **brisk)
            self.upload: Any = self.store if url.startswith("memory:") else from_url(url, **patient)
        except (BaseError, ValueError) as error:
            raise StoreError(f"cannot open the store {url}: {_first_line(error)}") from error

    def put(self, key: str, data: bytes) -> None:
        with self._named("write", key):
            self.api.put(self._for(data), key, data)

    def put_new(self, key: str, data: bytes) -> bool:
        try:
            with self._named("create", key):
                self.api.put(self._for(data), key, data, mode="create")
        except self.exists_already:
            return False
        return True

    def get_with_tag(self, key: str) -> tuple[bytes, str]:
        found = self.get_if_changed(key, "")
        assert found is not None
        return found

    def get_if_changed(self, key: str, tag: str) -> tuple[bytes, str] | None:
        options: Any = {"if_none_match": tag} if tag else None
        try:
            with self._named("read", key):
                result = self.api.get(self.store, key, options=options)
                data = bytes(result.bytes())
        except self.unchanged:
            return None
        except self.missing:
            raise KeyError(key) from None
        found = result.meta["e_tag"]
        if found is None:
            raise StoreError(f"{self.url} gave no entity tag for {key}: compare-and-set is impossible there")
        return data, found

    def swap(self, key: str, data: bytes, expected: str | None) -> str | None:
        mode: Any = "create" if expected is None else {"e_tag": expected}
        try:
            with self._named("swap", key):
                result = self.api.put(self.store, key, data, mode=mode, use_multipart=False)
        except (*self.exists_already, *self.outdated):
            return None
        return result["e_tag"]

    def _for(self, data: bytes) -> Any:
        return self.upload if len(data) >= LARGE else self.store

    def exists(self, key: str) -> bool:
        try:
            with self._named("look up", key):
                self.api.head(self.store, key)
        except self.missing:
            return False
        return True

    def modified(self, key: str) -> float:
        try:
            with self._named("look up", key):
                return self.api.head(self.store, key)["last_modified"].timestamp()
        except self.missing:
            raise KeyError(key) from None

    def list(self, prefix: str) -> list[str]:
        with self._named("list", prefix):
            return sorted(item["path"] for page in self.api.list(self.store, prefix or None) for item in page)

    def delete(self, key: str) -> None:
        with contextlib.suppress(*self.missing), self._named("delete", key):
            self.api.delete(self.store, key)

    @contextlib.contextmanager
    def _named(self, verb: str, key: str) -> Iterator[None]:
        """Let through the errors that carry a meaning here; make a sentence of the others."""
        try:
            yield
        except (*self.missing, *self.exists_already, *self.outdated, self.unchanged):
            raise
        except self.error as error:
            raise StoreError(f"cannot {verb} {key} in {self.url}: {_first_line(error)}") from error


def _checked(key: str) -> str:
    parts = key.split("/")
    if any(part in ("", ".", "..", PARTIAL) for part in parts) or "\\" in key or "\0" in key:
        raise StoreError(f"{key!r} is not a key: use slash-separated names, relative, without '.' or '..'")
    return key


def _first_line(error: BaseException) -> str:
    return str(error).strip().partition("\n")[0]


def _tag(data: bytes) -> str:
    return blake3.blake3(data).hexdigest(16)


@contextlib.contextmanager
def _temporary(folder: Path, data: bytes) -> Iterator[Path]:
    """A file with `data` on the disk; removed on the way out unless it was renamed."""
    part = folder / f".{os.getpid()}-{secrets.token_hex(8)}"
    try:
        with part.open("xb") as file:
            file.write(data)
            file.flush()
            os.fsync(file.fileno())
        yield part
    finally:
        part.unlink(missing_ok=True)


def _make_folder(folder: Path) -> None:
    """Create `folder` and its parents, each one durable."""
    if folder.is_dir():
        return
    _make_folder(folder.parent)
    folder.mkdir(exist_ok=True)
    _flush_folder(folder.parent)


def _flush_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
