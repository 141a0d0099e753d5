"""Fill-in-the-middle at character level (Bavarian et al., arXiv 2207.14255): a text is cut in three at random places,
and the middle is moved to the end, so that a left-to-right model learns to write it.

Half of the cut texts in order prefix, suffix, middle (PSM), half in order suffix, prefix, middle (SPM). A cut never
falls inside the spelling of a token of the chat template.
"""

from __future__ import annotations

import random

from stretto.midtrain.tokens.marks import Encoder, Marks


def cuts(text: str, rng: random.Random, encoder: Encoder) -> tuple[str, str, str]:
    """(prefix, middle, suffix), in the text's order."""
    first, last = sorted(encoder.outside_tokens(text, rng.randint(0, len(text))) for _ in range(2))
    return text[:first], text[first:last], text[last:]


def fill_in(text: str, rng: random.Random, encoder: Encoder, marks: Marks, spm: float = 0.5) -> list[int]:
    """The ids of one text cut in three, without an end token. `spm`: the share written suffix first."""
    prefix, middle, suffix = cuts(text, rng, encoder)
    before, within, after = encoder.encode([prefix, middle, suffix])
    if rng.random() < spm:
        return [marks.prefix, marks.suffix, *after, marks.middle, *before, *within]
    return [marks.prefix, *before, marks.suffix, *after, marks.middle, *within]
