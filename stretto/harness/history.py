"""What the policy has seen and said so far: token ids that only grow, and the streams that go with them.

Ids, log-probs, versions, supports and routes of a token are appended together or not at all, so all streams of a
rollout are always equally long. Routes lag by one token: the last token sampled has not been through the network yet,
so its row comes with the next turn's response, or stays *unknown* when there is none.

    turn 1   [ prompt ............ | sampled .... ]       rows answered: 0 .. n-1
    turn 2   [ ........................... | observation | sampled ... ]
                                         ^ routes_from: the first position without a row

Nothing here is ever re-tokenised, padded or repaired: an engine's answer that does not fit is refused with a sentence.
Routes and supports are opened to see that they belong to these very tokens, then kept as the engine sealed them.
"""

from __future__ import annotations

import numpy as np

from stretto.records import NOT_SAMPLED, GenerateResponse, RouteChunk, Segment, SupportChunk
from stretto.support import Support

_NAN = np.array([np.nan], "<f4").tobytes()
_NOT_SAMPLED = np.array([NOT_SAMPLED], "<i4").tobytes()


class StreamError(ValueError):
    """An engine's answer does not continue this history; the sentence says which stream is wrong."""


class History:
    """One append-only segment in the making. `truncated`: its tokens are sampled under top-p or top-k, so that each
    comes with the set it was drawn from."""

    def __init__(self, ids: list[int], truncated: bool = False):
        self.ids: list[int] = []
        self.rows = 0
        """Positions `[0, rows)` whose route rows have been received."""
        self._logprobs = bytearray()
        self._versions = bytearray()
        self._supports: list[SupportChunk] | None = [] if truncated else None
        self._routes: list[RouteChunk] = []
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
        in length, hold no finite log-prob or version, if the route rows overlap those held, leave a hole or were made
        for other tokens, or if a token is not in the set it is said to be drawn from."""
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
        self._check_support(response)
        self._check_routes(response, len(self.ids) + count - 1)
        self.ids += response.ids
        self._logprobs += response.logprobs
        self._versions += response.versions
        if self._supports is not None and response.support is not None:
            self._supports.append(response.support)
        self._layout = response.route_shape, response.route_bits
        if response.routes is not None:
            self._routes.append(response.routes)
            self.rows = response.routes.end

    def segment(self) -> Segment:
        """The streams so far."""
        shape, bits = self._layout or ((0, 0), 8)
        return Segment(
            ids=np.array(self.ids, "<i4").tobytes(),
            logprobs=bytes(self._logprobs),
            versions=bytes(self._versions),
            support=None if self._supports is None else list(self._supports),
            routes=list(self._routes),
            route_shape=shape,
            route_bits=bits,
        )

    def _check_routes(self, response: GenerateResponse, end: int) -> None:
        layout = response.route_shape, response.route_bits
        if self._layout is not None and layout != self._layout:
            raise StreamError(f"the engine's routes changed from (L, K), bits {self._layout} to {layout}")
        if response.route_bits not in (8, 16):
            raise StreamError(f"the engine's routes are {response.route_bits} bits wide, not 8 or 16")
        routes = response.routes
        if (routes is None) != (0 in response.route_shape):
            sent = "no routes" if routes is None else "routes"
            raise StreamError(f"the engine sent {sent} and says their (L, K) is {response.route_shape}")
        if routes is None:
            return
        if routes.start != self.rows:
            what = "overlap those held" if routes.start < self.rows else "leave a hole"
            raise StreamError(f"the engine's route rows {what}: they start at position {routes.start}, not {self.rows}")
        if routes.end != end:
            raise StreamError(f"the engine sent {routes.count} route rows for positions {self.rows} to {end}")
        ids_T = np.array((self.ids[routes.start :] + response.ids)[: routes.count], "<i4")
        try:
            routes.open(ids_T, response.route_shape, response.route_bits)
        except ValueError as error:
            raise StreamError(f"the engine's routes are wrong: {error}") from None

    def _check_support(self, response: GenerateResponse) -> None:
        if (response.support is None) != (self._supports is None):
            missing, unasked = "does not say from which tokens, though top-p or top-k is set", "sent supports unasked"
            raise StreamError(f"the engine sampled and {missing if response.support is None else unasked}")
        if response.support is None:
            return
        try:
            support = Support.open(response.support)
        except ValueError as error:
            raise StreamError(f"the engine's {error}") from None
        if len(support) != len(response.ids):
            raise StreamError(f"the engine sampled {len(response.ids)} tokens but sent {len(support)} supports")
        ids_N = np.array(response.ids)
        if ids_N.max() >= support.vocab or not support.contains(ids_N).all():
            raise StreamError("the engine sampled a token outside the set that it says it drew from")
