"""Whether a checkpoint folder can be run at all: network, tokenizer and the engine's slots fit together.

Asked before any weights are read: by an engine that starts, and by the launcher before there is a run. Needs no torch.
"""

from __future__ import annotations

from pathlib import Path

from stretto.config import EngineConfig
from stretto.harness.chat import Chat
from stretto.model.spec import ModelSpec, load_spec


def fitting(folder: Path, config: EngineConfig) -> tuple[ModelSpec, Chat]:
    """Network and chat of a checkpoint folder. Raises ValueError with a sentence when an engine can't run them."""
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
