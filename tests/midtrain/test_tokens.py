"""Documents, packing and the stream: every token once, no document sees another, N + N reads what 2N reads."""

from __future__ import annotations

import json
import random
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

from stretto.midtrain.corpus.document import Document
from stretto.midtrain.corpus.order import reading_order
from stretto.midtrain.tokens.documents import token_documents
from stretto.midtrain.tokens.fim import cuts, fill_in
from stretto.midtrain.tokens.marks import Encoder
from stretto.midtrain.tokens.mixture import Stream, annealed, normalised
from stretto.midtrain.tokens.packing import best_fit
from stretto.midtrain.tokens.shards import Shards, write

CONTROL = ["<|fim_prefix|>", "<|fim_suffix|>", "<|fim_middle|>", "<|repo_name|>", "<|file_sep|>", "<|endoftext|>"]
CHAT = ["<|im_start|>", "<|im_end|>"]


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    """One token a byte, and the control tokens."""
    letters = pre_tokenizers.ByteLevel.alphabet()
    tokenizer = Tokenizer(models.BPE(vocab={letter: at for at, letter in enumerate(sorted(letters))}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(word, special=True) for word in [*CONTROL, *CHAT]])
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return Encoder(path)


def text_of(ids: list[int], encoder: Encoder) -> str:
    return encoder.tokenizer.decode(ids, skip_special_tokens=False)


