"""One step of mid-training: next-token loss over packed rows, on any number of ranks.

    rows of the step ─▶ this rank's part ─▶ micro-batches ─▶ gradients ─▶ sum over ranks ─▶ clip ─▶ optimizer

Heads for multi-token prediction learn beside the network, or alone while it stays as it is.
The loss is a mean over the learnt tokens of the whole step, so that it is the same however rows are dealt to ranks and
micro-batches. Balance is reported as the load of the busiest expert, 1 being a fair share.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from stretto.midtrain.optimizer import Optimizer
from stretto.midtrain.recipe import Midtrain, Mtp
from stretto.midtrain.tokens.shards import Row
from stretto.model.attention import PackedCausal
from stretto.model.logprobs import token_logprobs
from stretto.model.moe import SigmoidGate
from stretto.model.mtp import Heads, mtp_loss
from stretto.model.nats import Nats
from stretto.model.router import balance_loss
from stretto.model.transformer import Output, Transformer

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
    mtp: float | None = None
    """Loss of the heads' guesses, nats a token; None where no heads are taught."""
    agreement: float | None = None
    """Of the first guess: the chance that an engine accepts it (`model.mtp.agreement`)."""


@dataclass(frozen=True)
class Taught:
    """Heads, how their loss is made, and whether the network is left as it is."""

    heads: Heads
    mtp: Mtp
    alone: bool


class _Part(NamedTuple):
    """Of one micro-batch."""

    loss: Tensor  # its share of the step's mean loss
    extra: Tensor  # what the router pays and what the heads' guesses cost
    load_LE: Tensor  # tokens by expert
    guessed: Tensor  # [2]: loss and first agreement of the heads


