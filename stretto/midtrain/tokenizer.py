"""The nano model's tokenizer: byte-level BPE that knows code, ChatML and Hermes tool calls.

Two choices make a small vocabulary go far. A name is the same token wherever it stands: the space beside it belongs to
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
