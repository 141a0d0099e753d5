"""Where a trainer that starts again finds its place: the newest version that anybody may have seen.

    checkpoint C ──the same batches──▶ committed V ──perhaps──▶ published V + 1 = HEAD

Versions up to V are committed in the ledger; HEAD of the chain may be one ahead, when the trainer was killed between
publishing and committing. Rollouts may have been sampled with all of them, so none may come to mean other weights. The
trainer makes them again from the batches, which never change, and compares its bits with HEAD's. Where they differ (a
device that adds in another order each time, a setting that was changed in between) the published ones win: they are
what the engines serve and what the rollouts' log-probs are of.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from stretto.model import checkpoint as huggingface
from stretto.model import served
from stretto.model.transformer import Transformer
from stretto.trainer.optimizer import MasterAdamW
from stretto.watch.metrics import read
from stretto.weights.chain import read_head
from stretto.weights.rebuild import rebuild
from stretto.weights.store import Store


@dataclass(frozen=True)
class Place:
    """How far a start before this one came."""

    committed: int  # the newest version that the ledger holds as trained
    published: int  # HEAD of the chain; -1 when there is none, or one that is behind the ledger
    chain: str

    @property
    def version(self) -> int:
        return max(self.committed, self.published)


def place(store: Store, committed: tuple[int, str] | None) -> Place | None:
    """None in a run that has published nothing. `committed` is what the ledger says: a version and its chain."""
    if committed is None:
        return None
    version, chain = committed
    found = read_head(store, chain) if chain else None
    head = found[0].version if found else -1
    return Place(version, head if head >= version else -1, chain)


def take_published(store: Store, chain: str, model: Transformer, optimizer: MasterAdamW) -> float:
    """Make the model what HEAD of `chain` names; the optimizer keeps its moments, and the masters that round to these
    values. Returns the share of elements that were others."""
    found = read_head(store, chain)
    assert found is not None, f"chain {chain} was there a moment ago"
    tensors = rebuild(store, found[0]).state.tensors
    weights = [name for name in tensors if not name.endswith(served.SCALE)]
    values = {name: served.values(name, tensors[name], tensors.get(name + served.SCALE)) for name in weights}
    huggingface.load_named(model, values)
    return optimizer.follow_model()


def logged_steps(metrics: Path) -> set[int]:
    """Versions whose step was logged before the trainer died."""
    return {int(line["version"]) for line in read(metrics) if line["kind"] == "step"}


def sentence(version: int, saved: int, chain: str) -> str:
    again = f", made again from the checkpoint of version {saved}," if saved < version else ""
    return f"training goes on from version {version}{again} on chain {chain}"