@given(st.lists(st.integers(0, 70), max_size=40), st.integers(1, 32))
@settings(max_examples=60, deadline=None)
def test_packing_puts_every_token_into_one_row_and_overfills_none(lengths: list[int], capacity: int) -> None:
    rows = best_fit(lengths, capacity)
    assert all(0 < sum(stop - start for _, start, stop in row) <= capacity for row in rows)
    seen = sorted(piece for row in rows for piece in row)
    tokens = [(document, at) for document, start, stop in seen for at in range(start, stop)]
    assert tokens == [(document, at) for document, length in enumerate(lengths) for at in range(length)]
    whole = sum(length // capacity for length in lengths)
    assert len(seen) <= whole + sum(length % capacity > 0 for length in lengths), "a short document is never cut"


def test_fill_in_the_middle_holds_the_whole_text_in_both_orders(encoder: Encoder) -> None:
    marks, rng = encoder.marks(), random.Random(0)
    text = "def f(x):\n    return x + 1  # <|fim_middle|> is text here\n"
    orders = set()
    for _ in range(200):
        ids = fill_in(text, rng, encoder, marks)
        assert ids[0] == marks.prefix
        assert [ids.count(mark) for mark in (marks.prefix, marks.suffix, marks.middle)] == [1, 1, 1]
        at_suffix, at_middle = ids.index(marks.suffix), ids.index(marks.middle)
        if at_suffix == 1:
            after, both = ids[2:at_middle], ids[at_middle + 1 :]
            whole = both + after
        else:
            whole = ids[1:at_suffix] + ids[at_middle + 1 :] + ids[at_suffix + 1 : at_middle]
        orders.add(at_suffix == 1)
        assert text_of(whole, encoder) == text
    assert orders == {True, False}


def test_a_cut_never_falls_into_a_token_of_the_chat_template(encoder: Encoder) -> None:
    rng = random.Random(1)
    text = "<|im_start|>" * 20
    for _ in range(200):
        prefix, middle, suffix = cuts(text, rng, encoder)
        assert all(len(part) % len("<|im_start|>") == 0 for part in (prefix, middle, suffix))


def test_imported_files_come_before_those_that_import_them() -> None:
    files = [
        ("pkg/app.py", "from pkg.core import run\nimport pkg.util as u\n"),
        ("pkg/core.py", "from . import util\nfrom .base import Base\n"),
        ("pkg/base.py", "import os\n"),
        ("pkg/util.py", "from .core import run  # a cycle\n"),
        ("README.md", "import pkg.app"),
    ]
    order = [files[at][0] for at in reading_order(files)]
    assert sorted(order) == sorted(path for path, _ in files)
    assert order.index("pkg/base.py") < order.index("pkg/core.py") < order.index("pkg/app.py")


def corpus(repositories: int) -> list[Document]:
    rng = random.Random(5)
    code = [
        Document(
            source="s",
            repository=f"r{number}",
            path=f"m{file}.py",
            text="".join(rng.choice("abc \n") for _ in range(rng.randrange(5, 150))),
            language="python",
        )
        for number in range(repositories)
        for file in range(rng.randrange(1, 5))
    ]
    talk: tuple[dict[str, object], ...] = (
        {"role": "user", "content": "question"},
        {"role": "assistant", "content": "answer"},
    )
    return [*code, Document(source="t", repository="t", path="1", text="", messages=talk)]


def shards(encoder: Encoder, folder: Path, fim: float = 0.0) -> Shards:
    write(token_documents(corpus(40), encoder, encoder.marks(), 128, fim, seed=0), encoder, 128, folder)
    return Shards.open(folder)


def test_shards_hold_every_text_once_and_learn_from_the_agent_alone(encoder: Encoder, tmp_path: Path) -> None:
    opened = shards(encoder, tmp_path / "shards")
    python = opened.domains["python"]
    rows = [python.row(number) for number in range(len(python))]
    assert all(sum(row.lengths) == len(row.ids) <= 128 and row.learn.all() for row in rows)
    ids = [id for row in rows for id in row.ids.tolist()]
    plain = "".join(sorted(text_of([id for id in ids if id < 256], encoder)))
    named = [f"{one.path}\n{one.text}" for one in corpus(40) if not one.messages]
    assert all(plain.count(letter) >= "".join(named).count(letter) for letter in "abc")
    assert sum(id == encoder.marks().file for id in ids) == len(named), "each file once"
    talk = opened.domains["transcript"].row(0)
    assert text_of(talk.ids[talk.learn].tolist(), encoder) == "answer<|im_end|>"


def drawn(stream: Stream, steps: int, weights: dict[str, float]) -> list[bytes]:
    return [row.ids.tobytes() for _ in range(steps) for row in stream.batch(6, weights)]


def test_MID_1_MID_2_stopping_and_going_on_reads_the_same_rows_across_epochs(encoder: Encoder, tmp_path: Path) -> None:
    domains = shards(encoder, tmp_path / "shards").domains
    weights = {"python": 0.8, "transcript": 0.2}
    whole = Stream(domains, seed=3)
    rows = drawn(whole, 30, weights)
    assert whole.epochs["python"] > 2 and whole.epochs["transcript"] > 2
    for stop in (1, 7, 13, 29):
        first = Stream(domains, seed=3)
        before = drawn(first, stop, weights)
        second = Stream(domains, seed=3)
        second.restore(json.loads(json.dumps(first.state())))
        assert before + drawn(second, 30 - stop, weights) == rows
    assert drawn(Stream(domains, seed=4), 30, weights) != rows


def test_MID_3_MID_4_any_number_of_ranks_reads_the_same_documents_each_once(encoder: Encoder, tmp_path: Path) -> None:
    domains = shards(encoder, tmp_path / "shards").domains
    for world in (1, 2, 3, 6):
        streams = [Stream(domains, seed=0) for _ in range(world)]
        dealt = [
            [row.ids.tobytes() for row in stream.batch(6, {"python": 1})[rank::world]]
            for rank, stream in enumerate(streams)
        ]
        together = sorted(one for part in dealt for one in part)
        assert together == sorted(drawn(Stream(domains, seed=0), 1, {"python": 1}))
    rows = len(domains["python"])
    epoch = [row.ids.tobytes() for row in Stream(domains, seed=0).batch(rows, {"python": 1})]
    assert sorted(epoch) == sorted(domains["python"].row(number).ids.tobytes() for number in range(rows))


def test_the_mixture_is_kept_to_within_one_row_and_annealed() -> None:
    shares = annealed({"a": 3, "b": 1}, {"b": 1}, 0.5)
    assert shares == {"a": 0.375, "b": 0.625}
    with pytest.raises(ValueError, match="sum to more than 0"):
        normalised({"a": 0.0}, {"a": 1})
    with pytest.raises(ValueError, match="mixture names c; the shards have a"):
        normalised({"c": 1.0}, {"a": 1})


def test_a_tokenizer_without_control_tokens_is_refused_by_name(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    Tokenizer(models.BPE()).save(str(path))
    with pytest.raises(ValueError, match=r"lacks control tokens for prefix \(<\|fim_prefix\|>"):
        Encoder(path).marks()
    path.write_text("{}")
    with pytest.raises(ValueError, match="is no tokenizer"):
        Encoder(path)


def test_shards_that_are_not_complete_are_refused(encoder: Encoder, tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no complete shards"):
        Shards.open(tmp_path)
    with pytest.raises(ValueError, match="no document"):
        write(iter(()), encoder, 16, tmp_path / "none")
    assert np.uint16(encoder.size) == encoder.size
