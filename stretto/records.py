"""Everything that travels between processes, in one file.

Records are frozen msgspec structs, encoded with msgpack. Per-token streams are raw little-endian bytes with
numpy views, so that a rollout of a million tokens costs no Python objects; the two large ones, routes and supports, are
compressed chunks, sealed by the engine and carried as they are to the trainer. Shapes: `T` tokens of a segment, `N`
sampled tokens, `L` MoE layers, `K` experts per token.

This module imports nothing of ours.
"""

from __future__ import annotations

import enum
from typing import Annotated, Any

import msgspec
import numpy as np
import xxhash
import zstandard

NOT_SAMPLED = -1
"""Policy version of a token that the policy did not sample (prompt, observation)."""

PAUSED_HEADER = "Stretto-Paused"
"""On an answer to the trainer that holds no batch: training was paused while it waited, so that none could be made."""


class Outcome(enum.StrEnum):
    """How a rollout ended. Exactly one; only `INFRA` leaves the batch and the group's statistics."""

    SCORED = "scored"  # the policy submitted, the grader decided
    TRUNCATED = "truncated"  # a turn, token or time budget ran out
    FAULT = "fault"  # the policy's own doing: malformed calls, bombs, a box it broke
    VOID = "void"  # cheated: a detector fired
    INFRA = "infra"  # proven from outside: our box, engine or network failed


class CallStatus(enum.StrEnum):
    """What became of one attempt of the policy to call a tool."""

    OK = "ok"
    BAD_JSON = "bad_json"
    UNCLOSED = "unclosed"
    NO_NAME = "no_name"
    UNKNOWN_TOOL = "unknown_tool"
    BAD_ARGUMENTS = "bad_arguments"
    FAILED = "failed"  # the call was well-formed, the tool refused (no such file, no such line)
    NO_CALL = "no_call"  # the turn held no attempt at all


class Sampling(msgspec.Struct, frozen=True, kw_only=True):
    """Distribution to sample from; log-probs are those of this very distribution."""

    temperature: float = 1.0  # 0 is greedy
    top_p: float = 1.0
    top_k: int = 0  # 0 keeps all
    seed: int | None = None

    @property
    def truncated(self) -> bool:
        """Whether tokens are cut off before a draw, so that log-probs mean nothing without the set that was kept."""
        return self.temperature > 0 and (self.top_p < 1 or self.top_k > 0)


class Task(msgspec.Struct, frozen=True, kw_only=True):
    """What is asked. `files` is all the agent may see; `grading` never enters its box."""

    id: str  # "template/instance", unique within its source
    split: str
    instruction: str
    files: dict[str, str]  # path -> text, relative to the workspace
    grading: dict[str, str]  # path -> text, relative to the task folder: tests/*, solution/*
    metadata: dict[str, Any] = {}
    tools: dict[str, Any] = {}  # the [tools] table of task.toml: which tools, renamed, limited; read by harness/toolset
    environment: str = ""  # absolute folder on the worker that is the workspace below `files`; empty: `files` is all
    mode: str = "oracle"  # how it is graded: "oracle", "pytest" or "script"
    libraries: list[str] = []  # Python distributions in the box, read-only
    limits: dict[str, float] = {}  # of the box, where they differ from the run's: seconds, memory_mib, workspace_mib


