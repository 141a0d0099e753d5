"""A mid-training run as data: one TOML file.

    [midtrain]
    model = "Qwen3-30B-A3B"          # a checkpoint; or a folder with only a config.json: random weights
    corpus = ["corpora/code"]        # of `stretto corpus build`
    out = "midtrained"

    [[phase]]
    name = "bulk"
    tokens = 1_000_000_000
    lr = 3e-4
    mixture = { python = 0.8, transcript = 0.2 }

    [[phase]]
    name = "long"
    tokens = 50_000_000
    lr = 1e-4
    row = 32768
    rope_theta = 1_000_000.0

    [mtp]                            # heads for multi-token prediction, taught beside the network
    weight = 0.1

    [[phase]]
    name = "heads"
    tokens = 20_000_000
    lr = 1e-3
    heads = "alone"                  # the network stays as it is

Paths are relative to the file.
"""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from pydantic import Field, model_validator

from stretto.config import Decay, Positive, Section, read_toml

Shares = dict[str, float]


class Midtrain(Section):
    model: str
    """A checkpoint folder; one without weights begins with random ones, one without a tokenizer trains its own."""
    corpus: tuple[str, ...] = Field(min_length=1)
    """Corpora to learn from."""
    out: str
    """Folder of the run: shards, state, metrics, and the checkpoint after each phase; the last is `out/final`."""
    seed: int = Field(default=0, ge=0, lt=2**31)
    """Order of rows, places of cuts, random weights."""
    row: Positive = 1024
    """Tokens of a packed row."""
    fim: float = Field(default=0.5, ge=0, le=1)
    """Share of the code files that are written as fill-in-the-middle."""
    batch_rows: Positive = 8
    """Rows of one optimizer step, over all ranks."""
    micro_rows: Positive = 4
    """Rows of one forward-backward pass of one rank."""
    optimizer: Literal["adamw", "muon"] = "adamw"
    """`muon` moves the matrices inside the network along their orthogonalised momentum, with the same learning rates;
    embeddings, output head, routers and vectors stay with AdamW."""
    weight_decay: float = Field(default=0.05, ge=0)
    """Of matrices."""
    betas: tuple[Decay, Decay] = (0.9, 0.95)
    """AdamW moment decays."""
    max_grad_norm: float = Field(default=1.0, gt=0)
    """Global gradient norm is clipped to this."""
    balance: float = Field(default=0.01, ge=0)
    """Weight of the router's load-balancing loss."""
    bias_speed: float = Field(default=0.0, ge=0)
    """Networks that choose experts with a bias (DeepSeek-V3): how far it moves per step towards balance."""
    z_loss: float = Field(default=0.0, ge=0)
    """Weight of the squared log-partition of the router's logits (ST-MoE, arXiv 2202.08906)."""
    average: float = Field(default=0.0, ge=0, lt=1)
    """Decay per step of the moving average of weights that is saved at the end of a phase; 0 saves the last weights."""
    numerics: Literal["fast", "exact"] = "fast"
    """`exact` makes a row's result independent of the rows beside it, to the bit."""
    save_every: Positive = 200
    """Steps between saves of the resume state."""
    threads: Positive = 1
    """Compute threads of each rank."""


class Evaluation(Section):
    every: Positive = 200
    """Steps between measurements; the end of a phase is measured as well."""
    bpb: str = ""
    """A corpus, or a folder of source files, on which bits per byte are measured; never learnt from. Empty: not."""
    fim: str = ""
    """The same for fill-in-the-middle: how many of its lines the model writes back exactly."""


class Mtp(Section):
    """Heads for multi-token prediction (`model.mtp`), taught by the network's own distributions. All logits of a
    micro-batch are held for it."""

    depth: Positive = 1
    """Heads of a network that has none yet; those of a checkpoint are taken as they are."""
    guesses: Positive = 2
    """Guesses in a row that are taught; beyond the last head it is used again."""
    weight: float = Field(default=0.1, gt=0)
    """Weight of their loss beside the next-token loss."""


class Phase(Section):
    name: str = Field(pattern=r"^[\w-]+$")
    tokens: Positive
    """Tokens the phase reads; it ends with the first step that reaches them."""
    lr: float = Field(gt=0)
    """Peak learning rate."""
    warmup_steps: int = Field(default=20, ge=0)
    """Steps of linear warm-up."""
    stable: float = Field(default=0.7, ge=0, le=1)
    """Share of the tokens at the peak; a linear decay to `floor` of it follows."""
    floor: float = Field(default=0.03, ge=0, le=1)
    """Share of the peak that the decay ends at."""
    mixture: Shares = Field(default={})
    """Weight of each domain (a language, or `transcript`); empty: each by its tokens."""
    mixture_end: Shares = Field(default={})
    """Where the mixture has moved to, linearly, when the phase ends; empty: it stays."""
    row: Positive | None = None
    """Tokens of a packed row in this phase, for a longer context."""
    rope_theta: float | None = Field(default=None, gt=0)
    """Base of the rotary embedding from this phase on, for a longer context."""
    heads: Literal["joint", "alone", "off"] | None = None
    """With [mtp]: heads learn with the network, on a network that stays as it is, or not at all. Default: joint."""


class Recipe(Section):
    midtrain: Midtrain
    phase: tuple[Phase, ...] = Field(min_length=1)
    evaluation: Evaluation = Evaluation()
    mtp: Mtp | None = None

    @model_validator(mode="after")
    def _possible(self) -> Recipe:
        names = [phase.name for phase in self.phase]
        if len(set(names)) != len(names) or "final" in names:
            raise ValueError(f"phases need names of their own, other than 'final'; they are {', '.join(names)}")
        for phase in self.phase:
            if phase.heads is not None and self.mtp is None:
                raise ValueError(f"phase {phase.name} sets heads = {phase.heads}, but there is no table [mtp]")
            for shares in (phase.mixture, phase.mixture_end):
                if shares and (min(shares.values()) < 0 or not 0 < sum(shares.values()) < float("inf")):
                    raise ValueError(
                        f"the mixture of phase {phase.name} is {shares}: weights must be no less than 0 and sum to more"
                    )
        return self


def load(path: Path) -> Recipe:
    """Raises ConfigError: a sentence for each key that is wrong."""
    return read_toml(Recipe, path)


def teaches(recipe: Recipe, phase: Phase) -> Literal["joint", "alone", "off"]:
    """What a phase does with heads for multi-token prediction."""
    return (phase.heads or "joint") if recipe.mtp is not None else "off"


def learning_rate(phase: Phase, step: int, seen: int) -> float:
    """Warm-up by steps, stable, then linear decay by tokens (arXiv 2404.06395); both count from the phase's start."""
    progress = min(1.0, seen / phase.tokens)
    fall = 1.0
    if progress > phase.stable:
        fall = 1.0 - (1.0 - phase.floor) * (progress - phase.stable) / (1.0 - phase.stable)
    rise = min(1.0, (step + 1) / phase.warmup_steps) if phase.warmup_steps else 1.0
    return phase.lr * min(rise, fall)
