"""Compiled loops for a CPU: each row in one pass, in an order of its own, rounded to bf16 where asked.

Stock operators of torch go over memory once per step, and may treat the last elements of a tensor differently from the
others, so that a row's result depends on how many rows there are. Here a row is computed by the same instructions
whatever surrounds it, and rounding costs no pass of its own. One thread; arrays are float32 and C-contiguous.

Sums over a row may be reordered by the compiler, in the same way for each row of that width. Everything else is plain
IEEE arithmetic, so that an element of a vector and one of its tail are computed alike.

Shapes: `N` rows, `W` their width, `T` tokens, `H` query heads, `G` key/value heads, `d` and `e` width of a key and a
value, `K` experts per token.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic
from torch import Tensor

SUMS = {"reassoc", "contract", "nsz"}
"""What a sum over a row allows the compiler; nan and inf keep their meaning."""


def compiled(**options: Any) -> Callable[[Callable[..., Any]], Any]:
    """Numba's `njit`: without the interpreter's lock, with its code on disk where there is a place for it."""
    options |= {"nogil": True, "error_model": "numpy"}  # a division by zero gives inf, as everywhere else

    def decorate(function: Callable[..., Any]) -> Any:
        try:
            return njit(cache=True, **options)(function)
        except RuntimeError:  # there is no writable folder to keep compiled code in
            return njit(**options)(function)

    return decorate


@intrinsic
def _as_int(context, x):
    def bitcast(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.IntType(32))

    return types.int32(types.float32), bitcast


@intrinsic
def _as_float(context, bits):
    def bitcast(context, builder, signature, arguments):
        return builder.bitcast(arguments[0], ir.FloatType())

    return types.float32(types.int32), bitcast


_bits: Any = _as_int
_float: Any = _as_float


@compiled()
def _bf16(x):
    """The nearest bf16 value, ties to even; nan stays nan."""
    bits = _bits(x)
    kept = (bits + np.int32(0x7FFF) + ((bits >> np.int32(16)) & np.int32(1))) & np.int32(-0x10000)
    return _float(np.int32(kept)) if x == x else x


@compiled()
def bounded_exp(x):
    """e ** x within two units in the last place (Cephes' polynomial); x is held between -87 and 88."""
    x = np.float32(-87.0) if x < np.float32(-87.0) else x
    x = np.float32(88.0) if x > np.float32(88.0) else x
    shifted = x * np.float32(1.44269504088896341) + np.float32(12582912.0)  # adding 1.5 * 2^23 rounds to an integer
    n = shifted - np.float32(12582912.0)
    r = x - n * np.float32(0.693359375)
    r = r - n * np.float32(-2.12194440e-4)
    p = np.float32(1.9875691500e-4)
    p = p * r + np.float32(1.3981999507e-3)
    p = p * r + np.float32(8.3334519073e-3)
    p = p * r + np.float32(4.1665795894e-2)
    p = p * r + np.float32(1.6666665459e-1)
    p = p * r + np.float32(5.0000001201e-1)
    p = p * (r * r) + r + np.float32(1.0)
    # the lowest bits of `shifted` hold n
    return p * _float(np.int32((_bits(shifted) + np.int32(127)) << np.int32(23)))


@compiled()
def _sigmoid(x):
    return np.float32(1.0) / (np.float32(1.0) + bounded_exp(-x))


@compiled(fastmath=SUMS)
def _sum_squares(x_NW, row):
    total = np.float32(0)
    for i in range(x_NW.shape[1]):
        total += x_NW[row, i] * x_NW[row, i]
    return total


@compiled()
def _round(x_N):
    for n in range(len(x_N)):
        x_N[n] = _bf16(x_N[n])


@compiled()
def _add(x_N, y_N, out_N, rounding):
    if rounding:
        for n in range(len(x_N)):
            out_N[n] = _bf16(x_N[n] + y_N[n])
    else:
        for n in range(len(x_N)):
            out_N[n] = x_N[n] + y_N[n]


@compiled()
def _rms_norm(x_NW, weight_W, eps, out_NW, scale_N, rounding):
    width = x_NW.shape[1]
    for n in range(len(x_NW)):
        scale = np.float32(1.0) / np.sqrt(_sum_squares(x_NW, n) / np.float32(width) + np.float32(eps))
        scale_N[n] = scale
        if rounding:
            for i in range(width):
                out_NW[n, i] = _bf16(x_NW[n, i] * scale * weight_W[i])
        else:
            for i in range(width):
                out_NW[n, i] = x_NW[n, i] * scale * weight_W[i]


@compiled(fastmath=SUMS)
def _slope(x_NW, weight_W, dy_NW, row):
    total = np.float32(0)
    for i in range(x_NW.shape[1]):
        total += dy_NW[row, i] * weight_W[i] * x_NW[row, i]
    return total


@compiled()
def _rms_norm_backward(x_NW, weight_W, scale_N, dy_NW, dx_NW, dweight_W):
    width = x_NW.shape[1]
    for n in range(len(x_NW)):
        scale = scale_N[n]
        shrink = _slope(x_NW, weight_W, dy_NW, n) * scale * scale * scale / np.float32(width)
        for i in range(width):
            dx_NW[n, i] = dy_NW[n, i] * weight_W[i] * scale - x_NW[n, i] * shrink
            dweight_W[i] += dy_NW[n, i] * x_NW[n, i] * scale


@compiled()
def _rotate(x_THd, cos_Td, sin_Td, out_THd, rounding):
    tokens, heads, width = x_THd.shape
    half = width // 2
    for t in range(tokens):
        for h in range(heads):
            if rounding:
                for i in range(half):
                    a, b = x_THd[t, h, i], x_THd[t, h, half + i]
                    out_THd[t, h, i] = _bf16(a * cos_Td[t, i] + b * sin_Td[t, i])
                    out_THd[t, h, half + i] = _bf16(b * cos_Td[t, half + i] + a * sin_Td[t, half + i])
            else:
                for i in range(half):
                    a, b = x_THd[t, h, i], x_THd[t, h, half + i]
                    out_THd[t, h, i] = a * cos_Td[t, i] + b * sin_Td[t, i]
                    out_THd[t, h, half + i] = b * cos_Td[t, half + i] + a * sin_Td[t, half + i]


@compiled()
def _swiglu(joint_N2W, out_NW, rounding):
    width = out_NW.shape[1]
    for n in range(len(out_NW)):
        if rounding:
            for i in range(width):
                gate = joint_N2W[n, i]
                out_NW[n, i] = _bf16(gate * _sigmoid(gate) * joint_N2W[n, width + i])
        else:
            for i in range(width):
                gate = joint_N2W[n, i]
                out_NW[n, i] = gate * _sigmoid(gate) * joint_N2W[n, width + i]


@compiled()
def _swiglu_backward(joint_N2W, dout_NW, djoint_N2W):
    width = dout_NW.shape[1]
    for n in range(len(dout_NW)):
        for i in range(width):
            gate, up, slope = joint_N2W[n, i], joint_N2W[n, width + i], dout_NW[n, i]
            s = _sigmoid(gate)
            djoint_N2W[n, i] = slope * up * s * (np.float32(1.0) + gate * (np.float32(1.0) - s))
            djoint_N2W[n, width + i] = slope * gate * s


@compiled()
def _sigmoids(x_N, out_N):
    for n in range(len(x_N)):
        out_N[n] = _sigmoid(x_N[n])


@compiled()
def _softmax(z_NV, target_N, nats_N, total_N):
    for n in range(len(z_NV)):
        top, own = z_NV[n].max(), z_NV[n, target_N[n]]
        for i in range(z_NV.shape[1]):
            z_NV[n, i] = bounded_exp(z_NV[n, i] - top)
        total_N[n] = _total(z_NV[n], z_NV.shape[1])
        nats_N[n] = np.log(total_N[n]) + top - own


@compiled()
def _softmax_slope(z_NV, total_N, target_N, slope):
    for n in range(len(z_NV)):
        share = slope / total_N[n]
        for i in range(z_NV.shape[1]):
            z_NV[n, i] *= share
        z_NV[n, target_N[n]] -= slope


@compiled()
def _combine(y_NW, place_TK, gates_TK, out_TW, rounding):
    tokens, slots = gates_TK.shape
    width = y_NW.shape[1]
    for t in range(tokens):
        row, gate = place_TK[t, 0], gates_TK[t, 0]
        for i in range(width):
            out_TW[t, i] = gate * y_NW[row, i]
        for k in range(1, slots):
            row, gate = place_TK[t, k], gates_TK[t, k]
            for i in range(width):
                out_TW[t, i] += gate * y_NW[row, i]
        if rounding:
            for i in range(width):
                out_TW[t, i] = _bf16(out_TW[t, i])


@compiled(fastmath=SUMS)
def _scores(q_THd, t, h, k_XGMd, x, g, scale, rows, score_M):
    for j in range(rows):
        score = np.float32(0)
        for i in range(q_THd.shape[2]):
            score += q_THd[t, h, i] * k_XGMd[x, g, j, i]
        score_M[j] = score * scale


@compiled(fastmath=SUMS)
def _total(weight_M, rows):
    total = np.float32(0)
    for j in range(rows):
        total += weight_M[j]
    return total


@compiled(fastmath=SUMS)
def _mix(weight_M, rows, v_XGMe, x, g, out_THe, t, h):
    """Four keys at a time, so that the result is not read and written for each."""
    for i in range(v_XGMe.shape[3]):
        out_THe[t, h, i] = 0
    for j in range(0, rows - 3, 4):
        w0, w1, w2, w3 = weight_M[j], weight_M[j + 1], weight_M[j + 2], weight_M[j + 3]
        for i in range(v_XGMe.shape[3]):
            out_THe[t, h, i] += (
                w0 * v_XGMe[x, g, j, i]
                + w1 * v_XGMe[x, g, j + 1, i]
                + w2 * v_XGMe[x, g, j + 2, i]
                + w3 * v_XGMe[x, g, j + 3, i]
            )
    for j in range(rows // 4 * 4, rows):
        for i in range(v_XGMe.shape[3]):
            out_THe[t, h, i] += weight_M[j] * v_XGMe[x, g, j, i]


@compiled()
def _attend(q_THd, k_XGMd, v_XGMe, sequence_T, position_T, out_THe):
    heads = q_THd.shape[1]
    group = heads // k_XGMd.shape[1]
    scale = np.float32(1.0 / np.sqrt(q_THd.shape[2]))
    weight_M = np.empty(k_XGMd.shape[2], np.float32)
    for t in range(len(q_THd)):
        x, rows = sequence_T[t], position_T[t] + 1
        for h in range(heads):
            g = h // group
            _scores(q_THd, t, h, k_XGMd, x, g, scale, rows, weight_M)
            top = weight_M[0]
            for j in range(1, rows):
                top = max(top, weight_M[j])
            for j in range(rows):
                weight_M[j] = bounded_exp(weight_M[j] - top)
            share = np.float32(1.0) / _total(weight_M, rows)
            _mix(weight_M, rows, v_XGMe, x, g, out_THe, t, h)
            for i in range(out_THe.shape[2]):
                out_THe[t, h, i] *= share


def round_(x: Tensor) -> Tensor:
    """Round to bf16 values in place; autograd does not see it, so that gradients pass straight through."""
    _round(own_memory(x).reshape(-1))
    return x


def add(x: Tensor, y: Tensor, rounding: bool) -> Tensor:
    """x + y."""
    out = torch.empty_like(x)
    _add(*(own_memory(t).reshape(-1) for t in (x, y, out)), rounding)
    return out


def rms_norm(x: Tensor, weight_W: Tensor, eps: float, rounding: bool) -> tuple[Tensor, Tensor]:
    """The result, and 1 / sqrt(mean(x^2) + eps) with a last axis of 1."""
    x, out, scale = x.contiguous(), x.new_empty(x.shape), x.new_empty(*x.shape[:-1], 1)
    rows = (-1, len(weight_W))
    _rms_norm(
        own_memory(x).reshape(rows),
        own_memory(weight_W),
        eps,
        own_memory(out).reshape(rows),
        own_memory(scale).reshape(-1),
        rounding,
    )
    return out, scale


def rms_norm_backward(x: Tensor, weight_W: Tensor, scale: Tensor, dy: Tensor) -> tuple[Tensor, Tensor]:
    """Slopes of the input and of the weight; `scale` is what `rms_norm` gave beside its result."""
    x, dy, rows = x.contiguous(), dy.contiguous(), (-1, len(weight_W))
    dx, dweight_W = torch.empty_like(x), torch.zeros_like(weight_W)
    _rms_norm_backward(
        own_memory(x).reshape(rows),
        own_memory(weight_W),
        own_memory(scale).reshape(-1),
        own_memory(dy).reshape(rows),
        own_memory(dx).reshape(rows),
        own_memory(dweight_W),
    )
    return dx, dweight_W


def rotate(x_THd: Tensor, cos_T1d: Tensor, sin_T1d: Tensor, rounding: bool) -> Tensor:
    """x * cos + roll(x, d/2) * sin."""
    x_THd, out_THd = x_THd.contiguous(), x_THd.new_empty(x_THd.shape)
    _rotate(own_memory(x_THd), own_memory(cos_T1d)[:, 0], own_memory(sin_T1d)[:, 0], own_memory(out_THd), rounding)
    return out_THd


def swiglu(joint_N2W: Tensor, rounding: bool) -> Tensor:
    """silu(gate) * up, from rows that hold the gate first."""
    out_NW = joint_N2W.new_empty(len(joint_N2W), joint_N2W.shape[1] // 2)
    _swiglu(own_memory(joint_N2W), own_memory(out_NW), rounding)
    return out_NW


def swiglu_backward(joint_N2W: Tensor, dout_NW: Tensor) -> Tensor:
    djoint_N2W = torch.empty_like(joint_N2W)
    _swiglu_backward(own_memory(joint_N2W), own_memory(dout_NW.contiguous()), own_memory(djoint_N2W))
    return djoint_N2W


def sigmoid(x: Tensor) -> Tensor:
    """1 / (1 + e^-x)."""
    out = torch.empty_like(x)
    _sigmoids(own_memory(x).reshape(-1), own_memory(out).reshape(-1))
    return out


def softmax_(z_NV: Tensor, target_N: Tensor) -> tuple[Tensor, Tensor]:
    """-log p of each row's target (int64), and the sum of exponentials that each row of `z_NV` is turned into."""
    nats_N, total_N = z_NV.new_empty(len(z_NV)), z_NV.new_empty(len(z_NV))
    _softmax(own_memory(z_NV), own_memory(target_N), own_memory(nats_N), own_memory(total_N))
    return nats_N, total_N


def softmax_slope_(z_NV: Tensor, total_N: Tensor, target_N: Tensor, slope: float) -> None:
    """Turn what `softmax_` left into the slope of `slope` times the sum of -log p with respect to the logits."""
    _softmax_slope(own_memory(z_NV), own_memory(total_N), own_memory(target_N), np.float32(slope))


def combine(y_NW: Tensor, place_TK: Tensor, gates_TK: Tensor, rounding: bool) -> Tensor:
    """For each token the sum over its slots, in order, of gate times the row of y that lies at `place` (int64)."""
    out_TW = y_NW.new_empty(len(gates_TK), y_NW.shape[1])
    _combine(own_memory(y_NW), own_memory(place_TK), own_memory(gates_TK.contiguous()), own_memory(out_TW), rounding)
    return out_TW


def attend(q_THd: Tensor, k_XGMd: Tensor, v_XGMe: Tensor, sequence_T: np.ndarray, position_T: np.ndarray) -> Tensor:
    """Softmax attention of each query on the first `position + 1` of the `M` rows of its sequence (of `X`)."""
    out_THe = q_THd.new_empty(*q_THd.shape[:2], v_XGMe.shape[3])
    _attend(*(own_memory(x.contiguous()) for x in (q_THd, k_XGMd, v_XGMe)), sequence_T, position_T, own_memory(out_THe))
    return out_THe


def own_memory(x: Tensor) -> np.ndarray:
    """The tensor's own memory. The kernels take contiguous arrays only, and compile for nothing else."""
    assert x.is_contiguous(), x.shape
    return (x.detach() if x.requires_grad else x).numpy()
