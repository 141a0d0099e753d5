"""One step of mid-training: next-token loss over packed rows, on any number of ranks.

    rows of the step ─▶ this rank's part ─▶ micro-batches ─▶ gradients ─▶ sum over ranks ─▶ clip ─▶ AdamW

The loss is a mean over the learnt tokens of the whole step, so that it is the same however rows are dealt to ranks and
micro-batches. Balance is reported as the load of the busiest expert, 1 being a fair share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.midtrain.recipe import Midtrain
from stretto.midtrain.tokens.shards import Row
from stretto.model.attention import PackedCausal
from stretto.model.logprobs import token_logprobs
from stretto.model.moe import SigmoidGate
from stretto.model.nats import Nats
from stretto.model.router import balance_loss
from stretto.model.transformer import Transformer

KEPT_LOGITS = 1 << 24
"""Of one micro-batch, 64 MB."""


@dataclass(frozen=True)
class Step:
    """What one step measured, over all ranks. `tokens` are read, `learnt` of them counted in `loss` (nats a token)."""

    loss: float
    tokens: int
    learnt: int
    grad_norm: float
    busiest: float


class Learner:
    """Owns the optimizer, the moving average and this rank's place among the ranks."""

    def __init__(self, model: Transformer, settings: Midtrain):
        self.model, self.settings = model, settings
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        matrices = [p for p in model.parameters() if p.ndim >= 2]
        vectors = [p for p in model.parameters() if p.ndim < 2]
        groups = [{"params": matrices, "weight_decay": settings.weight_decay}, {"params": vectors, "weight_decay": 0.0}]
        self._adamw = torch.optim.AdamW([g for g in groups if g["params"]], lr=0.0, betas=settings.betas, fused=True)
        self._mean = {n: p.detach().clone() for n, p in model.named_parameters()} if settings.average else None

    def step(self, rows: Sequence[Row], lr: float) -> Step:
        """Learn from the rows of one step (all ranks are given the same). Raises FloatingPointError, with nothing
        changed, when the loss or the gradient is not finite."""
        settings, spec = self.settings, self.model.spec
        learnt = sum(_learnt(row) for row in rows)
        mine = rows[self.rank :: self.world]
        total = torch.zeros(1)
        load_LE = torch.zeros(spec.route_shape[0], max(1, spec.experts))
        for start in range(0, len(mine), settings.micro_rows):
            micro = mine[start : start + settings.micro_rows]
            loss, extra, counts = self._loss(micro, max(1, learnt))
            share = sum(len(row.ids) for row in micro) / sum(len(row.ids) for row in rows)
            (loss + extra * share).backward()
            total += loss.detach()
            load_LE += counts
        self._reduce(total, load_LE)
        norm = float(torch.nn.utils.clip_grad_norm_(self.model.parameters(), settings.max_grad_norm))
        if not (np.isfinite(norm) and bool(total.isfinite())):
            self._adamw.zero_grad(set_to_none=True)
            raise FloatingPointError(f"the loss is {float(total):g} and its gradient's norm {norm:g}")
        for group in self._adamw.param_groups:
            group["lr"] = lr
        self._adamw.step()
        self._adamw.zero_grad(set_to_none=True)
        self._after(load_LE)
        busiest = float((load_LE.max(1).values / load_LE.mean(1).clamp(min=1e-9)).max()) if spec.experts else 1.0
        return Step(float(total), sum(len(row.ids) for row in rows), learnt, norm, busiest)

    def _loss(self, rows: Sequence[Row], learnt: int) -> tuple[Tensor, Tensor, Tensor]:
        """(this part's share of the mean loss, what the router pays, tokens by expert [L, E])."""
        spec = self.model.spec
        ids_T = torch.from_numpy(np.concatenate([row.ids for row in rows]))
        lengths = [length for row in rows for length in row.lengths]
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        learn_T = torch.from_numpy(np.concatenate([_predicted(row) for row in rows]))
        out = self.model(ids_T, positions_T, PackedCausal(lengths), capture=bool(spec.experts))
        at_N = learn_T.nonzero().squeeze(1)
        loss = self._nats(out.hidden_TD[at_N], ids_T[at_N + 1]) / learnt
        extra = torch.zeros(())
        counts = torch.zeros(spec.route_shape[0], max(1, spec.experts))
        if out.router_logits and out.routes_TLK is not None:
            if self.settings.balance:
                extra = extra + self.settings.balance * balance_loss(out.router_logits, out.routes_TLK, spec.experts)
            if self.settings.z_loss:
                squares = [logits.float().logsumexp(-1).square().mean() for logits in out.router_logits]
                extra = extra + self.settings.z_loss * torch.stack(squares).mean()
            for layer in range(counts.shape[0]):
                counts[layer] = torch.bincount(out.routes_TLK[:, layer].reshape(-1), minlength=spec.experts)
        return loss, extra, counts

    def _nats(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """The sum of -log p. Where all logits fit in memory they are kept for the backward pass, not computed again."""
        if self.model.numerics.fused and len(targets_N) * self.model.spec.vocab_size <= KEPT_LOGITS:
            return Nats.apply(hidden_ND, self.model.head_weight, targets_N)
        return -token_logprobs(self.model, hidden_ND, targets_N)[0].sum()

    def _reduce(self, *sums: Tensor) -> None:
        """Add up gradients and `sums` over ranks, in one fixed order of tensors."""
        if self.world == 1:
            return
        for parameter in self.model.parameters():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        for each in sums:
            dist.all_reduce(each)

    @torch.no_grad()
    def _after(self, load_LE: Tensor) -> None:
        """Move the selection bias towards balance (arXiv 2408.15664), and the average of the weights."""
        if self.settings.bias_speed:
            gates = [module for module in self.model.modules() if isinstance(module, SigmoidGate)]
            for gate, load_E in zip(gates, load_LE, strict=True):
                gate.e_score_correction_bias += self.settings.bias_speed * (load_E.mean() - load_E).sign()
        if self._mean is not None:
            for name, parameter in self.model.named_parameters():
                self._mean[name].lerp_(parameter, 1.0 - self.settings.average)

    @torch.no_grad()
    def take_average(self) -> None:
        """The model becomes the moving average, where one is kept."""
        if self._mean is not None:
            for name, parameter in self.model.named_parameters():
                parameter.copy_(self._mean[name])

    def state(self) -> dict[str, Any]:
        return {"model": self.model.state_dict(), "optimizer": self._adamw.state_dict(), "mean": self._mean}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        self._adamw.load_state_dict(state["optimizer"])
        if self._mean is not None:
            self._mean = state["mean"]


def _predicted(row: Row) -> np.ndarray:
    """bool [T]: positions whose next token is learnt; the last of a part predicts nothing."""
    mask = np.append(row.learn[1:], False)
    mask[np.cumsum(row.lengths) - 1] = False
    return mask


def _learnt(row: Row) -> int:
    return int(_predicted(row).sum())
