"""The table of KV slots: what each slot holds, in numpy, one row per slot.

A slot holds the ids of one sequence (`known` of them) and, for the first `rows` of those, the KV row, its routes and
the weights that made it. A row's id, routes and KV always move together: `share` copies them, `claim` drops them.
`row_ids` are those that went through the network, apart from `ids`, so that an answer's routes are sealed with the
tokens that really made them.

Rows are appended, so the weights that made them never get older along a slot: when row 0 was made by the live weights,
all rows were. `serial` (a count of weight swaps) of row 0 is therefore enough to keep new requests off old KV.

A session whose KV is made again by new weights (`recompute`) keeps the routes of its first `kept` rows as they were
recorded: they belong to log-probs that others were told. So nobody else may use those rows.

Letters: `S` slots, `M` tokens per slot, `L` MoE layers, `K` experts per token.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from stretto.records import RouteChunk, route_bits, unknown_expert

MIN_SHARE = 16
"""Rows below which sharing another slot's prefix is not worth a copy or a wait."""

_NO_SERIAL = -1
_MIXED = -2  # KV of one version, routes of another
_CLASS = 1 << 48  # separates eviction classes above the clock of last use


@dataclass(frozen=True)
class Routes:
    """Shape of one token's routes; `layers` 0 is a dense model."""

    layers: int
    per_token: int
    experts: int

    @property
    def bits(self) -> int:
        return route_bits(self.experts)

    @property
    def unknown(self) -> int:
        return unknown_expert(self.bits)


