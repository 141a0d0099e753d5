"""What Stretto adds to each vLLM worker (`worker_extension_cls`): new weights, in place, while generation is paused.

    front: pause ──▶ collective_rpc("take_weights") ──▶ each worker: layerwise reload, hash what goes in ──▶ fingerprint
                                                              └─ an exception leaves vLLM whole, if not the weights

vLLM reloads layer by layer: a layer's tensors are gathered, processed for the kernels (packed, fused, sharded) and
copied over the old ones, so that compiled graphs keep their addresses. Memory for one layer is enough; the price is
that the old weights are gone. The front therefore reads every byte of a version before it comes here, and has the old
version taken again if it fails none the less.

Left out: quantised weights; staging on the device.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import psutil
import torch
from torch import Tensor, nn

if TYPE_CHECKING:
    from stretto.engine.vllm_weights import Files

QUALIFIED_NAME = f"{__name__}.Weights"


class Weights:
    """Becomes a base of vLLM's worker class, which has `vllm_config`, `model_config` and `model_runner`."""

    def take_weights(self: Any, files: Files, turn: bool = False) -> str:
        """Serve what `files` hold from now on; returns the fingerprint of the tensors that vLLM was given. Raises when
        a parameter of vLLM's network was left without a value. `turn`: in another basis (`vllm_weights.turned`)."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        # only now: a worker of vLLM's CPU build does not start when numba has been imported, which our networks do
        from stretto.engine.vllm_weights import Seal, stream, turned

        # it warns of layers that own no weights, each time; what was left out is looked at below
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)
        model: nn.Module = self.model_runner.get_model()
        wanted = {name for name, _ in model.named_parameters()}
        seal = Seal()

        def tensors() -> Iterator[tuple[str, Tensor]]:
            for name, tensor in stream(files):
                seal.add(name, tensor)
                yield name, turned(name, tensor) if turn else tensor

        with set_current_vllm_config(self.vllm_config), torch.no_grad():
            _forget_packed_experts(model)
            initialize_layerwise_reload(model)
            try:
                taken = model.load_weights(tensors())  # type: ignore[operator]
            except BaseException:
                _drop_half_loaded(model)
                raise
            finally:  # also after an error, or the next reload would begin in the middle of this one
                finalize_layerwise_reload(model, self.model_config)
            _process_tied(model)
        if left := wanted - set(taken):
            raise RuntimeError(f"vLLM left {len(left)} parameters as they were, e.g. {min(left)}")
        return seal.root

    def end_with(self: Any, front: int) -> None:
        """End this worker and the engine core above it when the process `front` is gone, however it went."""
        threading.Thread(target=_watch, args=(front,), name="front", daemon=True).start()


def _forget_packed_experts(model: nn.Module) -> None:
    """CPU kernels pack the experts when they are made, and only then: vLLM 0.32 would read new weights as if they were
    packed. Without a kernel it makes one. (GPU kernels convert at each reload, and graphs hold on to them.)"""
    from vllm.platforms import current_platform

    if current_platform.is_cpu():
        for layer in model.modules():
            method = getattr(layer, "quant_method", None)
            if getattr(method, "moe_kernel", None) is not None:
                method.moe_kernel = None  # type: ignore[union-attr]


def _drop_half_loaded(model: nn.Module) -> None:
    """What layers have gathered so far goes, so that each gets its old tensors back at the end of the reload."""
    from vllm.model_executor.model_loader.reload.layerwise import get_layerwise_info

    for layer in model.modules():
        info = get_layerwise_info(layer)
        info.loaded_weights.clear()
        info.load_numel = 0


def _process_tied(model: nn.Module) -> None:
    """A layerwise reload processes a tied parameter for the first of its layers only; kernels of the others would keep
    the packed old values (on CPUs, where an output head is packed, the old head would go on serving)."""
    from vllm.model_executor.layers.quantization.base_config import QuantizeMethodBase

    seen: set[int] = set()
    for layer in model.modules():
        own = {id(parameter) for parameter in layer.parameters(recurse=False)}
        method: Any = getattr(layer, "quant_method", None)
        if own & seen and isinstance(method, QuantizeMethodBase):
            method.process_weights_after_loading(layer)
        seen |= own


def _watch(front: int) -> None:
    core = os.getppid()
    process = psutil.Process(front)
    while process.is_running() and process.status() != psutil.STATUS_ZOMBIE:
        time.sleep(1.0)
    if core != front:  # with one GPU the worker lives in the core itself
        os.kill(core, signal.SIGKILL)
    os._exit(1)
