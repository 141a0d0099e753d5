"""Which experts see which token: top-k choice, replay of choices recorded at inference, and the balance loss.

Replay (R3, arXiv 2510.11370: the trainer uses the experts that the engine used) forces the *ids* only. Gates always
come from the live scores of all experts, so that the router keeps its gradient whatever was replayed. Scores are a
softmax, or in DeepSeek-V3 (arXiv 2412.19437) sigmoids, with a bias and groups that count for the choice alone.

Shapes: `T` tokens, `E` experts, `K` experts per token, `L` MoE layers. Ids are int64; -1 marks a row that is unknown.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import reduce

import torch
from torch import Tensor

from stretto.model.deepseek import Grouping

TINY = 1e-20
"""Added to the sum that gates are divided by, so that experts without any score do not give nan."""


def choose(logits_TE: Tensor, k: int) -> Tensor:
    """The router's own choice [T, K], best first; ties go to the lowest index, on any device and for any T."""
    return torch.sort(logits_TE, dim=-1, descending=True, stable=True).indices[:, :k]


@dataclass(frozen=True)
class Selection:
    """The experts of each token, and how they came about. Without replay nothing is replaced and nothing differs."""

    experts_TK: Tensor  # int64
    gates_TK: Tensor  # float32, with gradient
    replaced_T: Tensor | None  # bool: known rows in which an implausible expert was replaced; None without replay
    differs_T: Tensor | None  # bool: known rows whose set is not the router's own choice; None without replay


@dataclass(frozen=True)
class Ranks:
    """What experts are chosen by when that is not their score (DeepSeek-V3). No gradient."""

    own_TE: Tensor  # the best k are chosen; -inf outside the groups that are kept
    reach_TE: Tensor  # replayed experts are judged by it; -inf outside groups that could plausibly have been kept


def select(
    scores_TE: Tensor,
    k: int,
    replayed_TK: Tensor | None = None,
    ratio: float = 0.0,
    normalize: bool = True,
    ranks: Ranks | None = None,
) -> Selection:
    """Experts and gates of each token, from the scores (float32) of all experts: softmax probabilities, or sigmoids.

    Rows of `replayed_TK` that are all -1 route freely. In the others an expert stays, in its slot, when its score is at
    least `ratio` times that of the router's own expert of the same place: the best recorded one against the best own
    one, and so on to the weakest. (Against the weakest alone, a damaged row that lacks the dominant expert passes.) An
    implausible one, or one that the row has already, makes room for the router's best candidate not yet in the row. So
    0 replays whatever was recorded, and 1 gives the router's own sets, up to ties. Where experts are ranked by
    score + bias, the same margin, `(1 - ratio) * score`, is subtracted from the rank: neither a bias common to all
    experts nor a negative rank changes what is plausible.

    Gates are the live scores of the experts in use; `normalize` (`norm_topk_prob`) divides them by their sum.
    """
    own_TE, reach_TE = (scores_TE.detach(),) * 2 if ranks is None else (ranks.own_TE, ranks.reach_TE)
    order_TE = torch.sort(own_TE, dim=-1, descending=True, stable=True).indices
    own_TK = experts_TK = order_TE[:, :k]
    replaced_T = differs_T = None
    if replayed_TK is not None:
        known_T = replayed_TK[:, 0] >= 0
        experts_TK = torch.where(known_T.unsqueeze(1), replayed_TK, own_TK)
        differs_T = (own_TK.sort(dim=-1).values != experts_TK.sort(dim=-1).values).any(dim=-1)
        replaced_T = torch.zeros_like(known_T)
        if ratio > 0:
            floor_TK = _floor(own_TE.gather(1, own_TK), scores_TE.detach().gather(1, own_TK), ratio)
            reach_TK, place_TK = torch.sort(reach_TE.gather(1, experts_TK), dim=-1, descending=True, stable=True)
            short_TK = torch.zeros_like(floor_TK, dtype=torch.bool).scatter_(1, place_TK, reach_TK < floor_TK)
            again_TK = (experts_TK.unsqueeze(2) == experts_TK.unsqueeze(1)).tril(-1).any(dim=-1)
            bad_TK = (short_TK | again_TK) & known_T.unsqueeze(1)
            replaced_T = bad_TK.any(dim=-1)
            if bool(replaced_T.any()):
                experts_TK = _refill(experts_TK, bad_TK, order_TE)
    gates_TK = scores_TE.gather(1, experts_TK)
    if normalize:
        total_T = reduce(torch.add, gates_TK.unbind(dim=1))  # in slot order, whatever T
        gates_TK = gates_TK / (total_T + TINY).unsqueeze(1)
    return Selection(experts_TK, gates_TK, replaced_T, differs_T)


