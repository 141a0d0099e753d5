"""The network's forward pass as the engine runs it: `Transformer.forward` without gradients, in fewer, larger steps.

    a layer:  norm ▶ q, k, v in one product ▶ place (norms, rotation, into the cache) ▶ attend ▶ product, added to x
              norm ▶ router ▶ choose ▶ dispatch ▶ one product an expert ▶ swiglu ▶ one product an expert ▶ combine

Products are torch's; what lies between them is `compiled`. Memory is allocated once and used again by every pass and
layer. The last layer's MLP sees only rows that are sampled from; their routes are known for all rows.

This is for plain float32 (`numerics.PLAIN`) and networks without latent attention or grouped experts; the others run
the definition itself (`Defined`). Both give the same up to rounding, which `tests/engine/test_forward.py` demands.

Letters: as in `compiled`; `L` MoE layers, `F` expert width, `P = N * K` rows of the experts.
"""

from __future__ import annotations

from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from stretto.engine import compiled
from stretto.engine.cache import KVCache, SlotAttend, chunk_mask
from stretto.engine.layers import Layer, flattened, values
from stretto.engine.narrow import Narrow
from stretto.engine.products import products
from stretto.engine.scheduler import Chunk, Plan
from stretto.model.numerics import PLAIN
from stretto.model.rotary import rotary_angles
from stretto.model.simd import LANES
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Block, Transformer

FEW = 32
"""Rows an expert has on average, up to which a compiled loop in one call beats one product of torch for each; that is
twice as fast at 16 rows. Torch's products can be shared by several threads."""

LARGE = 1 << 19
"""Elements of a weight from which oneDNN's product is the faster one, by a tenth to a third."""

ROWS = 16
"""Rows of a pass up to which compiled products of narrow weights beat torch's: by a quarter here, more at one row."""


class Passed(NamedTuple):
    """What a pass gives. Rows of a later pass may be written into the same memory."""

    hidden_ND: Tensor  # after the final norm, of the rows to be sampled from
    routes_TLK: np.ndarray | None  # None for a dense network
    hidden_TD: Tensor | None = None  # the same of all rows, where they were asked for

    def rows(self, kept: np.ndarray) -> Passed:
        """Of some rows of a pass whose rows are all sampled from."""
        hidden_ND = self.hidden_ND[torch.from_numpy(kept)]
        routes_TLK = None if self.routes_TLK is None else self.routes_TLK[kept]
        return Passed(hidden_ND, routes_TLK, None if self.hidden_TD is None else hidden_ND)


class Forward(Protocol):
    def __call__(self, plan: Plan) -> Passed: ...

    def logits(self, hidden_ND: Tensor) -> Tensor:
        """Of hidden states after the final norm."""
        ...

    def refresh(self) -> None:
        """To be called when weights were loaded anew, in place."""
        ...


def forward_of(model: Transformer, cache: KVCache, every_row: bool = False) -> Forward:
    """The fastest there is for this network. With `every_row` a pass also gives `Passed.hidden_TD`."""
    return Stepped(model, cache, every_row) if steps_fit(model) else Defined(model, cache)


def steps_fit(model: Transformer) -> bool:
    spec, weight = model.spec, model.embed_tokens.weight
    widths = [spec.hidden_size, spec.head_dim]
    widths += [spec.expert_size] if spec.experts else []
    widths += [spec.intermediate_size] if len(spec.moe_layers) < spec.layers else []
    plain = model.numerics == PLAIN and weight.dtype == torch.float32 and weight.device.type == "cpu"
    return plain and spec.latent is None and spec.grouping is None and all(width % LANES == 0 for width in widths)


def warm_up(forward: Forward) -> None:
    """Have everything compiled now instead of in the first pass. Writes into the first row of the first slot."""
    zero = np.zeros(1, np.int64)
    forward(
        Plan(
            [],
            zero,
            zero,
            zero,
            decoding=1,
            chunks=[],
            sampled_N=zero,
            samplers_N=zero,
            next_N=zero,
            twins=[],
            serial=0,
        )
    )
    x, sizes_E = np.zeros(LANES, np.float32), np.ones(1, np.int64)
    for dtype in (np.float32, np.uint16):  # other weights than those here now may be of the other kind
        products(x, LANES, np.zeros(LANES * LANES, dtype), LANES, sizes_E, x.copy())


