"""Append-only chat rendering, in token ids, in the format that the checkpoint speaks (`formats.py`).

A conversation is a list of ids that only ever grows. What the policy sampled is kept as sampled; what the harness adds
(the instruction, tool results) is tokenised once, when it is added. Text is never tokenised a second time.

    start("Fix total …")        <|im_start|>user … <|im_end|> <|im_start|>assistant
    (the policy samples)         <tool_call> … </tool_call><|im_end|>
    observe(["1\\tdef …"])       <|im_start|>user <tool_response> … </tool_response><|im_end|> <|im_start|>assistant

That is ChatML with Hermes calls; Qwen3-Coder's tags and Kimi K2's sections are others.

Control tokens inside a file or an instruction are text, not control: content is encoded with special tokens off.

A tokenizer may have control tokens that spell the stop token and more (the shipped one has a token for
"<|im_end|>\\n<|im_start|>assistant\\n"). The policy can sample them too, so each of `ends` ends a turn. What was
sampled is kept; the text of the turn is what comes before the stop token, and the harness closes what the token opened.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer

from stretto.harness.chatml import call_text, tool_prompt
from stretto.harness.formats import Format, spoken
from stretto.harness.parse import Attempt
from stretto.harness.pieces import Control

__all__ = ["Chat", "call_text", "tool_prompt"]


class Chat:
    """Renders one tokenizer's conversations. Raises ValueError when it lacks its format's tokens."""

    def __init__(self, folder: Path):
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise ValueError(f"{folder} has no tokenizer.json: give a Hugging Face checkpoint with a fast tokenizer")
        try:
            self.tokenizer, self._plain = (Tokenizer.from_file(str(path)) for _ in range(2))
        except Exception as error:  # the library has no other type
            raise ValueError(f"{path} can't be read: {error}") from None
        self._plain.encode_special_tokens = True
        self.format: Format = spoken(folder, self.tokenizer)
        control: dict[str, int] = {}
        for token in self.format.controls:
            number = self.tokenizer.token_to_id(token)
            if number is None:
                needs = "the ChatML tokens" if self.format.name != "kimi" else "all tokens of Kimi's template"
                raise ValueError(f"the tokenizer in {folder} lacks {token}: Stretto's chat needs {needs}")
            control[token] = number
        self.stop: list[int] = [control[self.format.stop]]
        """The token that closes a turn, alone: what the template and the harness write."""
        added = self.tokenizer.get_added_tokens_decoder()
        self.ends = sorted(
            (n for n, token in added.items() if self.format.stop in token.content), key=lambda n: n != self.stop[0]
        )
        """All tokens that end a turn when they are sampled, the stop token first."""
        self.vocab_size = self.tokenizer.get_vocab_size()
        self.longest = max(map(len, self.tokenizer.get_vocab()))
        """No token is made of more characters."""

    def start(self, instruction: str, system: str = "", tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Ids of a new conversation, up to where the policy begins to speak; `tools` are shown when given."""
        messages = [{"role": "system", "content": system}] if system else []
        return self.messages([*messages, {"role": "user", "content": instruction}], tools)

    def observe(self, observations: list[str], attempts: Sequence[Attempt] = (), then: str = "") -> list[int]:
        """Ids that follow an assistant turn ended by the stop token: tool results, then the next assistant prefix.
        `attempts` are what they answer, one each, for formats whose results name their call; `then` are a user's words
        after them."""
        if not observations:
            raise ValueError("observe() needs at least one observation: a turn is always answered")
        answered = [*attempts, *[None] * len(observations)]
        results = [_result(text, attempt) for text, attempt in zip(observations, answered, strict=False)]
        return self.follow([*results, *([{"role": "user", "content": then}] if then else [])])

    def follow(self, messages: list[dict[str, Any]]) -> list[int]:
        """Ids of `messages` (roles user, tool) after an assistant turn ended by the stop token, up to where the policy
        speaks again. Raises ValueError as `messages` does."""
        return self._render(self.format.follow(messages))

    def messages(self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None = None) -> list[int]:
        """Ids of an OpenAI-style message list (roles system, user, assistant, tool), up to where the policy speaks.

        Raises ValueError for an unknown role or content that is not text.
        """
        return self._render(self.format.prompt(messages, tools))

    def parse(self, text: str) -> list[Attempt]:
        """The attempts to call a tool in what the policy said."""
        return self.format.parse(text)

    def encode(self, text: str) -> list[int]:
        """Ids of content; control tokens in it are ordinary text."""
        return self._plain.encode(text, add_special_tokens=False).ids

    def said(self, ids: list[int]) -> str:
        """Text of a sampled turn, up to the token that ended it."""
        text = self.decode(ids)
        return text[: text.rindex(self.format.stop)] if ids and ids[-1] in self.ends else text

    def decode(self, ids: list[int]) -> str:
        return self.tokenizer.decode(ids, skip_special_tokens=False)

    def _render(self, pieces: list[str]) -> list[int]:
        """Encode content as text and runs of control pieces as control."""
        ids: list[int] = []
        for is_control, run in itertools.groupby(pieces, key=lambda piece: isinstance(piece, Control)):
            text = "".join(run)
            ids += self.tokenizer.encode(text, add_special_tokens=False).ids if is_control else self.encode(text)
        return ids


def _result(observation: str, answered: Attempt | None) -> dict[str, Any]:
    call = {"name": answered.name, "tool_call_id": answered.id} if answered else {}
    return {"role": "tool", "content": observation, **call}
