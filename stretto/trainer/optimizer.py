"""AdamW over fp32 masters, with a model that only ever holds the values that are served of them.

What is served is what is trained: published weights are bf16 (or fp8), so the forward pass must see those very values.

    masters (fp32) --round--> model parameters (fp32 storage, served values) --forward, backward--> gradients
       ^------------------------------- AdamW step on the masters ---------------------------------'

The masters drift inside their bf16 cells, so that updates below one unit in the last place add up instead of being
lost. Sharding fits here: each rank holds its part of the masters and moments; `clip` needs one all-reduce.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from stretto.model import served


class MasterAdamW:
    """Owns masters and moments of `model`; rounding the masters into the model is its duty after each change."""

    def __init__(self, model: nn.Module, betas: tuple[float, float], weight_decay: float, dtype: str = "bf16") -> None:
        """`dtype` is `weights.serve_dtype`."""
        self._dtype = dtype
        named = dict(model.named_parameters())  # tied parameters appear once
        self.parameters = named
        self.masters = {name: parameter.detach().clone() for name, parameter in named.items()}
        matrices = [master for master in self.masters.values() if master.ndim >= 2]
        vectors = [master for master in self.masters.values() if master.ndim < 2]
        groups = [{"params": matrices, "weight_decay": weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=betas, fused=True)
        self.round_into_model()

    @torch.no_grad()
    def round_into_model(self) -> None:
        for name, parameter in self.parameters.items():
            parameter.copy_(self.rounded(name, self.masters[name]))

    def rounded(self, name: str, tensor: Tensor) -> Tensor:
        """What is served of a parameter that holds `tensor`."""
        return served.rounded(name, tensor, self._dtype)

    @torch.no_grad()
    def follow_model(self) -> float:
        """The model was given other values: masters that round to something else take them. Returns their share."""
        changed = total = 0
        for name, parameter in self.parameters.items():
            other = self.rounded(name, self.masters[name]) != parameter.bfloat16()
            if self._dtype == "fp8" and other.any():
                other = torch.ones_like(other)  # what a value rounds to depends on the others of its block
            self.masters[name].copy_(torch.where(other, parameter, self.masters[name]))
            changed, total = changed + int(other.sum()), total + other.numel()
        self.round_into_model()
        return changed / max(1, total)

    def zero_grad(self) -> None:
        for parameter in self.parameters.values():
            parameter.grad = None

    def clip(self, max_norm: float) -> float:
        """Scale the gradients to a global norm of at most `max_norm`; returns the norm before, possibly nan or inf."""
        return float(nn.utils.clip_grad_norm_(self.parameters.values(), max_norm))

    def step(self, lr: float) -> None:
        """Apply the model's gradients to the masters and round the result into the model.

        Raises FloatingPointError when a rounded value is not finite; masters and model are then beyond use.
        """
        for group in self._adamw.param_groups:
            group["lr"] = lr
        for name, master in self.masters.items():
            master.grad = self.parameters[name].grad
        self._adamw.step()
        for master in self.masters.values():
            master.grad = None
        self.zero_grad()
        self.round_into_model()
        for name, parameter in self.parameters.items():
            if not parameter.isfinite().all():
                raise FloatingPointError(f"after the update {name} holds values that are not finite in {self._dtype}")

    def state(self) -> dict[str, Tensor]:
        """Everything a resumed run needs, as flat tensors; before the first step there are no moments."""
        tensors = {f"master/{name}": master for name, master in self.masters.items()}
        for name, master in self.masters.items():
            for key, value in self._adamw.state.get(master, {}).items():
                tensors[f"{key}/{name}"] = value
        return tensors

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Raises ValueError when the tensors do not belong to this model."""
        for name, master in self.masters.items():
            saved = tensors.get(f"master/{name}")
            if saved is None or saved.shape != master.shape:
                raise ValueError(f"resume state has no master weights of shape {tuple(master.shape)} for {name}")
            with torch.no_grad():
                master.copy_(saved)
            moments = {key: tensors[f"{key}/{name}"] for key in _MOMENTS if f"{key}/{name}" in tensors}
            if moments:
                self._adamw.state[master] = {key: value.clone() for key, value in moments.items()}
        self.round_into_model()


_MOMENTS = ("step", "exp_avg", "exp_avg_sq")
