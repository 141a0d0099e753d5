"""Which conversation format a checkpoint speaks: found by its tokenizer's control tokens and its chat template."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Protocol

from tokenizers import Tokenizer

from stretto.harness.chatml import ChatML
from stretto.harness.kimi import SECTION, Kimi
from stretto.harness.parse import Attempt


class Format(Protocol):
    """Renders conversations into pieces, and reads calls out of a turn."""

    @property
    def name(self) -> str: ...
    @property
    def stop(self) -> str: ...  # the token that closes a turn
    @property
    def controls(self) -> tuple[str, ...]: ...  # tokens that the tokenizer must have
    @property
    def opening(self) -> str: ...  # how tool calls begin
    @property
    def frame(self) -> tuple[str, ...]: ...  # what stands around all calls of a turn
    @property
    def no_call(self) -> str: ...  # the sentence for a turn without any
    def parse(self, text: str) -> list[Attempt]: ...
    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[str]: ...
    def follow(self, messages: list[dict[str, Any]]) -> list[str]: ...  # after a closed assistant turn


def spoken(folder: Path, tokenizer: Tokenizer) -> Format:
    """Kimi's where its control tokens are there, else ChatML, with the calls that the chat template tells of."""
    if tokenizer.token_to_id(SECTION) is not None and tokenizer.token_to_id("<|im_middle|>") is not None:
        return Kimi()
    return ChatML(coder="<function=" in _template(folder))


def parse_any(text: str) -> list[Attempt]:
    """For readers of rollouts, who don't know the format."""
    formats: list[Format] = [Kimi(), ChatML(coder="<function=" in text)]
    return next((attempts for format in formats if (attempts := format.parse(text))), [])


def _template(folder: Path) -> str:
    """The checkpoint's chat template, or nothing."""
    try:
        return (folder / "chat_template.jinja").read_text()
    except (OSError, UnicodeDecodeError):
        pass
    try:
        return str(json.loads((folder / "tokenizer_config.json").read_text()).get("chat_template", ""))
    except (OSError, ValueError, AttributeError):
        return ""
