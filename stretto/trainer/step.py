"""One optimizer step: forward and backward over the micro-batches of a batch, clip, update.

    samples -> micro-batches -> hidden states of all tokens -> logits of sampled tokens only -> loss -> gradients, added
            -> one clip -> guard -> one AdamW step on the masters -> rounded into the model

A step whose loss or gradient is not finite stops before the optimizer: masters, moments and model stay as they were.
A batch without samples (no advantage differs from zero) makes no step either, so that momentum alone moves nothing.
Where the objective wants another policy's log-probs (`Shadows`), they are computed first, for the whole batch.

Data parallelism fits between the last backward and the clip: shares are fractions of the whole batch, so gradients of
ranks are summed, not averaged.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import Tensor

from stretto.config import TrainerConfig
from stretto.model.logprobs import token_logprobs
from stretto.model.transformer import Output, Transformer
from stretto.trainer.agreement import Agreement, Rows
from stretto.trainer.corrections import Sequences
from stretto.trainer.guard import Guard
from stretto.trainer.losses import (
    BehaviourLogprobs,
    CurrentLogprobs,
    Loss,
    ProximalLogprobs,
    ReferenceLogprobs,
    policy_loss,
)
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.packing import MicroBatch, follow, pack
from stretto.trainer.samples import Sample
from stretto.trainer.shadow import Shadow


@dataclass(frozen=True)
class Distribution:
    """What the engine sampled from; the trainer's log-probs must be of the same. Where it is truncated, each sampled
    token brings its own set."""

    temperature: float
    top_p: float = 1.0
    top_k: int = 0

    @property
    def truncated(self) -> bool:
        return self.top_p < 1 or self.top_k > 0


@dataclass(frozen=True)
class Predicted:
    """`logp_N`, `entropy_N`: of the sampled tokens. The others: see the model's `Output`; None without replay."""

    logp_N: Tensor
    entropy_N: Tensor
    disagreement: Tensor | None
    covered: Tensor | None
    replaced: Tensor | None
    rows: Rows | None  # those that gave the log-probs


@dataclass(frozen=True)
class StepReport:
    """What happened; means are over trained tokens. `applied` is False when the weights did not change."""

    applied: bool
    finite: bool
    trained_tokens: int
    loss: float
    grad_norm: float
    entropy: float
    ratio_mean: float
    ratio_max: float
    clipped: float  # share of tokens whose ratio was truncated or masked
    moved: float  # the guard's distance between behaviour and current policy, KL per token
    scale: float  # what it left of the learning rate, 0 to 1
    reference_k1: float | None  # mean log(current / reference); None without one
    agreement: Agreement  # of the trainer's log-probs before the step with the engine's


def predict(
    model: Transformer,
    micro: MicroBatch,
    distribution: Distribution,
    replay_ratio: float = 0.0,
    recompute: bool = False,
) -> Predicted:
    """Log-probs of the sampled tokens under the model's present weights, with the routes of the micro-batch if any."""
    assert (micro.support is not None) == distribution.truncated, "supports come with a truncated distribution"
    if micro.routes_TLK is not None:
        follow(micro.ids_T, micro.route_ids_T, "micro-batching")
    output = model(
        micro.ids_T,
        micro.positions_T,
        micro.attend,
        routes_TLK=micro.routes_TLK,
        replay_ratio=replay_ratio,
        recompute=recompute,
    )
    logp_N, entropy_N = token_logprobs(
        model, output.hidden_TD[micro.predict_N], micro.targets_N, distribution.temperature, micro.support
    )
    return Predicted(logp_N, entropy_N, output.disagreement, output.covered, output.replaced, _rows(micro, output))


def _rows(micro: MicroBatch, output: Output) -> Rows | None:
    if micro.routes_TLK is None or output.differs_TL is None or output.replaced_TL is None:
        return None
    known_NL = micro.routes_TLK[micro.predict_N, :, 0] >= 0
    return Rows(known_NL, output.differs_TL[micro.predict_N], output.replaced_TL[micro.predict_N])


def without_routes(micro: MicroBatch) -> MicroBatch:
    return dataclasses.replace(micro, routes_TLK=None)


@dataclass(frozen=True)
class Shadows:
    """The other policies an objective wants, if any; one may be both. Whoever makes the step moves them after it."""

    proximal: Shadow | None = None
    reference: Shadow | None = None


