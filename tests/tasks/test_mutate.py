"""Pins: bugs come from many operators, are confirmed by tests in boxes, and make tasks that only the fix solves."""

from __future__ import annotations

import ast
import io
import json
import tarfile
from pathlib import Path

import pytest

from stretto.grading.submission import reference_tree
from stretto.sandbox.pool import BoxPool
from stretto.tasks import folder
from stretto.tasks.admission import Checker
from stretto.tasks.factories.edits import Source, apply, functions, with_body
from stretto.tasks.factories.mutate import Mutator
from stretto.tasks.factories.operators import OPERATORS, edits
from stretto.tasks.factories.package import SourceError, open_package
from stretto.tasks.factories.prune import without

EVERYTHING = '''
def f(xs, n=1, *, deep=False):
    """Stays."""
    total = -n  # a comment
    for i, x in enumerate(xs, start=1):
        if not deep and x > n or x is None:
            continue
        if x % 2 == 0:
            return x
        total += x * i
        xs[i - n : n + 1].append(max(total, n))
        try:
            total = total if deep else g(total, n)
        except KeyError:
            break
    print(total, sep=",", end="")
    return True
'''


def test_there_are_at_least_twelve_operators_and_each_finds_its_place() -> None:
    source = Source(EVERYTHING.encode())
    (function,) = [node for _, node in functions(source.tree)]
    found = edits(source, function)
    assert {edit.operator for edit in found} == set(OPERATORS) and len(OPERATORS) >= 12
    for edit in found:
        edited = apply(source.data, [edit])
        assert ast.dump(ast.parse(edited)) != ast.dump(source.tree)
        assert b"# a comment" in edited and b'"""Stays."""' in edited and edited.startswith(b"\ndef f(xs, n=1,")


def test_several_edits_are_made_at_once_and_overlapping_ones_refused() -> None:
    source = Source(b"def f(a, b):\n    return a + b - 1\n")
    (function,) = [node for _, node in functions(source.tree)]
    plus, number = (next(e for e in edits(source, function) if e.text == text) for text in (" - ", "2"))
    assert apply(source.data, [number, plus]) == b"def f(a, b):\n    return a - b - 2\n"
    with pytest.raises(ValueError, match="overlap"):
        apply(source.data, [number, with_body(source, function, "pass")])


def test_tests_are_cut_by_name_and_the_rest_is_untouched() -> None:
    text = (
        "import x\n\n\n@mark\ndef test_a():  # first\n    pass\n\n\nclass TestB:\n    def test_c(self):\n        pass\n"
        "\n    y = 1\n\n\nclass TestD:\n    def test_e(self):\n        pass\n"
    )
    cut = without(text, ["t.py::test_a[1-[x]]", "t.py::TestD::test_e", "t.py::TestZ::test_c"])
    assert "test_a" not in cut and "test_e" not in cut and "    def test_c(self):" in cut
    ast.parse(cut)


async def test_HCK_6_tasks_of_a_package_are_solved_by_the_fix_alone(shop: Path, tmp_path: Path, pool: BoxPool) -> None:
    package = open_package(shop, tmp_path / "scratch")
    assert (package.name, package.version, package.license, package.module) == ("shop", "1.0", "MIT", "shop")
    mutator = Mutator(package, pool, 0, [])
    assert "6 tests of use, 1 left out, 2 functions" in await mutator.survey()
    made = [task async for task in mutator.tasks(6)]
    assert len(made) >= 4 and len({task.id for task in made}) == len(made)
    assert any(len(task.metadata["operators"]) > 1 for task in made) or len(made) < 6
    for task in made:
        spec = json.loads(task.grading["tests/pytest.json"])
        names = {id.partition("::")[2].split("[")[0] for id in spec["fail_to_pass"]}
        assert names and not any(f"def {name}(" in task.files["tests/test_prices.py"] for name in names)
        assert "unused" not in str(task.metadata["functions"]) and "test_that_fails" not in str(spec)
    checker = Checker(pool, times=1)
    task = folder.read(folder.write(made[0], tmp_path / "out"))
    assert (await checker.check(task)).reason == ""  # the reference passes, what is given fails
    await checker.close()