def logits(model: Transformer, hidden_ND: Tensor) -> Tensor:
    """`Transformer.logits`, by the fastest product there is."""
    if not (steps_fit(model) and len(hidden_ND)):
        return model.logits(hidden_ND)
    return _multiply(hidden_ND, model.head_weight.t(), None)


class Defined:
    """The network's own definition."""

    def __init__(self, model: Transformer, cache: KVCache) -> None:
        self._model, self._cache = model, cache
        self.logits = model.logits

    def refresh(self) -> None: ...

    def __call__(self, plan: Plan) -> Passed:
        ids_T, positions_T = torch.from_numpy(plan.ids_T), torch.from_numpy(plan.positions_T)
        out = self._model(ids_T, positions_T, SlotAttend(self._cache, plan), capture=True)
        routes_TLK = None if out.routes_TLK is None else out.routes_TLK.numpy()
        return Passed(out.hidden_TD[torch.from_numpy(plan.sampled_N)], routes_TLK, out.hidden_TD)


class _Memory:
    """Room for the results of each step of a pass of up to `rows` rows: for torch, and flat for compiled loops."""

    def __init__(self, spec: ModelSpec, rows: int) -> None:
        self.rows = rows
        layers, per_token = len(spec.moe_layers), max(spec.experts_per_token, 1)
        dense = spec.intermediate_size if layers < spec.layers else 0
        inner = max(dense, spec.expert_size * per_token)
        heads, kv_heads = spec.heads * spec.head_dim, spec.kv_heads * spec.head_dim
        self.x, self.h = torch.empty(rows, spec.hidden_size), torch.empty(rows, spec.hidden_size)
        self.qkv = torch.empty(rows, heads + 2 * kv_heads)
        self.q, self.mixed = torch.empty(rows, heads), torch.empty(rows, heads)
        self.sorted = torch.empty(rows * per_token, spec.hidden_size)
        self.joint, self.inner = torch.empty(rows * 2 * inner), torch.empty(rows * inner)
        self.flat = _Flat(*(values(t).reshape(-1) for t in self._steps))
        self.gates_TK = np.empty((rows, per_token), np.float32)
        self.place_TK = np.empty((rows, per_token), np.int64)
        self.routes_TLK = np.empty((rows, layers, per_token), np.int32)
        self.all_T = np.arange(rows)
        self.cut = -1

    def fit(self, rows: int) -> None:
        """Cut `x_TD` and the others to so many rows."""
        if rows != self.cut:
            self.cut = rows
            self.x_TD, self.h_TD, self.qkv_TX = self.x[:rows], self.h[:rows], self.qkv[:rows]
            self.mixed_TX = self.mixed[:rows]

    @property
    def _steps(self) -> tuple[Tensor, ...]:
        return self.x, self.h, self.qkv, self.q, self.mixed, self.sorted, self.joint, self.inner


class _Flat(NamedTuple):
    x: np.ndarray
    h: np.ndarray
    qkv: np.ndarray
    q: np.ndarray
    mixed: np.ndarray
    sorted: np.ndarray
    joint: np.ndarray
    inner: np.ndarray


def angle_tables(spec: ModelSpec, positions: int) -> list[np.ndarray]:
    """cos and sin of every position, flat."""
    angles = rotary_angles(torch.arange(positions), spec.rotary_dim, spec.rope_theta, torch.float32, spec.yarn)
    return [flattened(angle) for angle in angles]


class _Split:
    """The rows that attend in the compiled loop, and the chunks whose scores are worth a product of matrices."""

    SHORT = 256

    def __init__(self, plan: Plan) -> None:
        spans = [np.arange(plan.decoding)]
        self.long: list[tuple[Chunk, Tensor | None]] = []
        for chunk in plan.chunks:
            if chunk.position + chunk.end - chunk.start <= self.SHORT:
                spans.append(np.arange(chunk.start, chunk.end))
            else:
                self.long.append((chunk, chunk_mask(chunk)))
        self.short_N = np.concatenate(spans)


