"""The protocol between host and box, and the paths that may cross it."""

from __future__ import annotations

import contextlib

from hypothesis import given
from hypothesis import strategies as st

from stretto.sandbox.box import BoxError, clean
from stretto.sandbox.inside.wire import pack, unpack


@given(st.lists(st.binary(max_size=40), max_size=10))
def test_messages_come_back_as_sent(fields: list[bytes]):
    message = pack(fields)
    assert len(message) == 4 + int.from_bytes(message[:4], "big")
    assert unpack(message[4:]) == fields


@given(st.lists(st.binary(min_size=1, max_size=9), min_size=1), st.integers(1, 4))
def test_a_cut_message_is_refused_or_shorter(fields: list[bytes], cut: int):
    body = pack(fields)[4:-cut]
    with contextlib.suppress(ValueError):
        assert len(unpack(body)) < len(fields)


@given(st.text(max_size=40))
def test_no_path_leads_out(path: str):
    try:
        cleaned = clean(path)
    except BoxError:
        return
    assert not cleaned.startswith(b"/") and b".." not in cleaned.split(b"/") and b"\0" not in cleaned
