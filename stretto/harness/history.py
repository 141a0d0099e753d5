"""What the policy has seen and said so far: token ids that only grow, and the streams that go with them.

Ids, log-probs, versions and routes of a token are appended together or not at all, so all streams of a rollout are
always equally long. Routes lag by one token: the last token sampled has not been through the network yet, so its row
comes with the next turn's response, or stays *unknown* when there is none.

    turn 1   [ prompt ............ | sampled .... ]       rows answered: 0 .. n-1
    turn 2   [ ........................... | observation | sampled ... ]
                                         ^ routes_from: the first position without a row

Nothing here is ever re-tokenised, padded or repaired: an engine's answer that does not fit is refused with a sentence.
"""

from __future__ import annotations

import numpy as np

from stretto.records import NOT_SAMPLED, GenerateResponse, Segment, unknown_expert

_NAN = np.array([np.nan], "<f4").tobytes()
_NOT_SAMPLED = np.array([NOT_SAMPLED], "<i4").tobytes()


class StreamError(ValueError):
    """An engine's answer does not continue this history; the sentence says which stream is wrong."""


class History:
    """One append-only segment in the making."""

    def __init__(self, ids: list[int]):
        self.ids: list[int] = []
        self.rows = 0
        """Positions `[0, rows)` whose route rows have been received."""
        self._logprobs = bytearray()
        self._versions = bytearray()
        self._routes = bytearray()
        self._layout: tuple[tuple[int, int], int] | None = None  # (L, K), bits; set by the first answer
        self.give(ids)

    def __len__(self) -> int:
        return len(self.ids)

    def give(self, ids: list[int]) -> None:
        """Append tokens that the policy did not sample: prompt, observation, a stop token it never got to."""
        self.ids += ids
        self._logprobs += _NAN * len(ids)
        self._versions += _NOT_SAMPLED * len(ids)

    def take(self, response: GenerateResponse) -> None:
        """Append what the engine sampled, with all its streams. Raises StreamError and changes nothing if they differ
        in length, hold no finite log-prob or version, or if the route rows overlap those held or leave a hole."""
        count = len(response.ids)
        if count == 0:
            return
        if len(response.logprobs) != 4 * count or len(response.versions) != 4 * count:
            raise StreamError(
                f"the engine sampled {count} tokens but sent {len(response.logprobs) / 4:g} log-probs "
                f"and {len(response.versions) / 4:g} versions"
            )
        if not np.isfinite(np.frombuffer(response.logprobs, "<f4")).all():
            raise StreamError("the engine sent a log-prob that is not finite")
        if np.frombuffer(response.versions, "<i4").min() < 0:
            raise StreamError("the engine sent a sampled token without a policy version")
        self._check_routes(response, len(self.ids) + count - 1)
        self.ids += response.ids
        self._logprobs += response.logprobs
        self._versions += response.versions
        self._routes += response.routes
        self._layout = response.route_shape, response.route_bits
        if response.route_shape != (0, 0):
            self.rows = len(self.ids) - 1

    def segment(self) -> Segment:
        """The streams so far; rows not received are filled with `unknown_expert`."""
        shape, bits = self._layout or ((0, 0), 8)
        missing = (len(self.ids) - self.rows) * shape[0] * shape[1]
        unknown = unknown_expert(bits).to_bytes(bits // 8, "little") * missing
        return Segment(
            ids=np.array(self.ids, "<i4").tobytes(),
            logprobs=bytes(self._logprobs),
            versions=bytes(self._versions),
            routes=bytes(self._routes) + unknown,
            route_shape=shape,
            route_bits=bits,
        )

    def _check_routes(self, response: GenerateResponse, end: int) -> None:
        layout = response.route_shape, response.route_bits
        if self._layout is not None and layout != self._layout:
            raise StreamError(f"the engine's routes changed from (L, K), bits {self._layout} to {layout}")
        if response.route_bits not in (8, 16):
            raise StreamError(f"the engine's routes are {response.route_bits} bits wide, not 8 or 16")
        row = response.route_shape[0] * response.route_shape[1] * response.route_bits // 8
        if row == 0:
            if response.routes:
                raise StreamError(f"the engine sent routes of shape {response.route_shape}, a dense model's")
            return
        if response.routes_from != self.rows:
            what = "overlap those held" if response.routes_from < self.rows else "leave a hole"
            raise StreamError(
                f"the engine's route rows {what}: they start at position {response.routes_from}, not {self.rows}"
            )
        if len(response.routes) != (end - self.rows) * row:
            raise StreamError(
                f"the engine sent {len(response.routes) / row:g} route rows for positions {self.rows} to {end}"
            )
