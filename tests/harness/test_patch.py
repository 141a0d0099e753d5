"""Pins: an edit is exact or refused, and every unified diff that difflib makes applies, wrong line numbers or not."""

from __future__ import annotations

import difflib
import re

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from stretto.harness.toolbox.patch import apply_patch, replace_text
from stretto.harness.toolbox.workspace import Refused

TEXT = "import os\n\ndef a():\n    return 1\n\ndef b():\n    return 1\n"
LINES = st.lists(st.sampled_from(["a", "b", "c", "", "  d"]), max_size=12)


@settings(max_examples=120, deadline=None)
@given(LINES, LINES)
def test_difflibs_patches_apply(old: list[str], new: list[str]) -> None:
    before, after = "".join(f"{line}\n" for line in old), "".join(f"{line}\n" for line in new)
    patch = "".join(difflib.unified_diff(before.splitlines(True), after.splitlines(True), "a", "b"))
    if before == after:
        with pytest.raises(Refused):
            apply_patch(before, patch, "x")
    else:
        assert apply_patch(before, patch, "x")[0] == after


def test_wrong_line_numbers_do_not_matter_and_the_nearest_place_counts() -> None:
    patch = "@@ -{0},2 +{0},2 @@\n-    return 1\n+    return 2\n"
    assert apply_patch(TEXT, patch.format(4), "x")[0].index("return 2") < TEXT.index("def b")
    assert apply_patch(TEXT, patch.format(40), "x")[0].index("return 2") > TEXT.index("def b")
    bare = apply_patch(TEXT, "@@\n def b():\n-    return 1\n+    return 3\n", "x")
    assert bare == (TEXT[::-1].replace("1 nruter", "3 nruter", 1)[::-1], [(6, 7)])


def test_endings_of_lines_and_files_are_kept() -> None:
    assert apply_patch("a\r\nb\r\n", "@@ -1 +1 @@\n-a\n+c\n", "x")[0] == "c\r\nb\r\n"
    assert apply_patch("a\nb", "@@ -2 +2 @@\n-b\n\\ No newline at end of file\n+c\n", "x")[0] == "a\nc"
    assert replace_text("a\r\nb\r\nc", "a\nb", "d\ne", False, "x")[0] == "d\r\ne\r\nc"


@pytest.mark.parametrize(
    ("patch", "sentence"),
    [
        ("", "no hunk"),
        ("def b(): pass", "no hunk"),
        ("@@ -1,1 +1,1 @@\n-gone\n+x", "hunk 1 does not fit"),
        ("@@ -1,1 +1,1 @@\n-import os\n+import re\n@@ -9 +9 @@\n-gone", "hunk 2 does not fit"),
        ("@@ -1,1 +1,1 @@\n*import os", "begins with '*'"),
        ("@@ -1,1 +1,1 @@\n import os", "changes nothing"),
        ("@@ -90,0 +90,1 @@\n+x", "has 7 lines"),
    ],
)
def test_other_patches_are_refused(patch: str, sentence: str) -> None:
    with pytest.raises(Refused, match=re.escape(sentence)):
        apply_patch(TEXT, patch, "x")


def test_replacing_is_exact() -> None:
    assert replace_text(TEXT, "def a():\n    return 1", "def a():\n    return 2", False, "x")[1] == [(3, 4)]
    assert replace_text(TEXT, "return 1", "return 2", True, "x") == (TEXT.replace("1", "2"), [(4, 4), (7, 7)])
    for old, sentence in (("return 1", "occurs 2 times"), ("return  1", "does not occur"), ("import os", "the same")):
        with pytest.raises(Refused, match=sentence):
            replace_text(TEXT, old, "import os", False, "x")