NO_SHADOWS = Shadows()


def learn(
    model: Transformer,
    optimizer: MasterAdamW,
    samples: Sequence[Sample],
    settings: TrainerConfig,
    distribution: Distribution,
    lr: float,
    between: Callable[[], None] = lambda: None,
    shadows: Shadows = NO_SHADOWS,
    guard: Guard | None = None,
) -> StepReport:
    """Make one step. `between` is called before each micro-batch and may raise to abandon the step: nothing has changed
    by then but the gradients, which the next step clears."""
    optimizer.zero_grad()
    guard = guard or Guard(settings.guard)
    guard.begin()
    sums = _Sums(guard)
    micros = pack(samples, settings.microbatch_tokens)
    proximals, references = (
        _logprobs_under(shadow, optimizer, model, micros, settings, distribution, between)
        for shadow in (shadows.proximal, shadows.reference)
    )
    for micro, proximal_N, reference_N in zip(micros, proximals, references, strict=True):
        between()
        predicted = predict(model, micro, distribution, settings.replay_ratio, settings.recompute)
        loss = policy_loss(
            CurrentLogprobs(predicted.logp_N),
            BehaviourLogprobs(micro.behaviour_N),
            micro.advantage_N,
            micro.share_N,
            Sequences.of_lengths([len(sample.targets_N) for sample in micro.samples]),
            settings,
            None if proximal_N is None else ProximalLogprobs(proximal_N),
            None if reference_N is None else ReferenceLogprobs(reference_N),
        )
        loss.total.backward()
        sums.add(loss, predicted)
        sums.agreement.add(predicted.logp_N, micro.behaviour_N, micro.versions_N, predicted.rows)
    if not samples:
        return sums.report(applied=False, finite=True, grad_norm=0.0)
    norm = optimizer.clip(settings.max_grad_norm)
    if not math.isfinite(norm) or not math.isfinite(sums.loss):
        optimizer.zero_grad()
        return sums.report(applied=False, finite=False, grad_norm=norm)
    optimizer.step(lr * guard.settle())
    return sums.report(applied=True, finite=True, grad_norm=norm)


def _logprobs_under(
    shadow: Shadow | None,
    optimizer: MasterAdamW,
    model: Transformer,
    micros: Sequence[MicroBatch],
    settings: TrainerConfig,
    distribution: Distribution,
    between: Callable[[], None],
) -> list[Tensor] | list[None]:
    """[N] for each micro-batch, of the same experts as the trained policy's where they are replayed."""
    if shadow is None:
        return [None] * len(micros)
    found = []
    with shadow.worn(optimizer):
        for micro in micros:
            between()
            found.append(predict(model, micro, distribution, settings.replay_ratio).logp_N)
    return found


class _Sums:
    """Running sums over micro-batches."""

    def __init__(self, guard: Guard) -> None:
        self.guard = guard
        self.agreement = Agreement()
        self.tokens = 0
        self.loss = self.entropy = self.ratio = self.ratio_max = self.changed = 0.0
        self.k1: float | None = None

    def add(self, loss: Loss, predicted: Predicted) -> None:
        self.guard.add(loss.log_ratio_N)
        ratio_N = loss.log_ratio_N.exp()
        self.tokens += len(ratio_N)
        self.loss += float(loss.total.detach())
        self.entropy += float(predicted.entropy_N.detach().sum())
        self.ratio += float(ratio_N.sum())
        self.ratio_max = max(self.ratio_max, float(ratio_N.max()))
        self.changed += int(loss.changed_N.sum())
        if loss.k1_N is not None:
            self.k1 = (self.k1 or 0.0) + float(loss.k1_N.sum())

    def report(self, applied: bool, finite: bool, grad_norm: float) -> StepReport:
        tokens = max(self.tokens, 1)
        return StepReport(
            applied=applied,
            finite=finite,
            trained_tokens=self.tokens,
            loss=self.loss,
            grad_norm=grad_norm,
            entropy=self.entropy / tokens,
            ratio_mean=self.ratio / tokens,
            ratio_max=self.ratio_max,
            clipped=self.changed / tokens,
            moved=self.guard.distance,
            scale=self.guard.scale,
            reference_k1=None if self.k1 is None else self.k1 / tokens,
            agreement=self.agreement,
        )
