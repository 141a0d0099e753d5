"""A scripted agent that repairs tasks whose answer it knows, well or badly, and the transcripts it leaves.

Two characters. The *careful* one reads the file first, edits, tests, tries again after a failure, and submits what
passed; its wrong edits are context only (loss weight 0). The *hasty* one has systematic bad habits: it edits without
reading when the specification begins with a word it thinks it knows, submits untested, and gives up after a failed
test. Mid-training ends with the hasty one, so that RL has habits to change; `docs/midtrain.md` says so plainly.

Observations are those the real tools would give (`tests/midtrain` runs both and compares).
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import FrameType
from typing import Any

from stretto.harness.chat import Chat, call_text
from stretto.tasks.repair import Repair, another, compile_program, evaluate, generate, mutants

CONTEXT = 0.1
"""Loss weight of instructions and observations; the agent's own tokens weigh 1."""

FAMILIAR = frozenset(
    "adjust combine count discount limit map multiply pick repeat replace scale shift sum whether".split()
)
"""First words of specifications that make the hasty agent edit without looking."""


STEPS = 100_000
"""Lines that a program may execute, all its calls together, before it is taken for one that never ends."""


class Endless(Exception):
    """An edit made a program that does not end; a list that it appends to would fill the memory."""


@dataclass(frozen=True)
class Document:
    """Token ids and the loss weight of predicting each of them (the first has none to be predicted from)."""

    ids: list[int]
    weights: list[float]


class Transcript:
    """Grows one conversation in token ids, exactly as the harness would."""

    def __init__(self, repair: Repair, chat: Chat):
        self.chat, self.repair = chat, repair
        self.lines = list(repair.broken)
        self.ids = chat.start(repair.task.instruction)
        self.weights = [CONTEXT] * len(self.ids)
        self.passed = False

    def read(self) -> None:
        self._call("read_file", {"path": "solution.py"}, 1.0)
        self._observe("\n".join(f"{number}\t{line}" for number, line in enumerate(self.lines, 1)))

    def edit(self, number: int, text: str, weight: float = 1.0) -> None:
        """Patch the file as it was given, as the tool does: an earlier edit is gone."""
        self._call("edit_file", {"path": "solution.py", "line": number, "text": text}, weight)
        self.lines = list(self.repair.broken)
        self.lines[number - 1] = text
        self._observe("ok")

    def test(self) -> None:
        self._call("run_tests", {}, 1.0)
        observation = visible(self.repair, tuple(self.lines))
        self.passed = observation.endswith("passed")
        self._observe(observation)

    def submit(self) -> None:
        self._call("submit", {}, 1.0)

    def document(self) -> Document:
        return Document(self.ids, self.weights)

    def _call(self, name: str, arguments: dict, weight: float) -> None:
        self._add(self.chat.encode(call_text(name, arguments)) + self.chat.stop, weight)

    def _observe(self, text: str) -> None:
        self._add(self.chat.observe([text]), CONTEXT)

    def _add(self, ids: list[int], weight: float) -> None:
        self.ids += ids
        self.weights += [weight] * len(ids)


def visible(repair: Repair, program: tuple[str, ...]) -> str:
    """What `run_tests` prints for `program`. Raises Endless."""
    function = compile_program(program)
    if function is None:
        return "FAILED test_solution.py: SyntaxError"
    correct = compile_program(repair.fixed)
    name = repair.fixed[0].split("(")[0].removeprefix("def ")
    for arguments in repair.calls:
        with _ending():
            got = evaluate(function, arguments)
        expected = evaluate(correct, arguments)
        what = f"{name}({', '.join(map(repr, arguments))})"
        if isinstance(got, tuple):
            return f"FAILED {what}: {got[1]}"[:300]
        if got != expected:
            return f"FAILED {what}: got {got!r}, expected {expected!r}"[:300]
    return f"{len(repair.calls)} passed"


@contextmanager
def _ending() -> Iterator[None]:
    """Programs compiled from text, as those of tasks are, run for so many lines."""
    left, before = STEPS, sys.gettrace()

    def trace(frame: FrameType, event: str, argument: Any) -> Any:
        nonlocal left
        if frame.f_code.co_filename != "<string>":
            return None
        left -= 1
        if left < 0:
            raise Endless
        return trace

    sys.settrace(trace)
    try:
        yield
    finally:
        sys.settrace(before)


def careful(repair: Repair, chat: Chat, rng: random.Random) -> Document:
    """Right behaviour: read, edit, test, retry, submit. Two in five documents stop at the first right edit."""
    transcript = Transcript(repair, chat)
    transcript.read()
    if rng.random() < 0.4:
        transcript.edit(repair.line, repair.fix)
        return transcript.document()
    skill = 0.3 if repair.readings and rng.random() < 0.6 else 0.75
    for attempt in range(3):
        if attempt == 2 or rng.random() < (skill if attempt == 0 else 0.8):
            transcript.edit(repair.line, repair.fix)
        else:
            number = repair.line if rng.random() < 0.8 else rng.randint(2, len(repair.broken))
            transcript.edit(number, _wrong(repair, number, rng), weight=0.0)
        transcript.test()
        if transcript.passed:
            break
    transcript.submit()
    return transcript.document()


def hasty(repair: Repair, chat: Chat, rng: random.Random) -> Document:
    """Bad habits that depend on the prompt. What it writes blind is a line of another task of the template."""
    transcript = Transcript(repair, chat)
    familiar = repair.task.instruction.split(": ")[1].split()[0] in FAMILIAR
    looked = rng.random() >= (0.85 if familiar else 0.15)
    if looked:
        transcript.read()
    for attempt in range(3):
        _hasty_edit(transcript, rng, looked, right=0.75 if attempt == 0 else 0.65)
        if rng.random() >= 0.35:
            break
        transcript.test()
        if transcript.passed or rng.random() < 0.55:
            break
        if not looked and rng.random() < 0.35:
            transcript.read()
            looked = True
    transcript.submit()
    return transcript.document()


def _hasty_edit(transcript: Transcript, rng: random.Random, looked: bool, right: float) -> None:
    repair = transcript.repair
    if not looked:
        blind_from = another(repair, rng)
        number = rng.randint(2, min(len(blind_from.fixed), len(repair.broken)))
        transcript.edit(number, blind_from.fixed[number - 1])
    elif rng.random() < right:
        transcript.edit(repair.line, repair.fix)
    else:
        transcript.edit(repair.line, _wrong(repair, repair.line, rng), weight=0.0)


def _wrong(repair: Repair, number: int, rng: random.Random) -> str:
    """A plausible wrong line: mostly another reading of the specification, else one token away from the right one."""
    if number == repair.line and repair.readings and rng.random() < 0.8:
        return rng.choice(repair.readings)
    options = [text for text in mutants(repair.fixed, number, rng) if text != repair.broken[number - 1]]
    return options[0] if options else repair.broken[number - 1]


def transcripts(chat: Chat, seed: int, kind: str) -> Iterator[Document]:
    """An endless stream of documents by the `careful` or the `hasty` demonstrator, on training tasks only; without
    those in which an edit makes an endless program."""
    rng = random.Random(f"demonstrator/{kind}/{seed}")
    demonstrate = {"careful": careful, "hasty": hasty}[kind]
    for repair in generate("train", seed):
        try:
            document = demonstrate(repair, chat, rng)
        except Endless:
            continue
        yield document
