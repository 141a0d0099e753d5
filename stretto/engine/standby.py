"""The second copy of the weights, where a new version is loaded and verified while the first one serves.

    file ──▶ standby tensors ──▶ fingerprint of what lies in them ──▶ equal? the two change places, else no change

The live tensors are never written to, so that a failed or killed load leaves the old version serving, bit for bit.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from stretto.engine.contract import WeightsRefused
from stretto.model import checkpoint
from stretto.model.numerics import PLAIN, Numerics
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Transformer
from stretto.weights.state import fingerprint


class Standby:
    """Memory for the next version. One load at a time; `exchange` hands it over and takes the old memory in return."""

    def __init__(self, spec: ModelSpec, numerics: Numerics = PLAIN):
        self.model = checkpoint.empty(spec, numerics=numerics).requires_grad_(False)

    def load(self, path: Path, expected: str) -> None:
        """Fill the standby tensors from a safetensors file and verify them. Raises WeightsRefused."""
        try:
            checkpoint.load_named(self.model, load_file(path))
        except (OSError, SafetensorError, checkpoint.CheckpointError) as error:
            raise WeightsRefused(f"{path} can't be loaded: {error}") from None
        found = model_fingerprint(self.model)
        if found != expected:
            raise WeightsRefused(f"{path} has fingerprint {found}, but {expected or '(none)'} was announced")

    def exchange(self, live: Transformer) -> Transformer:
        """The loaded network; `live` becomes the memory of the next load."""
        loaded, self.model = self.model, live
        return loaded


def model_fingerprint(model: Transformer) -> str:
    """Of the bits that a published version would have, under their Hugging Face names."""
    return fingerprint(checkpoint.bf16_bits(model))