class Slots:
    """State of all slots. Pure: knows nothing of tensors, requests or time (`clock` counts uses)."""

    def __init__(self, slots: int, max_tokens: int, routes: Routes):
        self.max_tokens = max_tokens
        self.serial = 0  # of the live weights
        self.ids_SM = np.zeros((slots, max_tokens), np.int32)
        self.row_ids_SM = np.zeros((slots, max_tokens), np.int32)
        self.logprobs_SM = np.full((slots, max_tokens), np.nan, np.float32)
        self.versions_SM = np.full((slots, max_tokens), -1, np.int32)
        self.unknown = routes.unknown
        dtype = np.uint8 if routes.bits == 8 else np.uint16
        self.routes_SMLK = np.full((slots, max_tokens, routes.layers, routes.per_token), routes.unknown, dtype)
        self.known_S = np.zeros(slots, np.int64)
        self.rows_S = np.zeros(slots, np.int64)
        self.serial_S = np.full(slots, _NO_SERIAL, np.int64)
        self.kept_S = np.zeros(slots, np.int64)
        self.active_S = np.zeros(slots, bool)
        self.named_S = np.zeros(slots, bool)
        self.order_S = np.zeros(slots, np.int64)  # admission order of the active request
        self.used_S = np.zeros(slots, np.int64)
        self.sessions: dict[str, int] = {}  # name -> slot
        self._names = [""] * slots
        self._clock = 0

    def __len__(self) -> int:
        return len(self.known_S)

    def victim(self) -> int | None:
        """The slot to take for a new sequence: an empty one, else the least recently used idle one, those that no
        session waits for first, those of old weights before all others. None when every slot is active."""
        stale = self.serial_S != self.serial
        kind = np.where(self.rows_S == 0, 0, np.where(stale, 1, 2))
        kind = np.where(self.named_S, 3, kind)
        key = np.where(self.active_S, np.iinfo(np.int64).max, kind * _CLASS + self.used_S)
        slot = int(key.argmin())
        return None if self.active_S[slot] else slot

    def claim(self, slot: int, ids: np.ndarray, session: str, order: int, keep_stale: bool) -> int:
        """Make `slot` active for `ids`; rows of the common prefix stay, others are dropped. Returns the rows kept.

        At least one id is left to compute, because its logits are needed. With `keep_stale` (a session going on) rows
        of older weights stay if the new ids continue all that the slot held, or repeat it; otherwise they go.
        """
        held = int(self.rows_S[slot])
        limit = min(held, len(ids) - 1)
        different = self.ids_SM[slot, :limit] != ids[:limit]
        rows = int(different.argmax()) if different.any() else limit
        stale = self.serial_S[slot] != self.serial
        if stale and not (keep_stale and rows == limit):
            rows = 0
        kept = int(self.kept_S[slot])
        if kept and not (keep_stale and kept < len(ids) and np.array_equal(self.ids_SM[slot, :kept], ids[:kept])):
            self.kept_S[slot] = rows = 0
        self.rename(slot, session)
        self.ids_SM[slot, rows : len(ids)] = ids[rows:]
        self.known_S[slot] = len(ids)
        self._cut(slot, rows)
        self.active_S[slot] = True
        self.order_S[slot] = order
        return rows

    def restart(self, slot: int) -> None:
        """Drop all rows; the ids stay, to be computed again."""
        self.kept_S[slot] = 0
        self._cut(slot, 0)

    def recompute(self, slot: int) -> None:
        """Drop the KV of all rows; what was recorded of them stays."""
        self.kept_S[slot] = max(self.kept_S[slot], self.rows_S[slot])
        self._cut(slot, 0)

    def record(self, slots_T: np.ndarray, positions_T: np.ndarray, ids_T: np.ndarray, routes_TLK: np.ndarray) -> None:
        """What a pass made, except where rows keep what was recorded before."""
        if self.kept_S.any():
            fresh_T = positions_T >= self.kept_S[slots_T]
            slots_T, positions_T, ids_T, routes_TLK = (x[fresh_T] for x in (slots_T, positions_T, ids_T, routes_TLK))
        self.routes_SMLK[slots_T, positions_T] = routes_TLK
        self.row_ids_SM[slots_T, positions_T] = ids_T

    def begin(self, slots_B: np.ndarray, serial: int) -> None:
        """The first row of these slots was made by the weights of `serial`."""
        self.serial_S[slots_B] = np.where(self.kept_S[slots_B] > 0, _MIXED, serial)

    def idle(self, slot: int) -> None:
        """The request of `slot` has ended; its rows stay until the slot is needed."""
        self.active_S[slot] = False
        self._clock += 1
        self.used_S[slot] = self._clock

    def rename(self, slot: int, session: str) -> None:
        """Bind the slot to a session, or to none (``""``)."""
        if self._names[slot]:
            del self.sessions[self._names[slot]]
        self._names[slot] = session
        self.named_S[slot] = bool(session)
        if session:
            self.sessions[session] = slot

    def source(self, slot: int) -> tuple[int, int, int]:
        """Where the rows of `slot`'s ids could come from: (other slot, rows it has now, rows it will have).

        Only rows of the live weights count; rows still to come count for requests admitted earlier, so that nobody
        waits in a circle. (-1, 0, 0) when there is nothing.
        """
        ids = self.ids_SM[slot, : self.known_S[slot] - 1]
        live = (self.serial_S == self.serial) & (self.rows_S > 0)
        coming = self.active_S & (self.order_S < self.order_S[slot]) & (live | (self.rows_S == 0)) & (self.kept_S == 0)
        usable = (live | coming) & (self.known_S > 0)
        usable[slot] = False
        if len(ids) < MIN_SHARE:
            return -1, 0, 0
        # one 64-bit compare rules out most slots before whole prompts are compared
        usable &= (self.ids_SM[:, :MIN_SHARE] == ids[:MIN_SHARE]).all(axis=1)
        candidates = np.flatnonzero(usable)
        if not len(candidates):
            return -1, 0, 0
        different = self.ids_SM[candidates, : len(ids)] != ids
        common = np.where(different.any(axis=1), different.argmax(axis=1), len(ids))
        now = np.minimum(common, np.where(live[candidates], self.rows_S[candidates], 0))
        later = np.where(coming[candidates], np.minimum(common, self.known_S[candidates]), now)
        best = int((later * (self.max_tokens + 1) + now).argmax())
        return int(candidates[best]), int(now[best]), int(later[best])

    def share(self, source: int, slot: int, rows: int) -> None:
        """Give `slot` the first `rows` rows of `source`; the caller copies the KV. Their ids are equal already."""
        fresh = slice(int(self.kept_S[slot]), rows)
        self.routes_SMLK[slot, fresh] = self.routes_SMLK[source, fresh]
        self.row_ids_SM[slot, fresh] = self.row_ids_SM[source, fresh]
        self.begin(np.array([slot]), int(self.serial_S[source]))
        self.rows_S[slot] = rows
        self._clock += 1
        self.used_S[source] = self._clock

    def chunk(self, slot: int, start: int, end: int) -> RouteChunk | None:
        """Routes of positions `[start, end)`; what no pass has computed yet is unknown. None for a dense model."""
        if not self.routes_SMLK.shape[2]:
            return None
        made = max(int(self.rows_S[slot]), int(self.kept_S[slot])) - start
        made = min(max(made, 0), max(end - start, 0))
        routes, ids = self.routes_SMLK[slot, start:end].copy(), self.row_ids_SM[slot, start:end].copy()
        routes[made:] = self.unknown
        ids[made:] = self.ids_SM[slot, start + made : end]
        return RouteChunk.seal(start, ids, routes)

    def _cut(self, slot: int, rows: int) -> None:
        self.rows_S[slot] = rows
        if rows == 0:
            self.serial_S[slot] = _NO_SERIAL
