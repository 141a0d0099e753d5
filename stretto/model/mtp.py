"""Multi-token prediction in DeepSeek-V3's form (arXiv 2412.19437, 2.2): heads that guess the tokens after the next.

    head of depth 1, row i:   eh_proj [ enorm(embedding of t_i+1) ; hnorm(h_i) ] ─▶ block ─▶ shared_head.norm ─▶ the
                              network's own head ─▶ a guess at what the network will say of t_i+2

`h_i` is the network's hidden state after its final norm, as vLLM and SGLang feed it. A deeper guess takes the hidden
state of the guess before it and one more token; beyond the last head of a checkpoint, that head is used again.
Embedding and output head are the network's own. Heads are no part of `Transformer`: what samples, learns by RL and is
published is the network alone, and a checkpoint without heads is the same file as ever.

They learn by self-distillation: the target of each guess is the network's own distribution (`mtp_loss`), not the text.

Shapes: `T` tokens of packed sequences, `N` those of them that count, `D` width, `V` vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from stretto.model.attention import Attend, PackedCausal
from stretto.model.linear import Linear, product
from stretto.model.norm import RMSNorm
from stretto.model.numerics import PLAIN, Numerics
from stretto.model.rotary import rotary_angles
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Block, Transformer


def block_spec(spec: ModelSpec) -> ModelSpec:
    """A network of one layer, of the kind of the last layer of `spec`: what the block of a head is."""
    dense = () if spec.layers - 1 in spec.moe_layers else (0,)
    return replace(spec, layers=1, sparse_step=1, dense_layers=dense, mtp_layers=0)


class Head(Block):
    """One depth. Attributes carry DeepSeek-V3's names."""

    def __init__(self, spec: ModelSpec, numerics: Numerics = PLAIN) -> None:
        super().__init__(block_spec(spec), 0, numerics)
        width, eps = spec.hidden_size, spec.rms_norm_eps
        self.enorm, self.hnorm = RMSNorm(width, eps, numerics), RMSNorm(width, eps, numerics)
        self.eh_proj = Linear(2 * width, width, numerics)
        self.shared_head = nn.ModuleDict({"norm": RMSNorm(width, eps, numerics)})

    def guess(self, embedded_TD: Tensor, hidden_TD: Tensor, rotary: tuple[Tensor, Tensor], attend: Attend) -> Tensor:
        """Hidden states [T, D] after the head's norm, from those before and the embeddings of the tokens after them."""
        joint_T2D = torch.cat([self.enorm(embedded_TD), self.hnorm(hidden_TD)], dim=-1)
        return self.shared_head["norm"](self(self.eh_proj(joint_T2D), rotary, attend, None)[0])


class Heads(nn.Module):
    """The `spec.mtp_layers` heads of a network, uninitialised: see `fresh` and `checkpoint.load_heads`."""

    def __init__(self, spec: ModelSpec, numerics: Numerics = PLAIN) -> None:
        super().__init__()
        if spec.mtp_layers < 1:
            raise ValueError("a network without multi-token prediction (mtp_layers = 0) has no heads")
        self.spec = spec
        numbers = range(spec.layers, spec.layers + spec.mtp_layers)  # behind the network's own layers, as on disk
        self.layers = nn.ModuleDict({str(number): Head(spec, numerics) for number in numbers})

    def head(self, step: int) -> Head:
        """The head that makes guess `step`, counted from 0."""
        return cast(Head, self.layers[str(self.spec.layers + min(step, self.spec.mtp_layers - 1))])


def fresh(model: Transformer, depth: int = 1, seed: int = 0) -> Heads:
    """New heads for a network: blocks and norms begin as copies of its last ones, `eh_proj` as a random matrix that
    lets both halves through."""
    heads = Heads(replace(model.spec, mtp_layers=depth), model.numerics).to(model.embed_tokens.weight)
    generator = torch.Generator().manual_seed(seed)
    width = model.spec.hidden_size
    with torch.no_grad():
        for step in range(depth):
            head = heads.head(step)
            head.load_state_dict(model.layers[-1].state_dict(), strict=False)
            head.shared_head["norm"].load_state_dict(model.norm.state_dict())
            noise = torch.empty(width, 2 * width).normal_(0.0, model.spec.initializer_range, generator=generator)
            head.eh_proj.weight.copy_(noise + 0.5 * torch.eye(width).repeat(1, 2))
    return heads