def _floor(rank: Tensor, score: Tensor, ratio: float) -> Tensor:
    """`ratio` times the score where ranks are scores; never above the rank itself, whatever the rounding."""
    return torch.minimum(ratio * score + (rank - score), rank)


def _refill(experts_TK: Tensor, bad_TK: Tensor, order_TE: Tensor) -> Tensor:
    """Put the router's own best candidates that are not in the row yet into its bad slots, in order."""
    tokens, experts = order_TE.shape
    taken = torch.zeros(tokens, experts + 1, dtype=torch.bool, device=order_TE.device)
    taken.scatter_(1, experts_TK.masked_fill(bad_TK, experts), True)
    free_TE = torch.sort(taken.gather(1, order_TE), dim=-1, stable=True).indices
    candidates_TE = order_TE.gather(1, free_TE)
    return torch.where(bad_TK, candidates_TE.gather(1, (bad_TK.cumsum(-1) - 1).clamp_(min=0)), experts_TK)


def grouped_ranks(scores_TE: Tensor, bias_E: Tensor, grouping: Grouping, ratio: float = 0.0) -> Ranks:
    """What DeepSeek-V3 chooses by: sigmoid score + bias, in the best groups alone.

    A group is as good as its two best experts together. It could plausibly have been kept when it comes, by that sum,
    within `ratio` of the weakest group kept; `select` says what that means.
    """
    scores_TE = scores_TE.detach()
    ranks_TE = scores_TE + bias_E
    groups_TGS = ranks_TE.unflatten(1, (grouping.groups, -1))
    best_TG2 = groups_TGS.topk(2, dim=-1)
    group_TG = best_TG2.values.sum(-1)
    kept_TG = choose(group_TG, grouping.kept)
    outside_TG = torch.ones_like(group_TG, dtype=torch.bool).scatter_(1, kept_TG, False)
    own_TE = groups_TGS.masked_fill(outside_TG.unsqueeze(2), -torch.inf).flatten(1)
    if ratio <= 0:
        return Ranks(own_TE, ranks_TE)
    weakest_T1 = kept_TG[:, -1:]
    score_TG = scores_TE.unflatten(1, (grouping.groups, -1)).gather(2, best_TG2.indices).sum(-1)
    floor_T1 = _floor(group_TG.gather(1, weakest_T1), score_TG.gather(1, weakest_T1), ratio)
    far_TG = (group_TG < floor_T1).unsqueeze(2)
    return Ranks(own_TE, groups_TGS.masked_fill(far_TG, -torch.inf).flatten(1))


def check_routes(routes_TLK: Tensor, tokens: int, shape: tuple[int, int], experts: int) -> None:
    """Raise ValueError unless routes are int64 [T, L, K], each row all -1 or K expert ids."""
    if routes_TLK.dtype != torch.int64 or routes_TLK.shape != (tokens, *shape):
        raise ValueError(
            f"routes must be int64 {[tokens, *shape]} for this network, not {routes_TLK.dtype} {list(routes_TLK.shape)}"
        )
    if routes_TLK.numel() == 0:
        return
    known = routes_TLK >= 0
    if bool((known.any(-1) != known.all(-1)).any()) or int(routes_TLK.max()) >= experts or int(routes_TLK.min()) < -1:
        raise ValueError(f"a row of routes must be all -1 (unknown) or expert ids below {experts}")


def balance_loss(router_logits: list[Tensor], routes_TLK: Tensor, experts: int) -> Tensor:
    """Load-balancing loss of Switch Transformers (arXiv 2101.03961, eq. 4-6), averaged over layers; 1 when balanced.

    Per layer: `E * sum_e f_e * P_e`, with `f_e` the share of assignments that went to expert e (no gradient) and `P_e`
    the mean router probability (softmax of `router_logits`). A packed axis has no padding, so every row counts.
    """
    losses = []
    for layer, logits_TE in enumerate(router_logits):
        share_E = (
            torch.bincount(routes_TLK[:, layer].reshape(-1), minlength=experts).float() / routes_TLK[:, layer].numel()
        )
        mean_E = torch.softmax(logits_TE.float(), dim=-1).mean(dim=0)
        losses.append(experts * (share_E * mean_E).sum())
    return torch.stack(losses).mean()
