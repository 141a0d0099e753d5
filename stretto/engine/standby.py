"""The second copy of the weights, where a new version is made and verified while the first one serves.

    whole file ──▶ standby tensors ──────────────┐
    patch ──▶ standby tensors, as the live ones ─┴▶ root of what lies there ▶ canary ▶ the two change places
                                                                                       ▶ the old copy is patched, too

The live tensors are never written to, so a failed or killed load leaves the old version serving, bit for bit, and there
is no way back to make. All work is done beside generation; what it has to stop for is an exchange of two pointers: both
copies have their forward passes, built once, because weights change in place and never move.

A patch costs what changed. Of tensors that it does not touch the hashes are known; a copy that fell behind (after a
whole file, or a load that failed) is first made equal to the live one.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import numpy as np
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from stretto.engine import canary
from stretto.engine.cache import KVCache
from stretto.engine.contract import WeightsRefused, WrongBase
from stretto.engine.forward import Forward, forward_of
from stretto.model import checkpoint, served
from stretto.model.numerics import PLAIN, Numerics
from stretto.model.spec import ModelSpec
from stretto.model.transformer import Transformer
from stretto.records import WeightsOrder
from stretto.weights import patchfile
from stretto.weights.patchfile import Change
from stretto.weights.state import TensorEntry, fingerprint, root, tensor_hash


class Copy:
    """One network in memory, and its forward pass into a cache."""

    def __init__(self, model: Transformer, cache: KVCache, every_row: bool = False) -> None:
        self.model = model.requires_grad_(False)
        self.forward = forward_of(model, cache, every_row)  # may move weights together, so the views come after it
        self.named = checkpoint.named_tensors(model)
        self.entries: dict[str, TensorEntry] = {}  # of each published tensor, of what lies here; empty: not known
        self.dtype = "bf16"  # of the published tensors
        self.fresh = True  # the forward pass knows what lies here
        self._trial: Forward | None = None

    def trial(self, cache: KVCache) -> Forward:
        """A pass into another cache, always the same one."""
        if self._trial is None:
            self._trial = forward_of(self.model, cache)
        self._trial.refresh()
        return self._trial

    def refresh(self) -> None:
        """Have the forward pass know of all that was written since it last did."""
        if not self.fresh:
            self.forward.refresh()
            self.fresh = True

    def weigh(self, names: Sequence[str] | None = None) -> str:
        """The root, after hashing all tensors (or those of `names`, where the others are known)."""
        for name in self.named if names is None else names:
            for published, array in served.wire(name, self.named[name], self.dtype):
                self.entries[published] = published, array.dtype.itemsize * 8, array.shape, tensor_hash(array)
        return root(self.entries.values())

    def take(self, other: Copy) -> None:
        """Become equal to `other`."""
        for name, tensor in self.named.items():
            tensor.copy_(other.named[name])
        self.entries, self.dtype = dict(other.entries), other.dtype

    def write(self, changes: Sequence[Change]) -> list[str]:
        """Scatter into the tensors; the names of those that changed. ValueError when the changes do not fit."""
        touched = list(dict.fromkeys(change.name.removesuffix(served.SCALE) for change in changes))
        if self.dtype == "fp8":
            self._rewrite(changes, [name for name in touched if served.quantised(name)])
        for change in changes:
            base = change.name.removesuffix(served.SCALE)
            if self.dtype == "fp8" and served.quantised(base):
                continue
            values = served.values(change.name, change.values)
            flat = _flat(self.named[base])
            if change.positions is None:
                flat.copy_(values)
            else:
                flat.numpy()[change.positions] = values.numpy()
        return touched

    def _rewrite(self, changes: Sequence[Change], names: Sequence[str]) -> None:
        """Quantised tensors are taken apart, changed, and put together again: a scale is in all values of its block."""
        for name in names:
            parts = {part: array.copy() for part, array in served.wire(name, self.named[name], "fp8")}
            for change in changes:
                if change.name in parts:
                    array = parts[change.name]
                    change.write(array.view(np.uint32) if array.dtype == np.float32 else array)
            self.named[name].copy_(served.values(name, parts[name], parts[name + served.SCALE]))


class Standby:
    """Memory for the next version. One load at a time; `exchange` hands it over and takes the old memory in return."""

    def __init__(
        self, spec: ModelSpec, numerics: Numerics = PLAIN, cache: KVCache | None = None, every_row: bool = False
    ):
        kv_heads, key_dim, value_dim = spec.cache_shape
        self._room = KVCache(spec.layers, 1, kv_heads, canary.TOKENS, key_dim, value_dim)
        self.copy = Copy(checkpoint.empty(spec, numerics=numerics), cache or self._room, every_row)
        self._changes: list[Change] | None = None  # what the live copy is about to have more than this one
        self._behind = True  # this copy is not the live one's equal
        self.copy.fresh = False

    @property
    def model(self) -> Transformer:
        return self.copy.model

    def load(self, path: Path, expected: str) -> None:
        """Fill the standby tensors from a safetensors file and verify them. Raises WeightsRefused."""
        self._behind, self._changes, self.copy.entries = True, None, {}
        try:
            tensors = load_file(path)
            self.copy.dtype = "fp8" if any(name.endswith(served.SCALE) for name in tensors) else "bf16"
            checkpoint.load_named(self.model, tensors)
            del tensors
        except (OSError, SafetensorError, checkpoint.CheckpointError) as error:
            raise WeightsRefused(f"{path} can't be loaded: {error}") from None
        self._demand(path, self.copy.weigh(), expected)

    def patch(self, path: Path, parent: str, expected: str, live: Copy, serving: str) -> None:
        """Make the version that a patch makes of the live one, and verify it. Raises WrongBase and WeightsRefused."""
        if parent != serving:
            raise WrongBase(f"{path} starts from {parent}, but what serves here is {serving or 'nothing yet'}")
        if not live.entries:
            live.weigh()
        if self._behind:
            self.copy.take(live)
        self._behind = True  # until all of it is known to be right
        try:
            changes = patchfile.load(path, self._sizes())
            touched = self.copy.write(changes)
        except (OSError, ValueError) as error:
            raise WeightsRefused(f"{path} can't be used: {error}") from None
        self._demand(path, self.copy.weigh(touched), expected)
        self._changes, self._behind = changes, False

    def prepare(self, order: WeightsOrder, live: Copy, serving: str) -> float | None:
        """All that comes before the exchange; how far the canary is off. Raises WrongBase and WeightsRefused."""
        path = Path(order.path)
        if order.parent:
            self.patch(path, order.parent, order.fingerprint, live, serving)
        else:
            self.load(path, order.fingerprint)
        self.copy.refresh()
        if order.canary is None:
            return None
        try:
            return canary.check(self.model, self.copy.trial(self._room), order.canary, order.version)
        except WeightsRefused:
            self._behind = True
            raise

    def exchange(self, live: Copy) -> Copy:
        """The loaded network; `live` becomes the memory of the next load, and `settle` is due."""
        loaded, self.copy = self.copy, live
        loaded.refresh()
        live.fresh = False  # from here on it is written to
        return loaded

    def settle(self, live: Copy) -> None:
        """After the exchange, beside generation: bring the old copy to the version that is live now."""
        if self._changes is None:
            self._behind = True
            return
        self.copy.write(self._changes)
        self.copy.entries, self._changes, self._behind = dict(live.entries), None, False

    def _demand(self, path: Path, found: str, expected: str) -> None:
        if found != expected:
            raise WeightsRefused(f"{path} makes fingerprint {found}, but {expected or '(none)'} was announced")

    def _sizes(self) -> dict[str, int]:
        return {name: int(np.prod(shape, dtype=np.int64)) for name, _, shape, _ in self.copy.entries.values()}


def model_fingerprint(model: Transformer, dtype: str = "bf16") -> str:
    """Of the bits that a published version would have, under their Hugging Face names."""
    return fingerprint(served.Bits(checkpoint.named_tensors(model), dtype))


def _flat(tensor: Tensor) -> Tensor:
    """The same memory, in one dimension."""
    return tensor.view(-1)
