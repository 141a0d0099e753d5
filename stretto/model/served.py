"""What a network is on the wire and in the engine's memory: bf16, or fp8 e4m3 with a scale per 128 x 128 block.

    masters ──`rounded`──▶ the trainer's parameters ──`Bits`──▶ published tensors ──`values`──▶ the engine's parameters

What is served is what is trained: parameters hold exactly the values that the published tensors stand for, so that
`Bits` of the engine's network are the published ones again. In fp8 a block's scale is the smallest power of two under
which its largest value fits (448 is the largest of e4m3). Products with it are exact, so a tensor's values determine
scales and bits; and it changes only when the largest value of a block crosses a power of two, which is rare.

Names and layout are DeepSeek-V3's: `x.weight` in F8_E4M3 and `x.weight_scale_inv` in F32, of all projections;
embedding, head, norms, routers and biases stay bf16 (correction biases float32). Left out: activations.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor

from stretto.model.fields import FP8

BLOCK = 128
LARGEST = 448.0
SCALE = "_scale_inv"
"""Behind a tensor's name: the scales of its blocks."""
SMALLEST = -120
"""Exponent of the smallest scale, so that every value is a bf16 number."""

CORRECTION = ".e_score_correction_bias"
_PROJECTION = re.compile(
    r".*\.(?:q_proj|k_proj|v_proj|o_proj|q_a_proj|q_b_proj|kv_a_proj_with_mqa|kv_b_proj|gate_proj|up_proj|down_proj)"
    r"\.weight"
)
_STACK = re.compile(r".*\.experts\.(gate_up_proj|down_proj)")


def quantised(name: str) -> bool:
    """Whether the tensor of this Hugging Face name is fp8 where fp8 is served."""
    return _PROJECTION.fullmatch(name) is not None


def split(weight: Tensor) -> tuple[Tensor, Tensor]:
    """e4m3 [..., M, N] and float32 scales [..., ceil(M / 128), ceil(N / 128)] of a float weight [..., M, N].

    Values that are not finite stay so (NaN), for whoever refuses them.
    """
    rows, columns = weight.shape[-2:]
    padded = F.pad(weight.float(), (0, -columns % BLOCK, 0, -rows % BLOCK))
    blocks = padded.unflatten(-1, (-1, BLOCK)).unflatten(-3, (-1, BLOCK))  # [..., m, 128, n, 128]
    largest = blocks.abs().amax(dim=(-3, -1))
    mantissa, exponent = torch.frexp(largest)  # largest = mantissa * 2^exponent, 0.5 <= mantissa < 1
    exponent = (exponent - 9 + (mantissa > LARGEST / 512).int()).clamp(min=SMALLEST)
    usual = (largest > 0) & largest.isfinite()
    scale = torch.where(usual, torch.ldexp(torch.ones_like(largest), exponent), 1.0)
    units = weight.float() / _spread(scale, rows, columns)
    return torch.where(units.isfinite(), units, torch.nan).to(torch.float8_e4m3fn), scale


def join(coded: Tensor, scale: Tensor) -> Tensor:
    """The float32 values that e4m3 and scales stand for. ValueError when the scales' shape is not the blocks'."""
    rows, columns = coded.shape[-2:]
    if scale.shape[-2:] != (-(-rows // BLOCK), -(-columns // BLOCK)):
        raise ValueError(f"scales {list(scale.shape)} do not fit a tensor {list(coded.shape)} in blocks of {BLOCK}")
    return coded.float() * _spread(scale.float(), rows, columns)


def rounded(name: str, tensor: Tensor, dtype: str) -> Tensor:
    """What is served of a parameter (by the network's own name, experts stacked) that holds `tensor`: bf16, which holds
    the values of fp8 too."""
    stack = _STACK.fullmatch(name)
    if dtype == "bf16" or not (stack or quantised(f"model.{name}")):
        return tensor.bfloat16()
    if stack and stack[1] == "gate_up_proj":  # two tensors on the wire
        return join(*split(tensor.unflatten(1, (2, -1)))).flatten(1, 2).bfloat16()
    return join(*split(tensor)).bfloat16()


def wire(name: str, tensor: Tensor, dtype: str) -> Iterator[tuple[str, np.ndarray]]:
    """A tensor (by its Hugging Face name) as it is published: itself in unsigned integers, in fp8 also its scales."""
    if dtype == "fp8" and quantised(name):
        coded, scale = split(tensor.detach().cpu())
        yield name, coded.view(torch.uint8).numpy()
        yield name + SCALE, scale.numpy()
    else:
        kept = torch.float32 if name.endswith(CORRECTION) else torch.bfloat16
        copy = tensor.detach().to("cpu", kept, copy=True).contiguous()
        yield name, (copy.view(torch.uint16) if kept is torch.bfloat16 else copy).numpy()


class Bits(Mapping[str, np.ndarray]):
    """All tensors of a network as they are published, by name; each is made when it is asked for, and not kept."""

    def __init__(self, named: Mapping[str, Tensor], dtype: str) -> None:
        self._named, self._dtype = named, dtype

    def __getitem__(self, name: str) -> np.ndarray:
        return dict(wire(name.removesuffix(SCALE), self._named[name.removesuffix(SCALE)], self._dtype))[name]

    def __iter__(self) -> Iterator[str]:
        for name in self._named:
            yield name
            if self._dtype == "fp8" and quantised(name):
                yield name + SCALE

    def __len__(self) -> int:
        return sum(1 for _ in self)


def tags(names: Iterable[str]) -> dict[str, str]:
    """File dtypes of those published tensors whose arrays do not say it."""
    names = set(names)
    return {name: "F8_E4M3" for name in names if name + SCALE in names}


def values(name: str, array: np.ndarray, scale: np.ndarray | None = None) -> Tensor:
    """A published tensor as float32: of fp8 with its scales. ValueError when they do not fit."""
    if array.dtype.itemsize == 1:
        if scale is None:
            raise ValueError(f"tensor {name} is fp8, but {name}{SCALE} is missing")
        return join(torch.tensor(array.view(np.uint8)).view(torch.float8_e4m3fn), torch.tensor(scale.view(np.float32)))
    if array.dtype.itemsize == 2:
        return torch.tensor(array.view(np.int16)).view(torch.bfloat16).float()
    return torch.tensor(array.view(np.float32))


def config_of(config: bytes, dtype: str) -> bytes:
    """`config.json` as it belongs beside tensors of this dtype."""
    fields = json.loads(config)
    if dtype == "bf16" and "quantization_config" not in fields:
        return config
    fields.pop("quantization_config", None)
    return json.dumps(fields | ({"quantization_config": FP8} if dtype == "fp8" else {}), indent=2).encode() + b"\n"


def _spread(scale: Tensor, rows: int, columns: int) -> Tensor:
    whole = scale.repeat_interleave(BLOCK, dim=-2).repeat_interleave(BLOCK, dim=-1)
    return whole[..., :rows, :columns]
