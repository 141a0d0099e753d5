"""Which rows go through the network in the next pass: continuous batching, as a pure object.

    submit ──▶ waiting (fair: first come) ──▶ slot: missing rows computed in chunks ──▶ one token per pass ──▶ finished

Every active slot has `known` ids and `rows` of them computed. One missing row is a decode step, more are a prefill;
both go into one pass, prefill up to a budget so that decoding is not held up. The last row of a slot gives the logits
of its next token. There are no phases to get out of step.

Requests that share a prefix compute it once: the first computes, the others wait for those rows and copy them.
Time, tensors and threads are the runner's; sampling is `sampler`'s.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

import numpy as np

from stretto.engine.contract import check_request
from stretto.engine.slots import MIN_SHARE, Routes, Slots
from stretto.records import GenerateRequest, GenerateResponse, RouteChunk
from stretto.support import Support


@dataclass(eq=False)
class Job:
    """One request on its way through the engine. `key` is the caller's handle and the order of arrival."""

    key: int
    request: GenerateRequest
    seed: int  # of its uniforms; drawn by the runner when the request names none
    stream: bool = False
    slot: int = -1
    cached: int = 0
    continuing: bool = False  # goes on with the rows its session holds, whatever weights made them
    seeking: bool = False  # its rows could still come from another slot
    supports: list[Support] = field(default_factory=list)  # of the tokens sampled so far, where top-p or top-k cut
    ids: np.ndarray = field(init=False)

    def __post_init__(self) -> None:
        self.ids = np.asarray(self.request.ids, np.int32)


@dataclass(frozen=True)
class Chunk:
    """Rows `[start, end)` of the pass are positions `[position, position + end - start)` of `slot`."""

    slot: int
    start: int
    end: int
    position: int


@dataclass(frozen=True)
class Plan:
    """One forward pass. `T` rows: first one per decoding slot, then the chunks; `N` of them are sampled from."""

    copies: list[tuple[int, int, int]]  # (source slot, slot, rows), to be done in order before the pass
    slots_T: np.ndarray
    positions_T: np.ndarray
    ids_T: np.ndarray
    decoding: int  # the first so many rows are one per slot
    chunks: list[Chunk]
    sampled_N: np.ndarray  # rows of the pass whose logits are wanted
    samplers_N: np.ndarray  # their slots; a row of several equal prompts is sampled from once for each of them
    next_N: np.ndarray  # the positions their tokens will have
    twins: list[tuple[int, int, int]]  # copies to be done after the pass, to slots that wait for exactly these rows
    serial: int


@dataclass(frozen=True)
class Ended:
    """A job is over: with a response, or with a sentence that says why there is none."""

    job: Job
    response: GenerateResponse | None
    error: str = ""


@dataclass(frozen=True)
class Streamed:
    """One token of a job that asked to see each."""

    job: Job
    token: int
    logprob: float


