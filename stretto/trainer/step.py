"""One optimizer step: forward and backward over the micro-batches of a batch, clip, update.

    samples -> micro-batches -> hidden states of all tokens -> logits of sampled tokens only -> loss -> gradients, added
            -> one clip -> one AdamW step on the masters -> rounded into the model

A step whose loss or gradient is not finite stops before the optimizer: masters, moments and model stay as they were.
A batch without samples (no advantage differs from zero) makes no step either, so that momentum alone moves nothing.

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
from stretto.model.transformer import Transformer
from stretto.trainer.losses import BehaviourLogprobs, CurrentLogprobs, Loss, policy_loss
from stretto.trainer.optimizer import MasterAdamW
from stretto.trainer.packing import MicroBatch, pack
from stretto.trainer.samples import Sample


@dataclass(frozen=True)
class Distribution:
    """What the engine sampled from; the trainer's log-probs must be of the same."""

    temperature: float
    top_p: float


@dataclass(frozen=True)
class Predicted:
    """`logp_N`, `entropy_N`: of the sampled tokens. The others: see the model's `Output`; None without replay."""

    logp_N: Tensor
    entropy_N: Tensor
    disagreement: Tensor | None
    covered: Tensor | None


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


def predict(model: Transformer, micro: MicroBatch, distribution: Distribution) -> Predicted:
    """Log-probs of the sampled tokens under the model's present weights, with the routes of the micro-batch if any."""
    output = model(micro.ids_T, micro.positions_T, micro.attend, routes_TLK=micro.routes_TLK)
    logp_N, entropy_N = token_logprobs(
        model, output.hidden_TD[micro.predict_N], micro.targets_N, distribution.temperature, top_p=distribution.top_p
    )
    return Predicted(logp_N, entropy_N, output.disagreement, output.covered)


def without_routes(micro: MicroBatch) -> MicroBatch:
    return dataclasses.replace(micro, routes_TLK=None)


def learn(
    model: Transformer,
    optimizer: MasterAdamW,
    samples: Sequence[Sample],
    settings: TrainerConfig,
    distribution: Distribution,
    lr: float,
    between: Callable[[], None] = lambda: None,
) -> StepReport:
    """Make one step. `between` is called before each micro-batch and may raise to abandon the step: nothing has changed
    by then but the gradients, which the next step clears."""
    optimizer.zero_grad()
    sums = _Sums()
    for micro in pack(samples, settings.microbatch_tokens):
        between()
        predicted = predict(model, micro, distribution)
        loss = policy_loss(
            CurrentLogprobs(predicted.logp_N),
            BehaviourLogprobs(micro.behaviour_N),
            micro.advantage_N,
            micro.share_N,
            settings.correction,
            settings.correction_cap,
        )
        loss.total.backward()
        sums.add(loss, predicted)
    if not samples:
        return sums.report(applied=False, finite=True, grad_norm=0.0)
    norm = optimizer.clip(settings.max_grad_norm)
    if not math.isfinite(norm) or not math.isfinite(sums.loss):
        optimizer.zero_grad()
        return sums.report(applied=False, finite=False, grad_norm=norm)
    optimizer.step(lr)
    return sums.report(applied=True, finite=True, grad_norm=norm)


class _Sums:
    """Running sums over micro-batches."""

    def __init__(self) -> None:
        self.tokens = 0
        self.loss = self.entropy = self.ratio = self.ratio_max = self.changed = 0.0

    def add(self, loss: Loss, predicted: Predicted) -> None:
        ratio_N = loss.log_ratio_N.exp()
        self.tokens += len(ratio_N)
        self.loss += float(loss.total.detach())
        self.entropy += float(predicted.entropy_N.detach().sum())
        self.ratio += float(ratio_N.sum())
        self.ratio_max = max(self.ratio_max, float(ratio_N.max()))
        self.changed += int(loss.changed_N.sum())

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
        )
