"""What moves the weights: AdamW, or Muon on the matrices inside the network and AdamW on the rest.

Muon steps along the orthogonalised momentum of a matrix (Jordan et al. 2024; at scale arXiv 2502.16982). It is torch's,
scaled so that AdamW's learning rates serve (`match_rms_adamw`), and takes matrices: each expert's is a slice of the
stack that it lies in, and gate and up, which lie in one, are two. Embeddings, output head and routers stay with AdamW.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

OUTER = ("embed_tokens.", "lm_head.", "gate.weight")
"""In the names of matrices that are no map from one hidden vector to another."""


@dataclass(frozen=True)
class Slice:
    """A matrix in a parameter: `leaf` is a view of its values, which the optimizer changes in place."""

    leaf: Tensor
    parameter: Tensor
    place: tuple[int | slice, ...]

    def take_gradient(self) -> None:
        gradient = self.parameter.grad
        self.leaf.grad = None if gradient is None else gradient[self.place]


class Optimizer:
    """Of named parameters. `step(lr)` applies their gradients and forgets them."""

    def __init__(
        self, named: Mapping[str, Tensor], weight_decay: float, betas: tuple[float, float], muon: bool = False
    ) -> None:
        inner = {name for name, p in named.items() if muon and p.ndim >= 2 and not any(part in name for part in OUTER)}
        self._parameters = list(named.values())
        self._slices = [one for name in named if name in inner for one in slices(name, named[name])]
        rest = [parameter for name, parameter in named.items() if name not in inner]
        groups = [
            {"params": [p for p in rest if p.ndim >= 2], "weight_decay": weight_decay},
            {"params": [p for p in rest if p.ndim < 2], "weight_decay": 0.0},
        ]
        self._all: dict[str, torch.optim.Optimizer] = {
            "adamw": torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, fused=True)
        }
        if self._slices:
            matrices = [one.leaf for one in self._slices]
            self._all["muon"] = torch.optim.Muon(
                matrices, lr=0.0, weight_decay=weight_decay, adjust_lr_fn="match_rms_adamw"
            )

    def step(self, lr: float) -> None:
        for one in self._slices:
            one.take_gradient()
        for optimizer in self._all.values():
            for group in optimizer.param_groups:
                group["lr"] = lr
            optimizer.step()
        self.zero_grad()

    def zero_grad(self) -> None:
        for tensor in (*self._parameters, *(one.leaf for one in self._slices)):
            tensor.grad = None

    def state(self) -> dict[str, Any]:
        return {name: optimizer.state_dict() for name, optimizer in self._all.items()}

    def load_state(self, state: dict[str, Any]) -> None:
        for name, optimizer in self._all.items():
            optimizer.load_state_dict(state[name])


def slices(name: str, parameter: Tensor) -> Iterator[Slice]:
    """The matrices of a parameter [..., B, A]: of each expert, and of gate and up apart."""
    values = parameter.detach()
    rows = values.shape[-2]
    parts = [slice(0, rows // 2), slice(rows // 2, rows)] if "gate_up" in name else [slice(0, rows)]
    for expert in range(values.shape[0]) if values.ndim == 3 else (None,):
        for part in parts:
            place = (part,) if expert is None else (expert, part)
            yield Slice(values[place], parameter, place)
