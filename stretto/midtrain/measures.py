"""What a mid-training run measures on held-out text while it learns: bits per byte, and lines written back exactly."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from stretto.midtrain.bits import bits_per_byte
from stretto.midtrain.complete import frozen
from stretto.midtrain.corpus.read import held_out
from stretto.midtrain.infill import exact_match, spans
from stretto.midtrain.recipe import Evaluation
from stretto.midtrain.tokens.marks import Encoder
from stretto.model.transformer import Transformer

SPANS = 64
"""Files of each language whose lines are asked for, each time."""


class Measures:
    """Reads the held-out text once. Raises ValueError with a sentence for what can't be measured."""

    def __init__(self, settings: Evaluation, base: Path, tokenizer: Path):
        self._encoder = Encoder(tokenizer)
        self._documents = list(held_out(base / settings.bpb)) if settings.bpb else []
        self._spans = spans(held_out(base / settings.fim), SPANS) if settings.fim else []
        self._marks = self._encoder.marks(repositories=False) if settings.fim else None
        for name, found in ((settings.bpb, self._documents), (settings.fim, self._spans)):
            if name and not found:
                raise ValueError(f"evaluation names {base / name}, where no document is")

    def of(self, model: Transformer, row: int) -> Iterator[tuple[str, dict[str, Any]]]:
        """(kind, values by language) of each measurement, as lines of metrics. The model is left as it is."""
        if self._documents:
            bits = bits_per_byte(model, self._encoder, self._documents, row)
            yield "bits", {name: one.bits_per_byte for name, one in bits.items()}
        if self._marks is not None:
            found = exact_match(frozen(model), self._encoder, self._marks, self._spans)
            yield (
                "fim",
                {name: {"match": one.match, "ci95": one.ci95, "spans": one.spans} for name, one in found.items()},
            )