class Scheduler:
    """Slots, the queue before them, and what each pass does. Not thread-safe: the runner's thread owns it."""

    def __init__(self, slots: int, max_tokens: int, prefill_tokens: int, vocab_size: int, routes: Routes):
        self.slots = Slots(slots, max_tokens, routes)
        self.routes = routes
        self.vocab_size = vocab_size
        self.prefill_tokens = prefill_tokens
        self.waiting: deque[Job] = deque()
        self.active: dict[int, Job] = {}  # by slot, in order of admission
        self.start_S = np.zeros(slots, np.int64)  # first position this job samples
        self.end_S = np.zeros(slots, np.int64)  # position it may not sample
        self.stop_SV = np.zeros((slots, vocab_size), bool)
        self.temperature_S = np.zeros(slots, np.float32)
        self.top_p_S = np.ones(slots)  # float64, as the trainer compares
        self.top_k_S = np.zeros(slots, np.int64)
        self.seed_S = np.zeros(slots, np.uint64)
        self.holding = False
        """While set, what waits goes on waiting."""
        self._admitted = 0
        self._room = True  # something changed since the queue was last looked at
        self._active_A = np.zeros(0, np.int64)  # the keys of `active`
        self._streams = 0

    def check(self, request: GenerateRequest) -> None:
        """Raise BadRequest with a sentence for what this engine cannot do. Thread-safe."""
        check_request(request, self.vocab_size, self.slots.max_tokens)

    def submit(self, job: Job) -> None:
        self.waiting.append(job)
        self._room = True

    @property
    def busy(self) -> bool:
        """Whether a pass would have anything to do."""
        return bool(self.active or self.waiting)

    def abort(self, key: int) -> Ended | None:
        """End a job now, with what it has sampled; its rows stay in the slot. None if it is not here."""
        for job in self.waiting:
            if job.key == key:
                self.waiting.remove(job)
                return Ended(job, self._unstarted(job))
        for job in self.active.values():
            if job.key == key:
                return self._end(job, "aborted")
        return None

    def release(self, session: str) -> list[Ended]:
        """Forget a session. Its rows still serve as a prefix for others until the slot is needed."""
        jobs = [*self.active.values(), *self.waiting]
        ended = [self.abort(job.key) for job in jobs if job.request.session == session]
        if session in self.slots.sessions:
            self.slots.rename(self.slots.sessions[session], "")
        return [item for item in ended if item is not None]

    def swapped(self, recompute: bool = False) -> None:
        """The weights have changed: old rows serve only those that go on with them. A new request that has not
        sampled yet starts over, so that nothing of it comes from old weights. With `recompute` nobody goes on with old
        rows: generations and sessions have theirs made again before their next token."""
        slots = self.slots
        slots.serial += 1
        for slot, job in self.active.items():
            fresh = slots.known_S[slot] == self.start_S[slot] and not job.continuing
            if fresh or recompute:
                slots.restart(slot) if fresh else slots.recompute(slot)
                job.seeking, job.cached = True, 0
        for slot in slots.sessions.values() if recompute else ():
            if slot not in self.active:
                slots.recompute(slot)

    def plan(self) -> Plan | None:
        """The next pass, or None when there is nothing to do."""
        if self._room and not self.holding:
            self._admit()
        copies = self._share()
        slots = self.slots
        active_A = self._active_A
        missing_A = slots.known_S[active_A] - slots.rows_S[active_A]
        held = [slot for slot, job in self.active.items() if job.seeking]
        if held:
            missing_A = np.where(np.isin(active_A, held), 0, missing_A)
        decoding_B = active_A[missing_A == 1]
        chunks = self._chunks(active_A[missing_A > 1], len(decoding_B))
        if not len(decoding_B) and not chunks:
            return None
        if not chunks:  # what most passes are, in fewer steps
            positions_B, rows_B = slots.rows_S[decoding_B], np.arange(len(decoding_B))
            return Plan(
                copies=copies,
                slots_T=decoding_B,
                positions_T=positions_B,
                ids_T=slots.ids_SM[decoding_B, positions_B].astype(np.int64),
                decoding=len(decoding_B),
                chunks=[],
                sampled_N=rows_B,
                samplers_N=decoding_B,
                next_N=slots.known_S[decoding_B],
                twins=[],
                serial=slots.serial,
            )
        spans = [(decoding_B, slots.rows_S[decoding_B])]
        spans += [(np.full(c.end - c.start, c.slot), np.arange(c.end - c.start) + c.position) for c in chunks]
        slots_T, positions_T = (np.concatenate(part) for part in zip(*spans, strict=True))
        complete = [c for c in chunks if c.position + c.end - c.start == slots.known_S[c.slot]]
        twins = self._twins(complete, held)
        lasts = {c.slot: c.end - 1 for c in complete}
        sampled = [*lasts.values(), *(lasts[source] for source, _, _ in twins)]
        samplers = [*lasts, *(slot for _, slot, _ in twins)]
        samplers_N = np.concatenate([decoding_B, np.array(samplers, np.int64)])
        return Plan(
            copies=copies,
            slots_T=slots_T,
            positions_T=positions_T,
            ids_T=slots.ids_SM[slots_T, positions_T].astype(np.int64),
            decoding=len(decoding_B),
            chunks=chunks,
            sampled_N=np.concatenate([np.arange(len(decoding_B)), np.array(sampled, np.int64)]),
            samplers_N=samplers_N,
            next_N=slots.known_S[samplers_N],
            twins=twins,
            serial=slots.serial,
        )

    def commit(
        self,
        plan: Plan,
        routes_TLK: np.ndarray | None,
        ids_N: np.ndarray,
        logprobs_N: np.ndarray,
        version: int,
        support: Support | None = None,
    ) -> list[Ended | Streamed]:
        """Write what the pass made, all streams of a token together, and end the jobs that are done. `support` is there
        when any of the N tokens came from a truncated distribution."""
        slots = self.slots
        if routes_TLK is not None:
            slots.record(plan.slots_T, plan.positions_T, plan.ids_T, routes_TLK)
        slots.begin(plan.slots_T[plan.positions_T == 0], plan.serial)
        np.add.at(slots.rows_S, plan.slots_T[: plan.decoding], 1)  # a slot has several rows where guesses came true
        for chunk in plan.chunks:
            slots.rows_S[chunk.slot] += chunk.end - chunk.start
        for source, slot, rows in plan.twins:
            slots.share(source, slot, rows)
            job = self.active[slot]
            job.seeking, job.cached = False, rows

        finite_N = np.isfinite(logprobs_N)
        at = (plan.samplers_N, plan.next_N)
        slots.ids_SM[at], slots.logprobs_SM[at], slots.versions_SM[at] = ids_N, logprobs_N, version
        np.add.at(slots.known_S, plan.samplers_N, 1)
        for slot, one in zip(plan.samplers_N.tolist(), support.split() if support is not None else []):
            if self.active[slot].request.sampling.truncated:
                self.active[slot].supports.append(one)
        stopped_N = self.stop_SV[plan.samplers_N, ids_N]
        full_N = plan.next_N + 1 >= self.end_S[plan.samplers_N]

        events: list[Ended | Streamed] = []
        if self._streams:
            for slot, token, logprob in zip(plan.samplers_N.tolist(), ids_N.tolist(), logprobs_N.tolist(), strict=True):
                if self.active[slot].stream:
                    events.append(Streamed(self.active[slot], token, logprob))
        for n in np.flatnonzero(stopped_N | full_N | ~finite_N).tolist():
            job = self.active[int(plan.samplers_N[n])]
            if finite_N[n]:
                events.append(self._end(job, "stop" if stopped_N[n] else "length"))
            else:
                self._end(job, "aborted")
                events.append(Ended(job, None, f"version {version} gave logits that are not finite"))
        return events

    def _admit(self) -> None:
        """Give slots to waiting jobs, first come first served; a session's turn goes to the slot it holds."""
        self._room = False
        full = False
        for job in list(self.waiting):
            slot = self.slots.sessions.get(job.request.session)
            if slot is None:
                slot = None if full else self.slots.victim()
                full = full or slot is None
            if slot is not None and not self.slots.active_S[slot]:  # else the session's previous turn is still running
                self.waiting.remove(job)
                self._place(job, slot)

    def _place(self, job: Job, slot: int) -> None:
        request, sampling = job.request, job.request.sampling
        self._admitted += 1
        held = bool(request.session) and self.slots.sessions.get(request.session) == slot
        job.slot = slot
        job.cached = self.slots.claim(slot, job.ids, request.session, self._admitted, keep_stale=held)
        job.continuing = held and (job.cached > 0 or bool(self.slots.kept_S[slot]))
        job.seeking = not job.cached or not job.continuing
        self.active[slot] = job
        self._streams += job.stream
        self._active_A = np.fromiter(self.active, np.int64, len(self.active))
        self.start_S[slot], self.end_S[slot] = len(job.ids), len(job.ids) + request.max_tokens
        self.stop_SV[slot] = False
        self.stop_SV[slot, request.stop] = True
        self.temperature_S[slot], self.top_p_S[slot] = sampling.temperature, sampling.top_p
        self.top_k_S[slot], self.seed_S[slot] = sampling.top_k, job.seed

    def _share(self) -> list[tuple[int, int, int]]:
        """Copies that spare rows. A job stays `seeking` while an earlier one is computing rows that it needs too."""
        copies = []
        waiting: set[tuple[int, bytes]] = set()  # rows and ids of those who stay; so do their equals
        for slot, job in self.active.items():
            if not job.seeking:
                continue
            own = int(self.slots.rows_S[slot])
            if (wish := (own, job.ids.tobytes())) in waiting:
                continue
            source, now, later = self.slots.source(slot)
            if later - max(now, own) >= MIN_SHARE:
                waiting.add(wish)
                continue
            job.seeking = False
            if now - own >= MIN_SHARE:
                self.slots.share(source, slot, now)
                copies.append((source, slot, now))
            job.cached = int(self.slots.rows_S[slot])
        return copies

    def _twins(self, complete: list[Chunk], held: list[int]) -> list[tuple[int, int, int]]:
        """(source, slot, rows) for those that wait for exactly the ids that a chunk completes: they need no row of
        their own, not even the last one, whose logits are theirs too."""
        slots, twins = self.slots, []
        for slot in held:
            rows = int(slots.known_S[slot])
            for chunk in complete:
                live = chunk.position == 0 or slots.serial_S[chunk.slot] == slots.serial
                live = live and not slots.kept_S[chunk.slot]
                alike = live and slots.known_S[chunk.slot] == rows
                if alike and np.array_equal(slots.ids_SM[chunk.slot, :rows], slots.ids_SM[slot, :rows]):
                    twins.append((chunk.slot, slot, rows))
                    break
        return twins

    def _chunks(self, slots_A: np.ndarray, start: int) -> list[Chunk]:
        """Prefill in order of admission until the budget is spent."""
        budget, chunks = self.prefill_tokens, []
        for slot in slots_A.tolist():
            position = int(self.slots.rows_S[slot])
            count = min(int(self.slots.known_S[slot]) - position, budget)
            if count == 0:
                break
            chunks.append(Chunk(slot, start, start + count, position))
            start, budget = start + count, budget - count
        return chunks

    def _end(self, job: Job, finish: str) -> Ended:
        slots, slot = self.slots, job.slot
        del self.active[slot]
        self._active_A = np.fromiter(self.active, np.int64, len(self.active))
        self._streams -= job.stream
        self._room = True
        slots.idle(slot)
        start, known = int(self.start_S[slot]), int(slots.known_S[slot])
        routes = slots.chunk(slot, job.request.routes_from, max(known - 1, job.request.routes_from))
        return Ended(job, self._response(job, slot, slice(start, known), routes, finish))

    def _unstarted(self, job: Job) -> GenerateResponse:
        """No pass has seen it, so none of its rows is known."""
        ids = job.ids[job.request.routes_from : -1]
        routes = None
        if self.routes.layers:
            shape = len(ids), self.routes.layers, self.routes.per_token
            unknown = np.full(shape, self.routes.unknown, self.slots.routes_SMLK.dtype)
            routes = RouteChunk.seal(job.request.routes_from, ids, unknown)
        return self._response(job, 0, slice(0, 0), routes, "aborted")

    def _response(
        self, job: Job, slot: int, sampled: slice, routes: RouteChunk | None, finish: str
    ) -> GenerateResponse:
        support = None
        if job.request.sampling.truncated:
            support = Support.join([Support.none(self.vocab_size), *job.supports]).seal()
        return GenerateResponse(
            ids=self.slots.ids_SM[slot, sampled].tolist(),
            logprobs=self.slots.logprobs_SM[slot, sampled].tobytes(),
            versions=self.slots.versions_SM[slot, sampled].tobytes(),
            support=support,
            routes=routes,
            route_shape=(self.routes.layers, self.routes.per_token),
            route_bits=self.routes.bits,
            finish=finish,
            cached=job.cached,
        )
