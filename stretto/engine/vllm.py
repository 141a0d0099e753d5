"""The engine of large models: vLLM behind the same contract as our own, in its own process tree.

    server.py ⇄ VllmService (this process, asyncio) ⇄ AsyncLLM ──zmq──▶ vLLM's engine core ──▶ its workers + `Weights`

vLLM is used as a library and unchanged: `AsyncLLM`, its pause that keeps requests, its weight version per output token,
a worker extension (`vllm_worker`). Its own HTTP server is left out, because it would not speak our contract, and
wrapping it would add a hop and hide the first error. Why not its engine in this very process: the core labels tokens
with versions where they are sampled, and neither side waits for the other's interpreter.

What it can't do is refused by name, when a configuration is parsed, when the engine starts, or when a request comes:
see the table in docs/vllm.md. Tested with the CPU build of 0.32; the path for GPUs follows its documentation.
"""

# pyright: reportMissingImports=false

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from stretto.config import EngineConfig
from stretto.engine import vllm_worker
from stretto.engine.contract import Fault, Log, Unavailable, WeightsRefused
from stretto.engine.vllm_service import VllmService
from stretto.model.spec import ModelSpec

if TYPE_CHECKING:
    from vllm.engine.arg_utils import AsyncEngineArgs

QUIET = {
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",  # nothing is reported to anyone
    "HF_HUB_OFFLINE": "1",  # the model is a folder
}
"""Set unless the user has."""

ON_CPU = {
    "VLLM_CPU_OMP_THREADS_BIND": "nobind",  # or the engines of all clusters would share one core
    "TORCHDYNAMO_DISABLE": "1",  # or the sampler is compiled at the first request: a minute, and a C++ compiler
}


async def start(
    folder: Path, spec: ModelSpec, config: EngineConfig, *, version: int, seed: int, name: str, metrics: Log | None
) -> VllmService:
    """vLLM with the network of a checkpoint folder, and with its weights unless `version` is -1. Takes half a minute or
    more. Raises ValueError with a sentence when vLLM can't do what is asked of it."""
    os.environ.update({key: value for key, value in QUIET.items() if key not in os.environ})
    with _ended_by_sigterm():
        try:
            from vllm.platforms import current_platform
            from vllm.v1.engine.async_llm import AsyncLLM

            if current_platform.is_cpu():
                os.environ.update({key: value for key, value in ON_CPU.items() if key not in os.environ})
                os.environ["OMP_NUM_THREADS"] = str(config.threads)
            llm = AsyncLLM.from_engine_args(_arguments(folder, spec, config, seed))
        except (ValueError, RuntimeError, ImportError, OSError) as error:
            raise ValueError(_reason(error, spec, config)) from error
    service = VllmService(llm, spec, config, seed=seed, name=name, metrics=metrics)
    try:
        await llm.collective_rpc("end_with", args=(os.getpid(),))
        await service.open(folder, version)
    except (WeightsRefused, Fault, Unavailable) as error:
        await service.close()
        raise ValueError(str(error)) from error
    except BaseException:
        await service.close()
        raise
    return service


def _arguments(folder: Path, spec: ModelSpec, config: EngineConfig, seed: int) -> AsyncEngineArgs:
    from vllm.engine.arg_utils import AsyncEngineArgs
    from vllm.platforms import current_platform

    options: dict[str, Any] = {}
    if current_platform.is_cpu():
        options["enforce_eager"] = True
        options["kv_cache_memory_bytes"] = _kv_bytes(spec, config)
    if spec.experts and config.routes == "required":
        options["enable_return_routed_experts"] = True
    return AsyncEngineArgs(
        model=str(folder),
        skip_tokenizer_init=True,  # token ids in and out
        generation_config="vllm",  # no sampling defaults but those of the request
        dtype=config.dtype,
        seed=seed % 2**32,
        max_model_len=config.max_tokens,
        max_num_seqs=config.slots,
        max_num_batched_tokens=config.prefill_tokens + config.slots,
        tensor_parallel_size=config.tensor_parallel,
        enable_prefix_caching=True,
        logprobs_mode="processed_logprobs",
        worker_extension_cls=vllm_worker.QUALIFIED_NAME,
        disable_log_stats=True,
        **options,
    )


def _kv_bytes(spec: ModelSpec, config: EngineConfig) -> int:
    """Room for every slot full, in vLLM's blocks of 128 tokens, and one block that it keeps for itself."""
    heads, key, value = spec.cache_shape
    blocks = config.slots * -(-config.max_tokens // 128) + 1
    return blocks * 128 * spec.layers * heads * (key + value) * (4 if config.dtype == "float32" else 2)


def _reason(error: BaseException, spec: ModelSpec, config: EngineConfig) -> str:
    if isinstance(error, ValidationError):  # vLLM's configuration; its text shows the whole input
        text = "; ".join(each["msg"].removeprefix("Value error, ") for each in error.errors())
    else:
        text = " ".join(str(error).split()) or type(error).__name__
    if spec.experts and config.routes == "required" and ("AuxOutput" in text or "routed-experts" in text.lower()):
        return (
            f"this vLLM can't return the experts it routes to ({text}): use a GPU build, the native engine, or "
            "engine.routes = unknown with trainer.replay = false"
        )
    return f"vLLM did not start: {text}"


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """While vLLM starts its processes, SIGTERM is an exception, so that it can end them."""

    def end(number: int, frame: object) -> None:
        raise SystemExit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
