"""Whether a checkpoint folder can be run at all: network, tokenizer and the engine's slots fit together.

Asked before any weights are read: by an engine that starts, and by the launcher before there is a run. Needs no torch.
"""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

from safetensors import SafetensorError, safe_open

from stretto.config import EngineConfig
from stretto.harness.chat import Chat
from stretto.model.spec import ModelSpec, load_spec


def whole(folder: Path) -> None:
    """Look at a checkpoint's weight files without reading the weights. Raises ValueError with a sentence when there are
    none, or one is cut off or damaged."""
    files = sorted(folder.glob("*.safetensors"))
    if not files:
        raise ValueError(f"{folder} holds no *.safetensors file: there are no weights to start from")
    for file in files:
        try:
            with safe_open(file, framework="numpy"):
                pass
        except (OSError, SafetensorError) as error:
            raise ValueError(f"{file} is cut off or damaged ({error}): copy it again") from None


def fitting(folder: Path, config: EngineConfig) -> tuple[ModelSpec, Chat]:
    """Network and chat of a checkpoint folder. Raises ValueError with a sentence when an engine can't run them."""
    if config.backend == "vllm" and find_spec("vllm") is None:
        raise ValueError(
            "engine.backend is vllm, but vLLM is not installed here: pip install 'stretto[vllm]', or see docs/vllm.md "
            "for machines without a GPU"
        )
    spec, chat = load_spec(folder), Chat(folder)
    if config.max_tokens > spec.max_positions:
        raise ValueError(
            f"engine.max_tokens is {config.max_tokens}, but this network was made for {spec.max_positions} positions"
        )
    if chat.vocab_size > spec.vocab_size:
        raise ValueError(
            f"the tokenizer in {folder} has {chat.vocab_size} tokens, but the network {spec.vocab_size}: "
            f"they don't belong together"
        )
    return spec, chat
