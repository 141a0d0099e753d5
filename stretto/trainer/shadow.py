"""A second policy beside the trained one: the frozen start of the run, or a moving average of its weights.

The start serves `trainer.kl` as the reference. The moving average (PPO-EWMA: arXiv 2110.00641) serves as a reference
that follows slowly, or as the proximal policy of a clip. A shadow costs a copy of the weights in fp32 and one more
forward pass per step, without gradient; the model wears its weights meanwhile, rounded as all served weights are.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import torch
from torch import Tensor

from stretto.model import checkpoint as huggingface
from stretto.trainer.optimizer import MasterAdamW

PREFIX = "ema/"
"""Of its tensors in a checkpoint."""


class Shadow:
    """Weights by the model's parameter names, fp32. `decay` None: they never move."""

    def __init__(self, weights: dict[str, Tensor], decay: float | None = None) -> None:
        self._weights = weights
        self._decay = decay

    @classmethod
    def of(cls, optimizer: MasterAdamW, decay: float) -> Shadow:
        """A moving average that begins with the present masters."""
        return cls({name: master.clone() for name, master in optimizer.masters.items()}, decay)

    @classmethod
    def frozen(cls, folder: Path) -> Shadow:
        """The checkpoint in `folder`, for good."""
        model = huggingface.load(folder)
        return cls({name: parameter.detach() for name, parameter in model.named_parameters()})

    @torch.no_grad()
    def follow(self, optimizer: MasterAdamW) -> None:
        """One version further; nothing for a frozen one."""
        if self._decay is None:
            return
        for name, master in optimizer.masters.items():
            self._weights[name].lerp_(master, 1.0 - self._decay)

    @contextmanager
    def worn(self, optimizer: MasterAdamW) -> Iterator[None]:
        """Inside, `optimizer`'s model computes with these weights; afterwards with its own again. No gradients."""
        try:
            with torch.no_grad():
                for name, parameter in optimizer.parameters.items():
                    parameter.copy_(optimizer.rounded(name, self._weights[name]))
                yield
        finally:
            optimizer.round_into_model()

    def state(self) -> dict[str, Tensor]:
        """What a resumed run needs: nothing for a frozen one, whose checkpoint still lies where it lay."""
        return {} if self._decay is None else {PREFIX + name: value for name, value in self._weights.items()}

    def load_state(self, tensors: dict[str, Tensor]) -> None:
        """Take the average out of a checkpoint's tensors. One that has none (it was made without an average) leaves it
        at what it is: the weights training goes on from."""
        if self._decay is not None:
            for name, value in self._weights.items():
                value.copy_(tensors.get(PREFIX + name, value))
