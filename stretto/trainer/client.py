"""The trainer's side of the orchestrator's HTTP interface: four calls, blocking, patient with a restart.

A connection that fails is tried again until `patience` seconds have passed without an answer, or until `give_up` says
so; then the error names the URL. All calls may be repeated without harm.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from dataclasses import dataclass
from email.message import Message

from stretto.records import PAUSED_HEADER, Batch, Trained, decode, encode

ANSWER_SECONDS = 30.0
"""One request; a long poll ends after 5 s."""

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our services are not behind a proxy


@dataclass(frozen=True)
class NotYet:
    """There is no batch yet. `paused`: training was paused meanwhile, as it is before its start."""

    paused: bool


class OrchestratorError(RuntimeError):
    """A sentence: what the orchestrator at which URL refused, or that it does not answer."""


class Orchestrator:
    def __init__(self, url: str, patience: float = 60.0, give_up: Callable[[], bool] = lambda: False) -> None:
        self.url = url.rstrip("/")
        self._patience = patience
        self._give_up = give_up

    def committed(self) -> tuple[int, str] | None:
        """The version that the ledger holds as trained, and the chain it was published on; None in a new run."""
        data, _ = self._ask("GET", "/status")
        said = json.loads(data)
        return None if said["version"] is None else (int(said["version"]), str(said["chain"]))

    def set_version(self, version: int, chain: str) -> None:
        """Say which version training starts or goes on from, and on which chain it is published."""
        self._ask("POST", "/version", json.dumps({"version": version, "chain": chain}).encode(), "application/json")

    def batch(self, version: int) -> Batch | NotYet:
        """The batch that updates `version`; NotYet when it was not cut within about 5 s, or training was started or
        paused meanwhile."""
        data, headers = self._ask("GET", f"/batch?version={version}&wait=1")
        return decode(data, Batch) if data else NotYet(paused=PAUSED_HEADER in headers)

    def trained(self, batch: int) -> None:
        """Commit: the batch that updated version `batch` has become a published version."""
        self._ask("POST", "/trained", encode(Trained(batch=batch, version=batch + 1)), "application/msgpack")

    def _ask(self, method: str, path: str, body: bytes | None = None, kind: str = "") -> tuple[bytes, Message]:
        """The answer's body, empty for 204 (nothing yet), and its headers."""
        headers = {"Content-Type": kind} if kind else {}
        request = urllib.request.Request(self.url + path, data=body, headers=headers, method=method)
        started = time.monotonic()
        while True:
            try:
                with _DIRECT.open(request, timeout=ANSWER_SECONDS) as response:
                    return response.read(), response.headers
            except urllib.error.HTTPError as error:
                text = error.read().decode(errors="replace").strip()
                raise OrchestratorError(f"{method} {self.url}{path} was refused ({error.code}): {text}") from error
            except (OSError, http.client.HTTPException) as error:
                waited = time.monotonic() - started
                if waited > self._patience or self._give_up():
                    reason = getattr(error, "reason", error)
                    raise OrchestratorError(
                        f"the orchestrator at {self.url} has not answered for {waited:.0f} s: {reason}"
                    ) from error
                time.sleep(0.2)
