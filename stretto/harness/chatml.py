"""ChatML, as Qwen models speak it, with one of two ways to write a tool call: Hermes's JSON, or Qwen3-Coder's tags.

    <|im_start|>user … <|im_end|> <|im_start|>assistant … <|im_end|>
    <|im_start|>user <tool_response> … </tool_response> <tool_response> … </tool_response> <|im_end|>

Results of one turn are one user message, in the order of the calls; they carry no name of the call they answer.
"""

from __future__ import annotations

import itertools
import json
from dataclasses import dataclass
from typing import Any

from stretto.harness import parse, qwen_xml
from stretto.harness.parse import Attempt
from stretto.harness.pieces import Control, call_arguments, content

START, STOP = "<|im_start|>", "<|im_end|>"
ASSISTANT = f"{START}assistant\n"


@dataclass(frozen=True)
class ChatML:
    """`coder`: calls are `<function=…>` tags (Qwen3-Coder, Qwen3.5); else they are Hermes's JSON (Qwen2.5, Qwen3)."""

    coder: bool = False
    stop: str = STOP
    controls: tuple[str, ...] = (START, STOP)
    opening: str = parse.OPEN
    frame: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        return "qwen-xml" if self.coder else "hermes"

    @property
    def no_call(self) -> str:
        inside = "<function=name>" if self.coder else "…"
        return f"no tool call; write <tool_call> {inside} </tool_call>"

    def parse(self, text: str) -> list[Attempt]:
        return parse.parse(text, qwen_xml.read if self.coder else parse.read_json)

    def prompt(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None) -> list[str]:
        system = "".join(content(message) for message in messages if message["role"] == "system")
        if tools:
            shown = qwen_xml.tool_prompt(tools) if self.coder else tool_prompt(tools)
            system = f"{system}\n\n{shown}".strip()
        head = [Control(f"{START}system\n"), system, Control(f"{STOP}\n")] if system else []
        return [*head, *self._body(messages), Control(ASSISTANT)]

    def follow(self, messages: list[dict[str, Any]]) -> list[str]:
        return [Control("\n"), *self._body(messages), Control(ASSISTANT)]

    def _body(self, messages: list[dict[str, Any]]) -> list[str]:
        pieces: list[str] = []
        for role, group in itertools.groupby(messages, key=lambda message: message["role"]):
            if role == "tool":
                pieces += _results([content(message) for message in group])
            elif role == "user":
                for message in group:
                    pieces += [Control(f"{START}user\n"), content(message), Control(f"{STOP}\n")]
            elif role == "assistant":
                for message in group:  # the stop token stands alone: the policy samples it, the newline is ours
                    pieces += [Control(ASSISTANT), self._said(message), Control(STOP), "", Control("\n")]
            elif role != "system":
                raise ValueError(f"unknown message role {role!r}: use system, user, assistant or tool")
        return pieces

    def _said(self, message: dict[str, Any]) -> str:
        write = qwen_xml.call_text if self.coder else call_text
        parts = [content(message)] if message.get("content") else []
        parts += [write(call["function"]["name"], call_arguments(call)) for call in message.get("tool_calls") or []]
        return "\n".join(parts)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the policy writes it, in Hermes's JSON."""
    return f"<tool_call>\n{json.dumps({'name': name, 'arguments': arguments}, ensure_ascii=False)}\n</tool_call>"


def tool_prompt(tools: list[dict[str, Any]]) -> str:
    """The Hermes system text that shows tools (OpenAI `tools` entries) to a model that does not know them."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        "# Tools\n\nYou may call one or more functions to assist with the user query.\n\n"
        f"You are provided with function signatures within <tools></tools> XML tags:\n<tools>\n{schemas}\n</tools>\n\n"
        "For each function call, return a json object with function name and arguments within "
        '<tool_call></tool_call> XML tags:\n<tool_call>\n{"name": <function-name>, "arguments": <args-json-object>}\n'
        "</tool_call>"
    )


def _results(observations: list[str]) -> list[str]:
    """Tool results as one user message."""
    pieces: list[str] = [Control(f"{START}user\n<tool_response>\n")]
    for number, observation in enumerate(observations):
        pieces += [Control("\n</tool_response>\n<tool_response>\n")] if number else []
        pieces.append(observation)
    return [*pieces, Control(f"\n</tool_response>{STOP}\n")]
