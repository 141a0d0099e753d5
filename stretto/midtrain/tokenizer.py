"""Tokenizers from nothing: byte-level BPE that knows code, ChatML and Hermes tool calls.

`train_for_code` makes one of any size, with the names of Qwen2.5-Coder's tokens. `train` makes the nano model's, where
two choices let a small vocabulary go far. A name is the same token wherever it stands: the space beside it belongs to
the operator or keyword (` += `, `return `), or to the first of two words. And the boilerplate of ordinary JSON tool
calls is a handful of added tokens. Any text still round-trips, byte by byte.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

VOCABULARY = 1024

_PATTERN = (
    r" (?:in|and|or|if|else|is|not)(?= )(?: )?"  # keywords between two names take both spaces
    r"|[A-Za-z_]+(?: (?!(?:in|and|or|if|else|is|not) )(?=[A-Za-z_]))?"  # a word, with the space before the next word
    r"|[0-9]{1,2}"
    r"| ?[^\sA-Za-z_0-9]+(?: (?! ))?"  # operators take the spaces beside them
    r"|\n *|\t| +|\s"
)

_STRUCTURE = [
    "<|im_end|>",
    "<|im_start|>",
    "<|im_start|>system\n",
    "<|im_start|>user\n",
    "<|im_end|>\n<|im_start|>assistant\n",
    "\n<|im_start|>user\n<tool_response>\n",
    "\n</tool_response><|im_end|>\n<|im_start|>assistant\n",
]
_BOILERPLATE = [
    "<tool_call>\n",
    "\n</tool_call>",
    "<tool_response>\n",
    "\n</tool_response>",
    '<tool_call>\n{"name": "',
    '", "arguments": {',
    '"}}\n</tool_call>',
    "}}\n</tool_call>",
    '<tool_call>\n{"name": "read_file", "arguments": {"path": "',
    '<tool_call>\n{"name": "edit_file", "arguments": {"path": "',
    '", "line": ',
    ', "text": "',
    '<tool_call>\n{"name": "run_tests", "arguments": {}}\n</tool_call>',
    '<tool_call>\n{"name": "submit", "arguments": {}}\n</tool_call>',
    "solution.py",
]


def train(texts: Iterator[str], folder: Path) -> Tokenizer:
    """Train on `texts` and write `tokenizer.json` with transformers' companion files into `folder`."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PATTERN), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    added = len(_STRUCTURE) + len(_BOILERPLATE)
    trainer = trainers.BpeTrainer(
        vocab_size=VOCABULARY - added,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _STRUCTURE])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _BOILERPLATE])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|im_end|>", '
        '"model_max_length": 2048, "clean_up_tokenization_spaces": false}\n'
    )
    return tokenizer


_WORDS = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
"""How GPT-4's and Qwen's tokenizers part a text before merging: words with the space before them, single digits."""
_CONTROL = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>"]
_CONTROL += ["<|repo_name|>", "<|file_sep|>"]
_CALLS = ["<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "<think>", "</think>"]


def train_for_code(texts: Iterator[str], size: int, folder: Path) -> Tokenizer:
    """Train one of `size` tokens on `texts`, with the chat, tool and fill-in-the-middle tokens of Qwen2.5-Coder, and
    write it into `folder`. Raises ValueError when `size` has no room for bytes and control tokens."""
    added = len(_CONTROL) + len(_CALLS)
    if size < 256 + added:
        raise ValueError(f"a vocabulary of {size} has no room for 256 bytes and {added} control tokens")
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_WORDS), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=size - added, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    tokenizer.train_from_iterator(texts, trainer)
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in _CONTROL])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in _CALLS])
    folder.mkdir(parents=True, exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(
        '{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>", '
        '"clean_up_tokenization_spaces": false}\n'
    )
    return tokenizer
