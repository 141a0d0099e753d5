"""The control tokens that structure mid-training documents, under the names that code models give them.

    repository   <|repo_name|>name ⏎ <|file_sep|>path ⏎ text <|file_sep|>path ⏎ text … <|endoftext|>
    PSM          <|fim_prefix|>before<|fim_suffix|>after<|fim_middle|>middle

What stands in a file is text, also where it spells a control token: it is encoded as ordinary characters.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from pathlib import Path

from tokenizers import Tokenizer

SPELLINGS = {
    "prefix": ("<|fim_prefix|>", "<fim_prefix>", "<|fim_begin|>", "<｜fim▁begin｜>", "<PRE>"),
    "suffix": ("<|fim_suffix|>", "<fim_suffix>", "<|fim_hole|>", "<｜fim▁hole｜>", "<SUF>"),
    "middle": ("<|fim_middle|>", "<fim_middle>", "<|fim_end|>", "<｜fim▁end｜>", "<MID>"),
    "repository": ("<|repo_name|>", "<repo_name>", "<reponame>"),
    "file": ("<|file_sep|>", "<file_sep>", "<filename>"),
    "end": ("<|endoftext|>", "<｜end▁of▁sentence｜>", "<|im_end|>", "</s>"),
}
"""Qwen2.5-Coder's, StarCoder's, DeepSeek-Coder's, Code Llama's."""


FIM = ("prefix", "suffix", "middle")
REPOSITORY = ("repository", "file")
ABSENT = -1


@dataclass(frozen=True)
class Marks:
    """Token ids; `ABSENT` is one that is not used and that the vocabulary lacks."""

    prefix: int
    suffix: int
    middle: int
    repository: int
    file: int
    end: int


class Encoder:
    """A tokenizer for texts that may spell its control tokens."""

    def __init__(self, path: Path):
        """`path`: `tokenizer.json` or the folder it is in. Raises ValueError when it can't be read."""
        file = path / "tokenizer.json" if path.is_dir() else path
        try:
            self.tokenizer = Tokenizer.from_file(str(file))
        except Exception as error:  # the library raises plain Exception
            raise ValueError(f"{file} is no tokenizer that can be read: {error}") from error
        self.tokenizer.encode_special_tokens = True
        self.tokenizer.no_truncation()
        self.tokenizer.no_padding()
        added = [token.content for token in self.tokenizer.get_added_tokens_decoder().values()]
        self._added = re.compile("|".join(map(re.escape, sorted(added, key=len, reverse=True)))) if added else None

    @property
    def size(self) -> int:
        return self.tokenizer.get_vocab_size(with_added_tokens=True)

    @property
    def end(self) -> int:
        """The token that parts documents. Raises ValueError when there is none."""
        found = (self.tokenizer.token_to_id(spelling) for spelling in SPELLINGS["end"])
        if (id := next((one for one in found if one is not None), None)) is None:
            raise ValueError(f"the tokenizer has none of {', '.join(SPELLINGS['end'])} to part documents with")
        return id

    @property
    def ends(self) -> set[int]:
        """Every token of the vocabulary that ends a document or a turn."""
        found = (self.tokenizer.token_to_id(spelling) for spelling in SPELLINGS["end"])
        return {id for id in found if id is not None}

    def encode(self, texts: list[str]) -> list[list[int]]:
        return [one.ids for one in self.tokenizer.encode_batch_fast(texts, add_special_tokens=False)]

    def marks(self, fim: bool = True, repositories: bool = True) -> Marks:
        """Those of fill-in-the-middle, of repositories and of ends. Raises ValueError naming each control token that is
        needed and that the vocabulary lacks, and how to do without."""
        needed = {"end", *(FIM if fim else ()), *(REPOSITORY if repositories else ())}
        found, missing = {}, []
        for role, spellings in SPELLINGS.items():
            ids = (self.tokenizer.token_to_id(spelling) for spelling in spellings)
            found[role] = next((id for id in ids if id is not None), ABSENT)
            if found[role] == ABSENT and role in needed:
                missing.append(f"{role} ({' or '.join(spellings[:2])})")
        if missing:
            raise ValueError(
                f"the tokenizer lacks control tokens for {', '.join(missing)}: take one that was made for code"
                + (", or a share of 0 for fill-in-the-middle" if fim and repositories else "")
            )
        return Marks(**found)

    def outside_tokens(self, text: str, at: int) -> int:
        """`at`, or the start of the added token (a chat mark, `<tool_call>`) whose spelling it would cut in two."""
        if self._added is not None:
            for match in self._added.finditer(text, max(0, at - 64)):
                if match.start() >= at:
                    break
                if at < match.end():
                    return match.start()
        return at