class Learner:
    """Owns the optimizer, the moving average and this rank's place among the ranks."""

    def __init__(self, model: Transformer, settings: Midtrain, taught: Taught | None = None):
        self.model, self.settings, self.taught = model, settings, taught
        self.rank, self.world = (dist.get_rank(), dist.get_world_size()) if dist.is_initialized() else (0, 1)
        self._parameters = {} if taught and taught.alone else dict(model.named_parameters())
        if taught:
            self._parameters |= {f"heads.{name}": tensor for name, tensor in taught.heads.named_parameters()}
        muon = settings.optimizer == "muon"
        self._optimizer = Optimizer(self._parameters, settings.weight_decay, settings.betas, muon)
        self._mean = {n: p.detach().clone() for n, p in self._parameters.items()} if settings.average else None

    def step(self, rows: Sequence[Row], lr: float) -> Step:
        """Learn from the rows of one step (all ranks are given the same). Raises FloatingPointError, with nothing
        changed, when the loss or the gradient is not finite."""
        settings, spec = self.settings, self.model.spec
        learnt, tokens = sum(_learnt(row) for row in rows), sum(len(row.ids) for row in rows)
        mine = rows[self.rank :: self.world]
        total, guessed = torch.zeros(1), torch.zeros(2)
        load_LE = torch.zeros(spec.route_shape[0], max(1, spec.experts))
        for start in range(0, len(mine), settings.micro_rows):
            micro = mine[start : start + settings.micro_rows]
            part = self._loss(micro, max(1, learnt))
            share = sum(len(row.ids) for row in micro) / tokens
            value = part.loss + part.extra * share
            if value.requires_grad:
                value.backward()
            total += part.loss.detach()
            guessed += part.guessed * share
            load_LE += part.load_LE
        self._reduce(total, guessed, load_LE)
        norm = float(torch.nn.utils.clip_grad_norm_(self._parameters.values(), settings.max_grad_norm))
        if not (np.isfinite(norm) and bool(total.isfinite())):
            self._optimizer.zero_grad()
            raise FloatingPointError(f"the loss is {float(total):g} and its gradient's norm {norm:g}")
        self._optimizer.step(lr)
        self._after(load_LE)
        busiest = float((load_LE.max(1).values / load_LE.mean(1).clamp(min=1e-9)).max()) if spec.experts else 1.0
        mtp, agreement = guessed.tolist() if self.taught else (None, None)
        return Step(float(total), tokens, learnt, norm, busiest, mtp, agreement)

    def _loss(self, rows: Sequence[Row], learnt: int) -> _Part:
        ids_T = torch.from_numpy(np.concatenate([row.ids for row in rows]))
        lengths = [length for row in rows for length in row.lengths]
        positions_T = torch.cat([torch.arange(length) for length in lengths])
        learn_T = torch.from_numpy(np.concatenate([_predicted(row) for row in rows]))
        with torch.set_grad_enabled(not (self.taught and self.taught.alone)):
            attend = PackedCausal(lengths, self.model.numerics.fused)
            out = self.model(ids_T, positions_T, attend, capture=bool(self.model.spec.experts))
            at_N = learn_T.nonzero().squeeze(1)
            loss = self._nats(out.hidden_TD[at_N], ids_T[at_N + 1]) / learnt
            extra, load_LE = self._balance(out)
        guessed = torch.zeros(2)
        wanted_T = torch.from_numpy(np.concatenate([row.learn for row in rows]))
        if self.taught and bool((wanted_T & (positions_T > self.taught.mtp.guesses)).any()):
            taught = self.taught
            found = mtp_loss(
                self.model, taught.heads, out.hidden_TD, ids_T, lengths, taught.mtp.guesses, wanted_T, taught.alone
            )
            extra = extra + taught.mtp.weight * found.loss
            guessed = torch.tensor([float(found.loss.detach()), found.agreements[0]])
        return _Part(loss, extra, load_LE, guessed)

    def _balance(self, out: Output) -> tuple[Tensor, Tensor]:
        """What the router pays, and tokens by expert [L, E]."""
        spec = self.model.spec
        extra, load_LE = torch.zeros(()), torch.zeros(spec.route_shape[0], max(1, spec.experts))
        if out.router_logits and out.routes_TLK is not None:
            if self.settings.balance:
                extra = extra + self.settings.balance * balance_loss(out.router_logits, out.routes_TLK, spec.experts)
            if self.settings.z_loss:
                squares = [logits.float().logsumexp(-1).square().mean() for logits in out.router_logits]
                extra = extra + self.settings.z_loss * torch.stack(squares).mean()
            for layer in range(load_LE.shape[0]):
                load_LE[layer] = torch.bincount(out.routes_TLK[:, layer].reshape(-1), minlength=spec.experts)
        return extra, load_LE

    def _nats(self, hidden_ND: Tensor, targets_N: Tensor) -> Tensor:
        """The sum of -log p. Where all logits fit in memory they are kept for the backward pass, not computed again."""
        if self.model.numerics.fused and len(targets_N) * self.model.spec.vocab_size <= KEPT_LOGITS:
            return Nats.apply(hidden_ND, self.model.head_weight, targets_N)
        return -token_logprobs(self.model, hidden_ND, targets_N)[0].sum()

    def _reduce(self, *sums: Tensor) -> None:
        """Add up gradients and `sums` over ranks, in one fixed order of tensors."""
        if self.world == 1:
            return
        for parameter in self._parameters.values():
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            dist.all_reduce(parameter.grad)
        for each in sums:
            dist.all_reduce(each)

    @torch.no_grad()
    def _after(self, load_LE: Tensor) -> None:
        """Move the selection bias towards balance (arXiv 2408.15664), and the average of the weights."""
        if self.settings.bias_speed and not (self.taught and self.taught.alone):
            gates = [module for module in self.model.modules() if isinstance(module, SigmoidGate)]
            for gate, load_E in zip(gates, load_LE, strict=True):
                gate.e_score_correction_bias += self.settings.bias_speed * (load_E.mean() - load_E).sign()
        if self._mean is not None:
            for name, parameter in self._parameters.items():
                self._mean[name].lerp_(parameter, 1.0 - self.settings.average)

    @torch.no_grad()
    def take_average(self) -> None:
        """What learns becomes its moving average, where one is kept."""
        if self._mean is not None:
            for name, parameter in self._parameters.items():
                parameter.copy_(self._mean[name])

    def state(self) -> dict[str, Any]:
        heads = self.taught.heads.state_dict() if self.taught else None
        optimizer = self._optimizer.state()
        return {"model": self.model.state_dict(), "heads": heads, "optimizer": optimizer, "mean": self._mean}

    def load_state(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])
        if self.taught:
            self.taught.heads.load_state_dict(state["heads"])
        self._optimizer.load_state(state["optimizer"])
        if self._mean is not None:
            self._mean = state["mean"]


def _predicted(row: Row) -> np.ndarray:
    """bool [T]: positions whose next token is learnt; the last of a part predicts nothing."""
    mask = np.append(row.learn[1:], False)
    mask[np.cumsum(row.lengths) - 1] = False
    return mask


def _learnt(row: Row) -> int:
    return int(_predicted(row).sum())
