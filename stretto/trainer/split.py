"""A micro-batch cut along its token axis, one part per rank: sequences longer than one rank can hold.

Every stream of a token goes with it: ids, positions, routes, and what was sampled after it. Attention alone looks
across parts (`model.parallel.SplitHeads`). Terms of the loss that add up over tokens add up over ranks too; those that
look at a whole sequence need its log-probs from all of them.

Shape suffixes as in `packing.py`.
"""

from __future__ import annotations

import dataclasses

import torch.distributed as dist

from stretto.model.parallel import SplitHeads, spans
from stretto.support import Support
from stretto.trainer.packing import MicroBatch, follow


def part_of(micro: MicroBatch, group: dist.ProcessGroup) -> MicroBatch:
    """This rank's part of a micro-batch that every rank of `group` has packed alike. `samples` stays the whole's.

    Raises Astray when routes and ids have come apart.
    """
    parts = spans(len(micro.ids_T), dist.get_world_size(group))
    mine = parts[dist.get_rank(group)]
    inside_N = (micro.predict_N >= mine.start) & (micro.predict_N < mine.stop)
    support = None
    if micro.support is not None:
        sets = [part for part, inside in zip(micro.support.split(), inside_N.tolist(), strict=True) if inside]
        support = Support.join(sets) if sets else Support.none(micro.support.vocab)
    part = dataclasses.replace(
        micro,
        attend=SplitHeads(micro.attend, [span.stop - span.start for span in parts], group),
        ids_T=micro.ids_T[mine],
        positions_T=micro.positions_T[mine],
        routes_TLK=None if micro.routes_TLK is None else micro.routes_TLK[mine],
        route_ids_T=None if micro.route_ids_T is None else micro.route_ids_T[mine],
        predict_N=micro.predict_N[inside_N] - mine.start,
        targets_N=micro.targets_N[inside_N],
        behaviour_N=micro.behaviour_N[inside_N],
        versions_N=micro.versions_N[inside_N],
        support=support,
        advantage_N=micro.advantage_N[inside_N],
        share_N=micro.share_N[inside_N],
    )
    follow(part.ids_T, part.route_ids_T, "the sequence split")
    return part
