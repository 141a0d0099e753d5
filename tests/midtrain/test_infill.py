"""Lines taken out of held-out files: which, how they are shown to the model, and what counts as the same."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch

from stretto.midtrain import infill, tokenizer
from stretto.midtrain.complete import frozen, greedy
from stretto.midtrain.corpus.document import Document
from stretto.midtrain.corpus.read import held_out
from stretto.midtrain.tokens.marks import Encoder
from stretto.model import checkpoint
from stretto.model.attention import PackedCausal
from stretto.model.spec import load_spec
from stretto.model.transformer import Transformer
from stretto.watch.statistics import wilson

HERE = Path(__file__).parent


@pytest.fixture(scope="module")
def encoder(tmp_path_factory: pytest.TempPathFactory) -> Encoder:
    folder = tmp_path_factory.mktemp("tokenizer")
    tokenizer.train_for_code(iter([path.read_text() for path in sorted(HERE.glob("*.py"))]), 1024, folder)
    return Encoder(folder)


def network() -> Transformer:
    folder = Path(str(checkpoint.__file__)).parents[1] / "assets" / "nano"
    return checkpoint.random_init(load_spec(folder), 0)


def document(text: str, path: str = "a.py") -> Document:
    return Document(source="s", repository="r", path=path, text=text, language="python")


def test_a_span_is_whole_lines_that_say_something_and_the_file_can_be_put_together_again() -> None:
    text = Path(__file__).read_text()
    rng = random.Random(1)
    for _ in range(200):
        span = infill.cut(document(text), rng)
        assert span is not None and span.before + span.middle + span.after == text
        assert (span.before == "" or span.before.endswith("\n")) and span.after.startswith("\n")
        assert span.middle.count("\n") == span.lines - 1 and 1 <= span.lines <= infill.LONGEST
        assert sum(character.isalnum() for character in span.middle) >= infill.MEANT
    assert infill.cut(document("{\n}\n\n)\n"), rng) is None


def test_the_same_folder_asks_the_same_and_at_most_count_of_each_language() -> None:
    files = [document(path.read_text(), path.name) for path in sorted(HERE.glob("*.py"))]
    assert infill.spans(files, count=5) == infill.spans(files, count=5) != infill.spans(files, count=5, seed=1)
    assert len(infill.spans(files, count=5)) == 5
    found = infill.spans(held_out(HERE))
    assert {span.language for span in found} == {"python"} and len(found) == len(list(HERE.rglob("*.py")))


def test_a_prompt_keeps_what_is_nearest_to_the_span(encoder: Encoder) -> None:
    marks = encoder.marks(repositories=False)
    before, after = list(range(1000, 1900)), list(range(2000, 2900))
    ids = infill.prompt(before, after, marks, 303)
    at = ids.index(marks.suffix)
    assert len(ids) == 303 and ids[0] == marks.prefix and ids[-1] == marks.middle
    assert ids[1:at] == before[-200:] and ids[at + 1 : -1] == after[:100]
    short = infill.prompt(before[:4], after, marks, 303)
    assert short.index(marks.suffix) == 5 and len(short) == 303, "what the one side does not need, the other has"
    assert infill.prompt([], [], marks, 303) == [marks.prefix, marks.suffix, marks.middle]


def test_a_model_that_has_learnt_a_file_by_heart_writes_its_lines_back_and_a_random_one_does_not(
    encoder: Encoder,
) -> None:
    asked = infill.spans([document("alpha = 1\nbravo = 2\ncharlie = 3\ndelta = 4\n" * 2)], seed=3)
    marks = encoder.marks(repositories=False)
    model = network()
    random_one = infill.exact_match(frozen(model), encoder, marks, asked)
    assert random_one["all"].match == 0.0 and random_one["all"].spans == 1
    before, middle, after = encoder.encode([asked[0].before, asked[0].middle, asked[0].after])
    prompt = infill.prompt(before, after, marks, infill.CONTEXT)
    ids_T = torch.tensor([*prompt, *middle, encoder.end])
    adam = torch.optim.Adam(model.parameters(), lr=3e-3)
    for _ in range(40):
        hidden_TD = model(ids_T, torch.arange(len(ids_T)), PackedCausal([len(ids_T)])).hidden_TD
        logits_NV = model.logits(hidden_TD[len(prompt) - 1 : -1])
        torch.nn.functional.cross_entropy(logits_NV, ids_T[len(prompt) :]).backward()
        adam.step()
        adam.zero_grad()
    found = infill.exact_match(frozen(model), encoder, marks, asked)
    assert found["python"] == found["all"] and found["all"].match == 1.0
    assert all(parameter.requires_grad for parameter in model.parameters()), "the one in training was left alone"


def test_greedy_is_the_argmax_of_the_definition_and_ends_at_a_stop_token() -> None:
    model = network()
    prompts, limits = [[1, 2, 3], list(range(40, 90))], [6, 3]
    answers = greedy(frozen(model), prompts, limits, stop=())
    for prompt, limit, answer in zip(prompts, limits, answers, strict=True):
        ids = list(prompt)
        for _ in range(limit):
            with torch.no_grad():
                out = model(torch.tensor(ids), torch.arange(len(ids)), PackedCausal([len(ids)]))
                ids.append(int(model.logits(out.hidden_TD[-1:]).argmax()))
        assert answer == ids[len(prompt) :]
    stopped = greedy(frozen(model), prompts[:1], [6], stop={answers[0][0]})
    assert stopped == [[]]


def test_blank_space_at_line_ends_does_not_count_and_other_blank_space_does() -> None:
    assert infill._same("    x = 1  \n\n", "    x = 1") and infill._same("a\t\nb", "a\nb")
    assert not infill._same("  x = 1", "    x = 1") and not infill._same("a\n\nb", "a\nb")


def test_a_wilson_interval_is_inside_0_and_1_and_as_published() -> None:
    assert wilson(0, 10) == pytest.approx((0.0, 0.2775), abs=1e-3)
    assert wilson(8, 10) == pytest.approx((0.4902, 0.9433), abs=1e-3)
    with pytest.raises(ValueError, match="needs tries"):
        wilson(0, 0)


def test_a_tokenizer_without_the_tokens_and_a_folder_that_is_none_are_refused() -> None:
    folder = Path(str(checkpoint.__file__)).parents[1] / "assets" / "nano"
    with pytest.raises(ValueError, match="lacks control tokens for prefix"):
        Encoder(folder).marks(repositories=False)
    with pytest.raises(ValueError, match="is no folder"):
        list(held_out(HERE / "nowhere"))