async def test_HCK_16_deleting_what_other_tests_need_does_not_pass(shop: Path, tmp_path: Path, pool: BoxPool) -> None:
    mutator = Mutator(open_package(shop, tmp_path / "scratch"), pool, 1, [])
    await mutator.survey()
    (task,) = [task async for task in mutator.tasks(1)]
    task = folder.read(folder.write(task, tmp_path / "out"))
    assert json.loads(task.grading["tests/pytest.json"])["pass_to_pass"]
    solved = await reference_tree(task, pool)
    (place,) = task.metadata["functions"][:1]
    other = "cheapest" if place.endswith("::total") else "total"
    source = Source(solved["shop/prices.py"])
    node = next(node for name, node in functions(source.tree) if name == other)
    solved["shop/prices.py"] = apply(source.data, [with_body(source, node, "return None")])
    checker = Checker(pool, times=1)
    (grade,) = await checker.grader.grade(task, [solved], 0)
    assert not grade.solved
    await checker.close()


def archive(path: Path, members: dict[str, str], link: str = "") -> Path:
    with tarfile.open(path, "w:gz") as tar:
        for name, text in members.items():
            info = tarfile.TarInfo(name)
            info.size = len(text)
            tar.addfile(info, io.BytesIO(text.encode()))
        if link:
            info = tarfile.TarInfo(link)
            info.type, info.linkname = tarfile.SYMTYPE, "/etc"
            tar.addfile(info)
    return path


def test_archives_are_unpacked_inside_or_not_at_all(tmp_path: Path) -> None:
    good = {"p-1/p/__init__.py": "", "p-1/tests/test_p.py": "import p\n", "p-1/PKG-INFO": "Name: p\nVersion: 1\n"}
    package = open_package(archive(tmp_path / "good.tar.gz", good, link="p-1/etc"), tmp_path / "a")
    assert (package.title, package.sources, package.tests) == ("p-1", ("p/__init__.py",), ("tests/test_p.py",))
    assert not (package.root / "etc").exists()
    with pytest.raises(SourceError, match="cannot be unpacked"):
        open_package(archive(tmp_path / "evil.tar.gz", {"../evil.py": "x"}), tmp_path / "b")
    assert not (tmp_path / "evil.py").exists()
    (tmp_path / "text.tar.gz").write_text("no archive")
    with pytest.raises(SourceError, match="cannot be unpacked"):
        open_package(tmp_path / "text.tar.gz", tmp_path / "c")


@pytest.mark.parametrize(
    ("files", "said"),
    [
        ({"p/__init__.py": ""}, "has no tests"),
        ({"tests/test_a.py": ""}, "no Python package or module"),
        ({"json/__init__.py": "", "test_a.py": ""}, "standard library"),
    ],
)
def test_what_is_no_package_with_tests_is_a_sentence(tmp_path: Path, files: dict[str, str], said: str) -> None:
    for path, text in files.items():
        (tmp_path / "source" / path).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "source" / path).write_text(text)
    with pytest.raises(SourceError, match=said):
        open_package(tmp_path / "source", tmp_path / "scratch")
    with pytest.raises(SourceError, match="there is no"):
        open_package(tmp_path / "absent", tmp_path / "scratch")


async def test_a_package_whose_tests_never_pass_is_a_sentence(shop: Path, tmp_path: Path, pool: BoxPool) -> None:
    (shop / "tests" / "test_prices.py").write_text("import absent_module\n")
    mutator = Mutator(open_package(shop, tmp_path / "scratch"), pool, 0, [])
    with pytest.raises(SourceError, match="No module named 'absent_module'"):
        await mutator.survey()
