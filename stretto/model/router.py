"""Which experts see which token: top-k choice, replay of choices recorded at inference, and the balance loss.

Replay (R3, arXiv 2510.11370: the trainer uses the experts that the engine used) forces the *ids* only. Gates always
come from the live scores of all experts, so that the router keeps its gradient whatever was replayed. Scores are a
softmax, or in DeepSeek-V3 (arXiv 2412.19437) sigmoids, with a bias and groups that count for the choice alone.

Shapes: `T` tokens, `E` experts, `K` experts per token, `L` MoE layers. Ids are int64; -1 marks a row that is unknown.
"""

from __future__ import annotations

import torch
from torch import Tensor

from stretto.model.deepseek import Grouping


def choose(logits_TE: Tensor, k: int) -> Tensor:
    """The router's own choice [T, K], best first; ties go to the lowest index, on any device and for any T."""
    return torch.sort(logits_TE, dim=-1, descending=True, stable=True).indices[:, :k]


def select(
    logits_TE: Tensor, k: int, replayed_TK: Tensor | None = None, normalize: bool = True
) -> tuple[Tensor, Tensor]:
    """Experts [T, K] (int64) and gates [T, K] (float32) of each token.

    Rows of `replayed_TK` that are all -1 route freely; the others are taken as they are, slot order included.
    `normalize` is Hugging Face's `norm_topk_prob`: the K gates are divided by their sum.
    """
    experts_TK = choose(logits_TE.detach(), k)
    if replayed_TK is not None:
        experts_TK = torch.where(replayed_TK[:, :1] >= 0, replayed_TK, experts_TK)
    if normalize:  # softmax over the chosen logits is the full softmax divided by its sum over the chosen
        return experts_TK, torch.softmax(logits_TE.gather(1, experts_TK).float(), dim=-1)
    return experts_TK, torch.softmax(logits_TE.float(), dim=-1).gather(1, experts_TK)


def grouped_ranks(logits_TE: Tensor, bias_E: Tensor, grouping: Grouping) -> Tensor:
    """What DeepSeek-V3 chooses by [T, E] (no gradient): sigmoid + bias, -inf outside the groups that are kept.

    A group is as good as its two best experts together.
    """
    ranks_TE = logits_TE.detach().float().sigmoid() + bias_E
    groups_TGS = ranks_TE.unflatten(1, (grouping.groups, -1))
    kept_TG = choose(groups_TGS.topk(2, dim=-1).values.sum(-1), grouping.kept)
    dropped_TG = torch.ones(groups_TGS.shape[:2], dtype=torch.bool, device=ranks_TE.device).scatter_(1, kept_TG, False)
    return groups_TGS.masked_fill(dropped_TG.unsqueeze(2), -torch.inf).flatten(1)


def select_sigmoid(
    logits_TE: Tensor, ranks_TE: Tensor, k: int, replayed_TK: Tensor | None = None, normalize: bool = True
) -> tuple[Tensor, Tensor]:
    """As `select`, for DeepSeek-V3: the best of `ranks_TE` are chosen, their gates are their sigmoid(logits)."""
    experts_TK = choose(ranks_TE, k)
    if replayed_TK is not None:
        experts_TK = torch.where(replayed_TK[:, :1] >= 0, replayed_TK, experts_TK)
    gates_TK = logits_TE.float().gather(1, experts_TK).sigmoid()
    return experts_TK, gates_TK / (gates_TK.sum(-1, keepdim=True) + 1e-20) if normalize else gates_TK


def disagreement(ranks_TE: Tensor, replayed_TK: Tensor) -> Tensor:
    """bool [T]: rows that are known and whose set differs from the router's own choice, the best of `ranks_TE`."""
    own_TK = choose(ranks_TE.detach(), replayed_TK.shape[1]).sort(dim=-1).values
    differs_T = (own_TK != replayed_TK.sort(dim=-1).values).any(dim=-1)
    return differs_T & (replayed_TK[:, 0] >= 0)


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
