"""Long output keeps its two ends, says exactly how much is missing, and never grows beyond what was asked for."""

from __future__ import annotations

import re

from hypothesis import given
from hypothesis import strategies as st

from stretto.sandbox.output import Kept, cut

LINE = re.compile(rb"\n\[\.\.\. (\d+) bytes left out \.\.\.\]\n")


@given(st.integers(0, 3000), st.integers(0, 1500))
def test_cut(size: int, keep: int):
    data = bytes(index * 7 % 251 for index in range(size))
    shown = cut(data, keep)
    assert len(shown) <= keep or shown == data
    if size <= keep:
        assert shown == data
    elif keep >= 256:
        head, missing, tail = LINE.split(shown)
        assert data.startswith(head) and data.endswith(tail) and len(head) + len(tail) + int(missing) == size
        assert abs(len(head) - len(tail)) <= 50


@given(st.lists(st.binary(max_size=400), max_size=8), st.integers(256, 900))
def test_a_stream_is_cut_as_a_whole_would_be(pieces: list[bytes], keep: int):
    kept = Kept(keep)
    for piece in pieces:
        kept.add(piece)
    whole = b"".join(pieces)
    assert kept.take() == (cut(whole, keep), len(whole) > keep)
    assert kept.take() == (b"", False)
