"""Pins: the declared sets, nano to the last token, what a [tools] table may do, sentences for mistakes."""

from __future__ import annotations

import hashlib
from pathlib import Path

import msgspec
import pytest

from stretto.harness.chat import tool_prompt
from stretto.harness.declare import load, of, override
from stretto.harness.toolset import ToolSet, ToolSetError
from stretto.records import Task

TASK = Task(id="t/1", split="train", instruction="", files={}, grading={})
ALL = "read_file edit_file list_dir glob grep search_code run todo ask_user submit give_up".split()


def test_nano_is_what_the_shipped_model_was_trained_on() -> None:
    digest = hashlib.sha256(tool_prompt(load("nano").schemas).encode()).hexdigest()
    assert digest == "b47f4999c3c871e7ab141e12a8d2522e5e3b3159aabef682c40739f2a3737dab"
    assert load("nano").limits.observation == 2000


def test_code_has_all_tools_and_says_what_each_field_means() -> None:
    code = load("code")
    assert list(code.tools) == ALL
    for tool in code.tools.values():
        assert tool.description and tool.schema["function"]["name"] == tool.key
        for parameter in tool.parameters.values():
            assert "optional" not in parameter.schema and parameter.schema["type"]
    required = {tool.key: tool.schema["function"]["parameters"]["required"] for tool in code.tools.values()}
    assert required["grep"] == ["pattern"] and required["edit_file"] == ["path"] and required["submit"] == []


def test_which_set_a_task_gets() -> None:
    assert of(TASK).name == "nano"
    assert of(msgspec.structs.replace(TASK, mode="pytest")).name == "code"
    assert of(msgspec.structs.replace(TASK, environment="/srv/tree")).name == "code"
    assert of(msgspec.structs.replace(TASK, tools={"without": ["run"]})).name == "code"
    assert of(msgspec.structs.replace(TASK, tools={"set": "nano"}), "code").name == "nano"
    assert of(TASK, "code").name == "code"


def test_the_hash_tells_whatever_the_policy_could_notice() -> None:
    code = load("code")
    versions = {code.version, load("nano").version}
    for table in (
        {"without": ["grep"]},
        {"grep": {"name": "search"}},
        {"grep": {"fields": {"pattern": "regex"}}},
        {"grep": {"description": "Search."}},
        {"limits": {"matches": 5}},
    ):
        versions.add(override(code, table).version)
    assert len(versions) == 7
    assert override(code, {}).version == code.version == override(code, {"user": ["yes"]}).version


def test_a_table_renames_and_chooses() -> None:
    table = {
        "only": ["read_file", "run", "submit"],
        "read_file": {"name": "open-file", "fields": {"path": "file"}, "description": "Open a file."},
        "limits": {"lines": 7, "seconds": 5},
        "user": "yes",
    }
    changed = override(load("code"), table)
    assert list(changed.tools) == ["open-file", "run", "submit"] and changed.user == ("yes",)
    assert (changed.limits.lines, changed.limits.seconds, changed.limits.matches) == (7, 5, 100)
    tool = changed.tools["open-file"]
    assert list(tool.schema["function"]["parameters"]["properties"]) == ["file", "start", "lines"]
    assert tool.arguments({"file": "a.py"}) == {"path": "a.py"} and tool.key == "read_file"


@pytest.mark.parametrize(
    ("table", "sentence"),
    [
        ({"set": "cdoe"}, "no tool set is named 'cdoe'"),
        ({"set": 3}, "must be the name of a set"),
        ({"set": "gone.toml"}, "cannot read gone.toml"),
        ({"olny": ["run"]}, "knows no 'olny'; did you mean only"),
        ({"only": ["rnu"]}, "only knows no 'rnu'; did you mean run"),
        ({"only": []}, "no tool is left"),
        ({"only": "run"}, "must be a list"),
        ({"run": {"name": "grep"}}, "two tools are named 'grep'"),
        ({"run": {"name": "a b"}}, "is no name"),
        ({"run": {"fields": {"cmd": "x"}}}, "knows no 'cmd'; did you mean command"),
        ({"run": {"fields": {"command": "seconds"}}}, "two fields have the same name"),
        ({"run": "fast"}, "must be a table"),
        ({"limits": {"lines": -1}}, "limits.lines = -1"),
        ({"limits": {"cut": "tail"}}, "must be head or middle"),
        ({"limits": {"line": 1}}, "knows no 'line'; did you mean lines"),
        ({"user": [1]}, "user must be a text"),
    ],
)
def test_mistakes_in_a_table_are_sentences_that_name_the_task(table: dict, sentence: str) -> None:
    with pytest.raises(ToolSetError, match=r"tools of task t/1: ") as error:
        of(msgspec.structs.replace(TASK, tools=table))
    assert sentence in str(error.value)


def test_your_own_set_may_hold_commands(tmp_path: Path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[tools.lint]\ncommand = "python3 -m compileall -q ."\ndescription = "Compile all."\n'
        '[tools.hand_in]\ndoes = "submit"\ndescription = "Done."\n'
    )
    mine = load(str(path))
    assert mine.version.startswith("mine-") and mine.tools["lint"].does == "command"
    for text, sentence in (
        ("x = 1", "knows no 'x'"),
        ("[tools.a]\ndescription = 'x'", "nothing carries out 'a'"),
        ("[tools.submit]", "needs a description"),
        ("[tools.submit]\ndescription = 'x'\nparameters.a = { type = 'text' }", "needs type = one of string"),
        ("", r"has no \[tools.NAME\]"),
        ("a = [", "not valid TOML"),
    ):
        broken = tmp_path / f"{abs(hash(text))}.toml"
        broken.write_text(text)
        with pytest.raises(ToolSetError, match=sentence):
            load(str(broken))


READ = [
    ({"path": "a"}, {"path": "a"}),
    ({"path": "a", "start": 3}, {"path": "a", "start": 3}),
    ({}, "read_file needs path"),
    ({"path": 3}, "path must be of type string"),
    ({"path": "a", "start": 0}, "start must be at least 1"),
    ({"path": "a", "start": True}, "start must be of type integer"),
    ({"path": "a", "start": 3.0}, "start must be of type integer"),
    ({"path": "a", "mode": "r"}, "read_file takes no 'mode'"),
]


@pytest.mark.parametrize(("given", "expected"), READ)
def test_arguments_are_read_by_the_schema(given: dict, expected) -> None:
    tool = load("code").tools["read_file"]
    if isinstance(expected, dict):
        assert tool.arguments(given) == expected
    else:
        with pytest.raises(ValueError, match=expected):
            tool.arguments(given)


def test_text_arguments_are_read_by_their_declared_type() -> None:
    code = load("code")
    given = {"pattern": "12", "ignore_case": "True", "context": " 2 "}
    assert code.tools["grep"].arguments(given, spelled=True) == {"pattern": "12", "ignore_case": True, "context": 2}
    items = '[{"text": "a", "status": "open"}]'
    assert code.tools["todo"].arguments({"items": items}, spelled=True)["items"][0]["status"] == "open"
    for bad in ("x", "1.5", "[", ""):
        with pytest.raises(ValueError, match="context must be of type integer"):
            code.tools["grep"].arguments({"pattern": "x", "context": bad}, spelled=True)
    with pytest.raises(ValueError, match="status in an item of items must be one of open, doing, done"):
        code.tools["todo"].arguments({"items": [{"text": "a", "status": "later"}]})


def test_sets_are_values(tmp_path: Path) -> None:
    assert isinstance(load("code"), ToolSet) and load("code") is load("code")
