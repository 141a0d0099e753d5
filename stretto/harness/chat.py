"""Append-only chat rendering: ChatML with Hermes tool calls, in token ids.

A conversation is a list of ids that only ever grows. What the policy sampled is kept as sampled; what the harness adds
(the instruction, tool results) is tokenised once, when it is added. Text is never tokenised a second time.

    start("Fix total …")        <|im_start|>user … <|im_end|> <|im_start|>assistant
    (the policy samples)         <tool_call> … </tool_call><|im_end|>
    observe(["1\\tdef …"])       <|im_start|>user <tool_response> … </tool_response><|im_end|> <|im_start|>assistant

Control tokens inside a file or an instruction are text, not control: content is encoded with special tokens off.

A tokenizer may have control tokens that spell the stop token and more (the shipped one has a token for
"<|im_end|>\\n<|im_start|>assistant\\n"). The policy can sample them too, so each of `ends` ends a turn. What was
sampled is kept; the text of the turn is what comes before the stop token, and the harness closes what the token opened.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

START, STOP = "<|im_start|>", "<|im_end|>"
ASSISTANT = f"{START}assistant\n"


class Chat:
    """Renders one tokenizer's conversations. Raises ValueError when it lacks the ChatML tokens."""

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json: give a Hugging Face checkpoint with a fast tokenizer")
        try:
            self.tokenizer, self._plain = (Tokenizer.from_file(str(path)) for _ in range(2))
        except Exception as error:  # the library has no other type
            raise ValueError(f"{path} can't be read: {error}") from None
        self._plain.encode_special_tokens = True
        control: dict[str, int] = {}
        for token in (START, STOP):
            number = self.tokenizer.token_to_id(token)
            if number is None:
                raise ValueError(f"the tokenizer in {folder} lacks {token}: Stretto's chat needs the ChatML tokens")
            control[token] = number
        self.stop: list[int] = [control[STOP]]
        """The token that closes a turn, alone: what the template and the harness write."""
        added = self.tokenizer.get_added_tokens_decoder()
        self.ends = sorted((n for n, token in added.items() if STOP in token.content), key=lambda n: n != self.stop[0])
        """All tokens that end a turn when they are sampled, the stop token first."""
        self.vocab_size = self.tokenizer.get_vocab_size()

    def start(self, instruction: str, system: str = "") -> list[int]:
        """Ids of a new conversation, up to where the policy begins to speak."""
        messages = [{"role": "system", "content": system}] if system else []
        return self.messages([*messages, {"role": "user", "content": instruction}])

    def observe(self, observations: list[str]) -> list[int]:
        """Ids that follow an assistant turn ended by the stop token: tool results, then the next assistant prefix."""
        if not observations:
            raise ValueError("observe() needs at least one observation: a turn is always answered")
        return self._render([Control("\n"), *_results(observations), Control(ASSISTANT)])

    def messages(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Ids of an OpenAI-style message list (roles system, user, assistant, tool), up to where the policy speaks.

        Raises ValueError for an unknown role or content that is not text.
        """
        system = "".join(_text(message) for message in messages if message["role"] == "system")
        if tools:
            system = f"{system}\n\n{tool_prompt(tools)}".strip()
        pieces = [Control(f"{START}system\n"), system, Control(f"{STOP}\n")] if system else []
        for role, group in itertools.groupby(messages, key=lambda message: message["role"]):
            if role == "tool":
                pieces += _results([_text(message) for message in group])
            elif role == "user":
                for message in group:
                    pieces += [Control(f"{START}user\n"), _text(message), Control(f"{STOP}\n")]
            elif role == "assistant":
                for message in group:  # the stop token stands alone: the policy samples it, the newline is ours
                    pieces += [Control(ASSISTANT), _assistant(message), Control(STOP), "", Control("\n")]
            elif role != "system":
                raise ValueError(f"unknown message role {role!r}: use system, user, assistant or tool")
        return self._render([*pieces, Control(ASSISTANT)])

    def encode(self, text: str) -> list[int]:
        """Ids of content; control tokens in it are ordinary text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def said(self, ids: list[int]) -> str:
        """Text of a sampled turn, up to the token that ended it."""
        text = self.decode(ids)
        return text[: text.rindex(STOP)] if ids and ids[-1] in self.ends else text

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _render(self, pieces: list[str]) -> list[int]:
        """Encode content as text and runs of control pieces as control."""
        ids: list[int] = []
        for is_control, run in itertools.groupby(pieces, key=lambda piece: isinstance(piece, Control)):
            text = "".join(run)
            ids += self.tokenizer.encode(text, add_special_tokens=False).ids if is_control else self.encode(text)
        return ids


class Control(str):
    """A piece of the template: may contain control tokens."""


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the policy writes it."""
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


def _text(message: dict[str, Any]) -> str:
    content = message.get("content") or ""
    if isinstance(content, list):
        if any(part.get("type") != "text" for part in content):
            raise ValueError("message content holds parts that are not text: this model reads text only")
        content = "".join(part["text"] for part in content)
    if not isinstance(content, str):
        raise ValueError(f"message content must be a string, not {type(content).__name__}")
    return content


def _assistant(message: dict[str, Any]) -> str:
    parts = [_text(message)] if message.get("content") else []
    for call in message.get("tool_calls") or []:
        arguments = call["function"]["arguments"]
        parts.append(call_text(call["function"]["name"], json.loads(arguments) if arguments else {}))
    return "\n".join(parts)
