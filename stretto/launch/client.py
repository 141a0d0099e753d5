"""What the launcher and the display ask of HTTP services: JSON in, JSON out, every call with a deadline."""

from __future__ import annotations

import http.client
import json
import urllib.error
import urllib.request
from dataclasses import dataclass
from typing import Any

import msgspec

from stretto.records import EngineStatus, encode

_DIRECT = urllib.request.build_opener(urllib.request.ProxyHandler({}))  # our services are not behind the user's proxy


class Unanswered(RuntimeError):
    """The service at this URL did not answer, or refused; the text says which and why."""


class Refused(Unanswered):
    """It answered, and said no: asking again is no use."""


def ask(
    url: str, body: Any = None, timeout: float = 10.0, raw: bytes | None = None, method: str | None = None
) -> dict[str, Any]:
    """GET, or POST when there is a body (`body` as JSON, `raw` as msgpack); the JSON answer, {} when it is empty.

    Raises Unanswered with a sentence that names the URL.
    """
    data = raw if raw is not None else json.dumps(body).encode() if body is not None else None
    kind = "application/msgpack" if raw is not None else "application/json"
    request = urllib.request.Request(url, data=data, headers={"Content-Type": kind}, method=method)
    try:
        with _DIRECT.open(request, timeout=timeout) as answer:
            text = answer.read()
        tree = json.loads(text) if text.strip() else {}
    except urllib.error.HTTPError as error:
        said = error.read().decode("utf-8", "replace").strip()[:500]
        raise Refused(f"{url} refused ({error.code}): {said or error.reason}") from error
    except (OSError, http.client.HTTPException) as error:
        raise Unanswered(f"{url} did not answer: {getattr(error, 'reason', None) or error}") from error
    except ValueError as error:
        raise Unanswered(f"{url} answered something that is not JSON") from error
    return tree if isinstance(tree, dict) else {"answer": tree}


@dataclass(frozen=True)
class Evaluation:
    """One evaluation to run: `name` is unique within a run and becomes the rollouts' purpose."""

    name: str
    split: str
    attempts: int
    temperature: float
    tasks: int | None = None  # the first so many tasks of the split; None is all


class Orchestrator:
    """The orchestrator's HTTP interface, as far as a launcher needs it."""

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")

    def status(self, timeout: float = 5.0) -> dict[str, Any]:
        return ask(f"{self.url}/status", timeout=timeout)

    def start(self) -> None:
        """Let training leases flow."""
        ask(f"{self.url}/start", {})

    def pause(self) -> None:
        """Stop training leases; what is in flight ends."""
        ask(f"{self.url}/pause", {})

    def worker_left(self, name: str) -> None:
        """A worker is known to be dead: its leases go to others at once."""
        ask(f"{self.url}/worker?name={name}", method="DELETE", timeout=2.0)

    def version(self, version: int, chain: str) -> None:
        ask(f"{self.url}/version", {"version": version, "chain": chain})

    def engine(self, status: EngineStatus) -> None:
        """Make an engine routable; in a run with weights the follower does this."""
        ask(f"{self.url}/engine", raw=encode(status))

    def evaluate(self, evaluation: Evaluation) -> str:
        """Begin an evaluation; its id."""
        body = msgspec.to_builtins(evaluation)
        return str(ask(f"{self.url}/evaluate", body)["id"])

    def evaluation(self, id: str) -> dict[str, Any]:
        """How far it is: `done`, `finished`, `total`, `solved` per task, `behaviour`, `outcomes`."""
        return ask(f"{self.url}/evaluate/{id}")