class Stepped:
    """The network in steps. Its weights may be loaded anew in place, if `refresh` follows; they must not be moved."""

    def __init__(self, model: Transformer, cache: KVCache, every_row: bool = False) -> None:
        spec = self._spec = model.spec
        self._every_row = every_row
        self._embedding, self._norm = model.embed_tokens.weight.detach(), values(model.norm.weight)
        blocks = [block for block in model.layers if isinstance(block, Block)]
        ranks = {layer: rank for rank, layer in enumerate(spec.moe_layers)}
        self._layers = [Layer(block, ranks.get(number, -1)) for number, block in enumerate(blocks)]
        self._cache = cache
        self._angles = angle_tables(spec, cache.tokens)
        self._sizes_E = np.zeros(max(spec.experts, 1), np.int64)
        self._memory = _Memory(spec, 0)
        self._alone = torch.get_num_threads() == 1
        self._model, self._head = model, Narrow(model.head_weight)

    def refresh(self) -> None:
        for weight in (self._head, *(weight for layer in self._layers for weight in layer.narrow)):
            weight.refresh()

    def logits(self, hidden_ND: Tensor) -> Tensor:
        rows, vocab = len(hidden_ND), self._spec.vocab_size
        if not self._few(rows, self._model.head_weight):
            return logits(self._model, hidden_ND)
        out_NV = torch.empty(rows, vocab)
        products(
            flattened(hidden_ND), self._spec.hidden_size, self._head.bits, vocab, np.full(1, rows), flattened(out_NV)
        )
        return out_NV

    def _few(self, rows: int, weight: Tensor) -> bool:
        """Whether the product of so many rows with this weight is one for a compiled loop over a narrow one."""
        whole = len(weight) % LANES == 0
        return self._alone and 0 < rows <= ROWS and weight.numel() < LARGE and whole

    def __call__(self, plan: Plan) -> Passed:
        rows, last = len(plan.ids_T), None if self._every_row else self._layers[-1]
        needed = max(rows, len(plan.sampled_N))  # one row may be sampled from for many slots
        if needed > self._memory.rows:
            self._memory = _Memory(self._spec, needed)
        memory, split = self._memory, _Split(plan)
        memory.fit(rows)
        all_T, wanted_N = memory.all_T[:rows], plan.sampled_N
        torch.index_select(self._embedding, 0, torch.from_numpy(plan.ids_T), out=memory.x_TD)
        for number, layer in enumerate(self._layers):
            self._attention(number, layer, plan, split, all_T)
            rows_N = wanted_N if layer is last else all_T
            if layer.router is None:
                self._dense(layer, rows_N, in_place=layer is not last)
            else:
                self._experts(layer, all_T, rows_N, memory.flat.h if layer is last else memory.flat.x)
        routes_TLK = memory.routes_TLK[:rows] if self._spec.moe_layers else None
        final, count = (memory.flat.x, rows) if last is None else (memory.flat.h, len(wanted_N))
        hidden = torch.empty(count, self._spec.hidden_size)
        compiled.norm(final, memory.all_T[:count], self._norm, self._spec.rms_norm_eps, flattened(hidden))
        if last is None:
            every = len(wanted_N) == rows and not plan.chunks  # all rows, each sampled from once
            return Passed(hidden if every else hidden[torch.from_numpy(wanted_N)], routes_TLK, hidden)
        return Passed(hidden, routes_TLK)

    def _attention(self, number: int, layer: Layer, plan: Plan, split: _Split, all_T: np.ndarray) -> None:
        """x += attention(norm(x))."""
        memory, spec = self._memory, self._spec
        flat, eps = memory.flat, spec.rms_norm_eps
        compiled.norm(flat.x, all_T, layer.norm, eps, flat.h)
        if few := self._few(len(all_T), layer.qkv.t()):
            rows_1, qkv = np.full(1, len(all_T)), flat.qkv
            products(flat.h, spec.hidden_size, layer.narrow[0].bits, layer.qkv.shape[1], rows_1, qkv)
            if layer.qkv_bias is not None:
                memory.qkv_TX.add_(layer.qkv_bias)
        else:
            qkv = flattened(_multiply(memory.h_TD, layer.qkv, layer.qkv_bias, memory.qkv_TX))
        k, v = self._cache.arrays[number]
        at = plan.slots_T, plan.positions_T
        compiled.place(qkv, spec.heads, layer.q_norm, layer.k_norm, eps, *self._angles, *at, flat.q, k, v)
        compiled.attend(flat.q, spec.heads, split.short_N, *at, k, v, flat.mixed)
        for chunk, mask in split.long:
            span = slice(chunk.start, chunk.end)
            q_THd = memory.q[span].view(-1, spec.heads, spec.head_dim)
            memory.mixed[span] = self._cache.attend(number, q_THd, chunk, mask).flatten(1)
        if few:
            products(flat.mixed, layer.out.shape[0], layer.narrow[1].bits, spec.hidden_size, rows_1, flat.h)
            memory.x_TD.add_(memory.h_TD)
        else:
            memory.x_TD.addmm_(memory.mixed_TX, layer.out)
        if layer.out_bias is not None:
            memory.x_TD.add_(layer.out_bias)

    def _experts(self, layer: Layer, all_T: np.ndarray, rows_N: np.ndarray, out: np.ndarray) -> None:
        """out = x + experts(norm(x)) of the rows `rows_N`; routes of all rows."""
        memory, spec = self._memory, self._spec
        flat, width, inner = memory.flat, spec.hidden_size, spec.expert_size
        assert layer.router is not None
        compiled.norm(flat.x, all_T, layer.mlp_norm, spec.rms_norm_eps, flat.h)
        scores_TE = torch.softmax(torch.mm(memory.h_TD, layer.router), dim=-1)
        routes, gates = memory.routes_TLK, memory.gates_TK
        compiled.choose(scores_TE.numpy(), spec.norm_topk_prob, layer.index, routes, gates)
        place = memory.place_TK
        compiled.dispatch(flat.h, width, rows_N, layer.index, routes, self._sizes_E, place, flat.sorted)
        pairs = len(rows_N) * spec.experts_per_token
        if self._alone and pairs <= FEW * spec.experts:
            narrow = len(rows_N) <= ROWS
            gate_up, down = (weight.bits for weight in layer.narrow[2:]) if narrow else layer.stacks
            sizes_E = self._sizes_E
            products(flat.sorted, width, gate_up, 2 * inner, sizes_E, flat.joint)
            compiled.swiglu(flat.joint, pairs, inner, flat.inner)
            products(flat.inner, inner, down, width, sizes_E, flat.sorted)
        else:
            sizes, sorted_PD = self._sizes_E.tolist(), memory.sorted[:pairs]
            _each(sorted_PD, layer.gate_up, memory.joint[: pairs * 2 * inner].view(pairs, 2 * inner), sizes)
            compiled.swiglu(flat.joint, pairs, inner, flat.inner)
            _each(memory.inner[: pairs * inner].view(pairs, inner), layer.down, sorted_PD, sizes)
        compiled.combine(flat.sorted, width, rows_N, place, gates, flat.x, out)

    def _dense(self, layer: Layer, rows_N: np.ndarray, in_place: bool) -> None:
        """x += mlp(norm(x)) of all rows; or h = x + mlp(norm(x)) of the rows `rows_N`."""
        memory, rows, inner = self._memory, len(rows_N), self._spec.intermediate_size
        x_ND = memory.x[:rows] if in_place else memory.x.index_select(0, torch.from_numpy(rows_N))
        joint_N2F, inner_NF = (
            part[: rows * width].view(rows, width) for part, width in ((memory.joint, 2 * inner), (memory.inner, inner))
        )
        compiled.norm(memory.flat.x, rows_N, layer.mlp_norm, self._spec.rms_norm_eps, memory.flat.h)
        joint_N2F = _multiply(memory.h[:rows], layer.gate_up[0], None, joint_N2F)
        compiled.swiglu(flattened(joint_N2F), rows, inner, memory.flat.inner)
        torch.addmm(x_ND, inner_NF, layer.down[0], out=x_ND if in_place else memory.h[:rows])


def _multiply(x_NA: Tensor, weight_AB: Tensor, bias_B: Tensor | None, out_NB: Tensor | None = None) -> Tensor:
    """x @ weight + bias: in `out_NB`, or in new memory if there is none or oneDNN computes it. `weight_AB` is the
    transpose of a weight that lies [B, A] in memory."""
    if weight_AB.numel() >= LARGE and torch.backends.mkldnn.is_available():
        return torch.ops.mkldnn._linear_pointwise(x_NA, weight_AB.t(), bias_B, "none", [], "")
    if bias_B is None:
        return torch.mm(x_NA, weight_AB, out=out_NB)
    return torch.addmm(bias_B, x_NA, weight_AB, out=out_NB)


def _each(x_PA: Tensor, weights: list[Tensor], out_PB: Tensor, sizes: list[int]) -> None:
    """The product of each expert's rows with its weight [A, B]."""
    for weight_AB, x, out in zip(weights, x_PA.split_with_sizes(sizes), out_PB.split_with_sizes(sizes), strict=True):
        torch.mm(x, weight_AB, out=out)