class Distilled(NamedTuple):
    """The loss, and for each guess how much of the network's distribution the head's covers: the mean of
    `sum min(p, q)`, the most that any rule of acceptance could accept; and the mean `agreement`, which the engine
    accepts."""

    loss: Tensor
    overlaps: list[float]
    agreements: list[float]


def agreement(p_NV: Tensor, q_NV: Tensor) -> Tensor:
    """[N]: the chance that one uniform number draws the same token of both distributions, when a draw is the first
    token at which the probability, summed in order, exceeds it: how much of its stretch each token has in both."""
    ends = [x.double().cumsum(dim=-1) for x in (p_NV, q_NV)]
    starts = [nn.functional.pad(x[:, :-1], (1, 0)) for x in ends]
    return (torch.minimum(*ends) - torch.maximum(*starts)).clamp_min(0).sum(dim=-1).float()


def mtp_loss(
    model: Transformer,
    heads: Heads,
    hidden_TD: Tensor,
    ids_T: Tensor,
    lengths: list[int],
    steps: int = 1,
    wanted_T: Tensor | None = None,
    frozen: bool = True,
    agreeing: float = 0.0,
) -> Distilled:
    """Mean over guesses and tokens of KL(network's distribution || head's), in nats; the network's side is detached.
    The share `agreeing` of the loss is the chance to draw another token (`agreement`) instead: what a head is for, but
    without a slope where it knows nothing yet.

    `hidden_TD` is `Output.hidden_TD` of the packed `ids_T`, whose sequences have `lengths`. `steps` guesses are made
    one after the other, each from the one before. `wanted_T` (bool) picks the tokens whose guesses count, by default
    all. With `frozen` only the heads get a gradient; else hidden states, embedding and output head get theirs too.
    Holds the logits of all tokens. Raises ValueError when no token of `wanted_T` has a guess.
    """
    spec = model.spec
    embedding_VD, head_VD = model.embed_tokens.weight, model.head_weight
    if frozen:
        hidden_TD, embedding_VD, head_VD = hidden_TD.detach(), embedding_VD.detach(), head_VD.detach()
    places_T = torch.cat([torch.arange(length) for length in lengths])
    left_T = torch.cat([torch.arange(length, 0, -1) for length in lengths])
    with torch.no_grad():
        target_TV = torch.log_softmax(model.logits(hidden_TD), dim=-1)
    losses, overlaps, agreements = [], [], []
    for step in range(steps):
        head, ahead = heads.head(step), step + 1
        angles = rotary_angles(places_T + step, spec.rotary_dim, spec.rope_theta, hidden_TD.dtype, spec.yarn)
        following_TD = nn.functional.embedding(ids_T.roll(-ahead), embedding_VD)
        hidden_TD = head.guess(following_TD, hidden_TD, angles, PackedCausal(lengths))
        counts_T = left_T > ahead + 1  # the sequence has the token that is guessed
        if wanted_T is not None:
            counts_T = counts_T & wanted_T.roll(-ahead - 1)
        at_N = counts_T.nonzero().squeeze(1)
        if not len(at_N):
            raise ValueError(f"no token is wanted that lies {ahead + 1} or more behind the start of its sequence")
        q_NV = torch.log_softmax(product(hidden_TD[at_N].float(), head_VD.float(), None, False), dim=-1)
        p_NV = target_TV[at_N + ahead]
        same_N = agreement(p_NV.exp(), q_NV.exp())
        apart = nn.functional.kl_div(q_NV, p_NV, reduction="batchmean", log_target=True)
        losses.append(torch.lerp(apart, 1 - same_N.mean(), agreeing))
        agreements.append(float(same_N.detach().mean()))
        overlaps.append(float(torch.minimum(p_NV, q_NV.detach()).exp().sum(-1).mean()))
    return Distilled(torch.stack(losses).mean(), overlaps, agreements)