class GenerateRequest(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids in. `ids` is the whole history, always; the engine reuses what its KV cache already holds."""

    ids: list[int]
    max_tokens: int
    stop: list[int]  # sampling one of these ends the turn; it is part of the answer
    sampling: Sampling
    session: str = ""  # KV is kept between turns of one session
    routes_from: int = 0  # first position whose routes the caller lacks


class RouteChunk(msgspec.Struct, frozen=True, kw_only=True):
    """Routes of positions `[start, start + count)`, sealed together with the ids whose passes made them: the digest
    fails when rows and ids have moved against each other, by however little."""

    start: int
    count: int
    rows: bytes  # zstd of uint8 or uint16 [count, L, K], low bytes of all before the high bytes
    digest: int  # xxh3 of the int32 ids and the rows

    @property
    def end(self) -> int:
        return self.start + self.count

    @staticmethod
    def seal(start: int, ids_T: np.ndarray, routes_TLK: np.ndarray) -> RouteChunk:
        """`routes_TLK` is uint8 or uint16, one row for each of `ids_T`; an unknown row is all `unknown_expert`."""
        rows = _planes(routes_TLK)
        data = zstandard.ZstdCompressor(level=1).compress(rows)
        return RouteChunk(start=start, count=len(ids_T), rows=data, digest=_digest(ids_T, rows))

    def open(self, ids_T: np.ndarray, shape: tuple[int, int], bits: int) -> np.ndarray:
        """uint8 or uint16 [count, L, K]. Raises ValueError unless these rows were made for the ids `ids_T`."""
        size = self.count * shape[0] * shape[1] * bits // 8
        rows = _expand(self.rows, size, f"routes of positions {self.start} to {self.end}")
        if len(ids_T) != self.count or _digest(ids_T, rows) != self.digest:
            raise ValueError(
                f"the routes of positions {self.start} to {self.end} were made for other tokens than the ones there"
            )
        width = bits // 8
        return np.frombuffer(rows, "u1").reshape(width, -1).T.copy().view(f"<u{width}").reshape(-1, *shape)


class SupportChunk(msgspec.Struct, frozen=True, kw_only=True):
    """For each of `count` sampled tokens, the set it was drawn from when top-p or top-k cut the distribution; opened by
    `stretto.support`."""

    count: int
    vocab: int
    sets: bytes  # zstd of the sets' sizes and the sets


class GenerateResponse(msgspec.Struct, frozen=True, kw_only=True):
    """Token ids out. `routes` covers positions `[routes_from of the request, len(history) + len(ids) - 1)`: the last
    sampled token has not been through the network yet."""

    ids: list[int]
    logprobs: bytes  # float32 [len(ids)]
    versions: bytes  # int32 [len(ids)], the version that produced each token
    support: SupportChunk | None  # None: sampled from the full distribution (or greedily)
    routes: RouteChunk | None  # None for a dense model
    route_shape: tuple[int, int]  # (L, K); (0, 0) for a dense model
    route_bits: int  # 8 or 16
    finish: str  # "stop", "length", "aborted"
    cached: int  # tokens of the history that were not recomputed


class Segment(msgspec.Struct, frozen=True, kw_only=True):
    """An append-only run of tokens as the policy saw it. All per-token streams have length `T`."""

    ids: bytes  # int32 [T]
    logprobs: bytes  # float32 [T]; NaN where not sampled
    versions: bytes  # int32 [T]; NOT_SAMPLED where not sampled
    support: list[SupportChunk] | None  # of the sampled tokens, in order; None: drawn from the full distribution
    routes: list[RouteChunk]  # from position 0 without overlap or hole; what they do not reach is unknown
    route_shape: tuple[int, int]
    route_bits: int

    @property
    def ids_T(self) -> np.ndarray:
        return np.frombuffer(self.ids, dtype="<i4")

    @property
    def logprobs_T(self) -> np.ndarray:
        return np.frombuffer(self.logprobs, dtype="<f4")

    @property
    def versions_T(self) -> np.ndarray:
        return np.frombuffer(self.versions, dtype="<i4")

    @property
    def sampled_T(self) -> np.ndarray:
        """bool [T]: tokens the policy sampled, stop tokens included."""
        return self.versions_T != NOT_SAMPLED

    @property
    def routes_TLK(self) -> np.ndarray:
        """uint8 or uint16 [T, L, K]; `unknown_expert(bits)` fills rows that are not known. Raises ValueError when rows
        overlap, leave a hole, or were made for other ids than those at their positions."""
        ids_T, shape, bits = self.ids_T, self.route_shape, self.route_bits
        routes_TLK = np.full((len(ids_T), *shape), unknown_expert(bits), f"<u{bits // 8}")
        end = 0
        for chunk in self.routes:
            if chunk.start != end or chunk.count < 0 or chunk.end > len(ids_T):
                raise ValueError(
                    f"segment of {len(ids_T)} ids has routes of positions {chunk.start} to {chunk.end} after those up "
                    f"to {end}: streams of one rollout disagree"
                )
            routes_TLK[end : chunk.end] = chunk.open(ids_T[end : chunk.end], shape, bits)
            end = chunk.end
        return routes_TLK

    def validate(self) -> None:
        """Raise ValueError unless every stream has one entry per token and sampled tokens know their log-prob. Routes
        are checked where they are opened: `routes_TLK`."""
        tokens, sampled = len(self.ids_T), int(self.sampled_T.sum())
        lengths = {"logprobs": (len(self.logprobs_T), tokens), "versions": (len(self.versions_T), tokens)}
        if self.support is not None:
            lengths["supports"] = sum(chunk.count for chunk in self.support), sampled
        for name, (length, wanted) in lengths.items():
            if length != wanted:
                raise ValueError(
                    f"segment has {tokens} ids, {sampled} of them sampled, but {length} {name}: streams of one rollout "
                    "disagree"
                )
        known = np.isfinite(self.logprobs_T)
        if not np.array_equal(known, self.sampled_T):
            raise ValueError("segment has sampled tokens without a finite log-prob, or log-probs on tokens not sampled")


def unknown_expert(bits: int) -> int:
    """The id that marks a route row as not known: 255 or 65535, never a real expert."""
    return (1 << bits) - 1


def route_bits(experts: int) -> int:
    """Bits per expert id, leaving room for the unknown mark: 8 up to 255 experts, else 16."""
    return 8 if experts <= 255 else 16


def _planes(values: np.ndarray) -> bytes:
    """Little-endian bytes, the lowest of all values first: high bytes are mostly equal and compress to nothing."""
    return np.ascontiguousarray(values).reshape(-1, 1).view("u1").T.tobytes()


def _digest(ids_T: np.ndarray, rows: bytes) -> int:
    return xxhash.xxh3_64_intdigest(rows, seed=xxhash.xxh3_64_intdigest(np.ascontiguousarray(ids_T, "<i4").tobytes()))


def _expand(data: bytes, size: int, what: str) -> bytes:
    """Decompress what must have `size` bytes. A damaged payload can't make it take more."""
    try:
        found = zstandard.frame_content_size(data)
        if found != size:
            raise ValueError(f"the {what} take {found} bytes, not {size}")
        return zstandard.ZstdDecompressor().decompress(data)
    except zstandard.ZstdError as error:
        raise ValueError(f"the {what} can't be decompressed: {error}") from None


class ToolCall(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt to call a tool, successful or not, with the token span it occupies."""

    name: str
    status: CallStatus
    segment: int
    start: int  # token span [start, end) inside the segment
    end: int
    arguments: dict[str, Any] = {}
    observation: str = ""
    seconds: float = 0.0
    tool: str = ""  # what the tool is when the task has renamed it; empty: `name`

    @property
    def does(self) -> str:
        return self.tool or self.name


class Message(msgspec.Struct, frozen=True, kw_only=True):
    """For people who read rollouts; training uses segments only."""

    role: str  # "user", "assistant", "tool"
    text: str


class Rollout(msgspec.Struct, frozen=True, kw_only=True):
    """One attempt at one task: the immutable payload file in the store."""

    id: str
    group: str
    task: str
    purpose: str  # "train" or the name of an evaluation
    outcome: Outcome
    reward: float
    rewards: dict[str, float]  # the items that sum to `reward`
    solved: bool
    segments: list[Segment]
    calls: list[ToolCall]
    messages: list[Message]
    turns: int
    engine: str  # URL that served it
    worker: str
    started: float  # unix seconds
    ended: float
    reason: str = ""  # a sentence for `truncated`, `fault`, `void`, `infra`
    detected: list[str] = []  # signs of cheating (grading/detectors), whatever they did to the outcome
    tools: str = ""  # the tool set's name and hash: what the policy could call, under which names and limits
    agreed: bool = False  # permissive: what it left behind passes, handed in or not, voided or not
    effort: dict[str, int] = {}  # what it took: tokens by what they were for, calls, turns


class Lease(msgspec.Struct, frozen=True, kw_only=True):
    """Permission and duty to produce one rollout before `deadline` (unix seconds)."""

    rollout: str
    group: str
    purpose: str
    task: Task
    sampling: Sampling
    engine: str  # base URL
    version: int  # policy version the engine acknowledged when this was dispatched
    deadline: float


class Receipt(msgspec.Struct, frozen=True, kw_only=True):
    """A worker's word that a rollout ended and its payload lies in the store. Idempotent by rollout id."""

    rollout: str
    group: str
    purpose: str
    worker: str
    outcome: Outcome
    reward: float
    solved: bool
    key: str  # object key of the payload
    oldest_version: int  # version of the oldest sampled token
    newest_version: int
    tokens: int
    sampled: int
    turns: int
    seconds: float
    engine: str
    behaviour: dict[str, float] = {}  # e.g. {"read": 1, "tested": 1, "retried": 0}: shares for the report
    reason: str = ""


class BatchItem(msgspec.Struct, frozen=True, kw_only=True):
    """One rollout of a batch: where it lies and what it is worth."""

    rollout: str
    group: str
    key: str
    reward: float
    advantage: float
    oldest_version: int


class Batch(msgspec.Struct, frozen=True, kw_only=True):
    """The groups of one optimizer step, which turns `version` into `version + 1`."""

    run: str
    version: int
    items: list[BatchItem]
    groups: int
    rollouts: int  # of all groups in the cut, those with equal rewards included: the loss's denominators count these
    dropped_equal: int  # groups without reward variance, cut from the batch's loss but counted
    solve_rate: float  # of all finished groups that entered the cut, before any filter
    staleness: list[int]  # age of each item: version - oldest_version


class EngineStatus(msgspec.Struct, frozen=True, kw_only=True):
    """What a follower tells the orchestrator about an engine that is fit to serve."""

    url: str
    cluster: str
    version: int
    fingerprint: str


class Canary(msgspec.Struct, frozen=True, kw_only=True):
    """Fixed tokens, and what the trainer says of them under the weights of a version."""

    ids: list[int]
    logprobs: list[float]  # of each id but the first, given those before it; temperature 1


class KvPolicy(enum.StrEnum):
    """What becomes of keys and values that old weights made when new ones come."""

    KEEP = "keep"  # a generation goes on with them
    RECOMPUTE = "recompute"  # they are made again by the new weights before the next token
    DRAIN = "drain"  # generations under way end first, new ones wait


class WeightsOrder(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a follower asks of an engine: serve this version from now on."""

    version: Annotated[int, msgspec.Meta(ge=0)]
    fingerprint: str
    path: str  # a safetensors file: all tensors, or with `parent` what to write over those of that fingerprint
    parent: str = ""
    canary: Canary | None = None
    kv: KvPolicy = KvPolicy.KEEP
    drain_seconds: Annotated[float, msgspec.Meta(ge=0)] = 30.0  # after which a drain goes on as `keep`


class WeightsTaken(msgspec.Struct, frozen=True, kw_only=True):
    """The engine's word that it serves the version."""

    version: int
    pause_s: float  # no pass could run for so long
    drain_s: float = 0.0  # new requests waited for so long, while old ones ended
    canary: float | None = None  # mean distance of log-probs from the trainer's, in nats; None: there was no canary
    note: str = ""  # what was not done as asked


class Trained(msgspec.Struct, frozen=True, kw_only=True):
    """The trainer's word that a batch became a version: commits the batch in the ledger."""

    batch: int  # version the batch updated
    version: int  # batch + 1


def encode(record: msgspec.Struct) -> bytes:
    return msgspec.msgpack.encode(record)


def decode(data: bytes, kind: type[Any]) -> Any:
    """Decode msgpack into `kind`; raises msgspec.ValidationError naming the field that is wrong."""
    return msgspec.msgpack.decode(data, type=kind)
