"""Pins: every attempt is reported with its span and what was wrong with it."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from stretto.harness.chat import call_text
from stretto.harness.parse import parse
from stretto.records import CallStatus


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ('{"name": "submit", "arguments": {}}', CallStatus.OK),
        ('{"arguments": {}, "name": "submit"}', CallStatus.OK),
        ('{"name": "submit"}', CallStatus.OK),
        ('{"name": "submit", "arguments": {}', CallStatus.BAD_JSON),
        ('{"arguments": {}}', CallStatus.NO_NAME),
        ('{"name": ""}', CallStatus.NO_NAME),
        ("[1]", CallStatus.NO_NAME),
        ('{"name": "submit", "arguments": [1]}', CallStatus.BAD_ARGUMENTS),
        ("[" * 100_000, CallStatus.BAD_JSON),
    ],
)
def test_ENG_10_status(body: str, status: CallStatus) -> None:
    (attempt,) = parse(f"thinking <tool_call>\n{body}\n</tool_call> more")
    assert attempt.status is status
    assert (attempt.error == "") == (status is CallStatus.OK)


def test_ENG_10_spans_and_unclosed() -> None:
    first, last = call_text("submit", {}), '<tool_call>\n{"name": "submit"'
    text = f"a{first}b<tool_call>x{first}{last}"
    attempts = parse(text)
    statuses = [CallStatus.OK, CallStatus.UNCLOSED, CallStatus.OK, CallStatus.UNCLOSED]
    assert [a.status for a in attempts] == statuses
    assert [text[a.start : a.end] for a in attempts] == [first, "<tool_call>x", first, last]


@given(st.text())
def test_never_raises(text: str) -> None:
    assert len(parse(text)) == text.count("<tool_call>")
