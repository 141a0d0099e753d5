"""Token spans of text: every attempt of a turn is attributed to the tokens that spelled it."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.harness.chat import call_text
from stretto.harness.parse import parse
from stretto.harness.spans import Spans, token_span


def test_calls_of_a_turn_get_the_tokens_that_spell_them(chat):
    text = f"Look.\n{call_text('read_file', {'path': 'a.py'})}\n{call_text('run_tests', {})} done"
    ids = chat.encode(text)
    ends = Spans(chat).ends(ids, text)
    for attempt in parse(text):
        start, end = token_span(ends, attempt.start, attempt.end)
        covered = chat.decode(ids[start:end])
        assert text[attempt.start : attempt.end] in covered
        assert text[attempt.start : attempt.end] not in chat.decode(ids[start + 1 : end])
        assert text[attempt.start : attempt.end] not in chat.decode(ids[start : end - 1])


@pytest.mark.parametrize(
    "text", ["é<tool_call>x", "🙂🙂<tool_call>\n𝛼", "\ufffd<tool_call>\ufffd", "", "日本<tool_call>語"]
)
def test_characters_split_over_tokens_are_covered_whole(chat, text):
    ids = chat.encode(text)
    ends = Spans(chat).ends(ids, text)
    assert len(ends) == len(ids) + 1 and ends == sorted(ends) and ends[-1] == len(text)
    start = max(text.find("<tool_call>"), 0)
    first, last = token_span(ends, start, len(text))
    assert chat.decode(ids[first:last]).endswith(text[start:])


@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_ids_of_the_vocabulary_have_spans(chat, data):
    ids = data.draw(st.lists(st.integers(0, chat.vocab_size - 1), max_size=12))
    text = chat.decode(ids)
    ends = Spans(chat).ends(ids, text)
    assert len(ends) == len(ids) + 1 and ends == sorted(ends) and ends[-1] == len(text)
    first, last = token_span(ends, 0, len(text))
    assert 0 <= first <= last <= len(ids)
