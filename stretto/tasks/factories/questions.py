"""Questions of an environment of the verifiers library: `stretto tasks make verifiers ENVIRONMENT --out DIR`.

The library (an extra: `pip install 'stretto[verifiers]'`) loads the environment by name; its dataset has rows with a
`prompt` or `question`, and an `answer`. A task asks for a module whose function returns the answer, which the oracle
compares outside the box: exact, or as a number where the answer is one. What an environment pays for besides (its own
reward functions judge a completion, not a workspace), and its tools, don't come along; rows without an answer are left
out and counted.
"""

from __future__ import annotations

import json
from collections.abc import AsyncGenerator, Callable, Iterable, Mapping
from typing import Any

from stretto.records import Task
from stretto.tasks.factories.package import SourceError

MODULE, FUNCTION = "solution", "answer"
STUB = f"def {FUNCTION}():\n    return None\n"
TOLERANCE = 1e-9
LONGEST = 2000
"""Characters of an answer that somebody could be asked to return."""


async def tasks(name: str, count: int, seed: int, say: Callable[[str], None]) -> AsyncGenerator[Task]:
    """Up to `count` tasks. Raises SourceError when the library or the environment can't be loaded."""
    left = made = 0
    for number, row in enumerate(rows(name, seed)):
        if made == count:
            break
        task = task_of(name, number, row)
        if task is None:
            left += 1
            continue
        made += 1
        yield task
    if left:
        say(f"{left} rows of {name} left out: without a question or an answer in text")


def rows(name: str, seed: int) -> Iterable[Mapping[str, Any]]:
    """The environment's training rows, shuffled by the seed."""
    try:
        import verifiers  # pyright: ignore[reportMissingImports]
    except ImportError:
        raise SourceError("the package verifiers is not installed: pip install 'stretto[verifiers]'") from None
    try:
        return verifiers.load_environment(name).get_dataset(seed=seed)
    except Exception as error:  # an environment is code of its own, and raises what it likes
        raise SourceError(f"the environment {name} cannot be loaded: {error or type(error).__name__}") from error


def task_of(name: str, number: int, row: Mapping[str, Any]) -> Task | None:
    """None for a row that asks nothing, or whose answer is no text."""
    question, answer = question_of(row), row.get("answer")
    if not question or not isinstance(answer, str) or not answer.strip() or len(answer) > LONGEST:
        return None
    value = number_of(answer.strip())
    kind = "a number" if not isinstance(value, str) else "text (a str), written exactly as asked for"
    spec: dict[str, Any] = {"module": MODULE, "function": FUNCTION, "arguments": []}
    if isinstance(value, float):
        spec["tolerance"] = TOLERANCE
    return Task(
        id=f"verifiers/{name.replace('/', '-')}/{number}",
        split="",
        instruction=f"{question}\n\nWrite {FUNCTION}() in {MODULE}.py so that it returns your final answer: {kind}.",
        files={f"{MODULE}.py": STUB},
        grading={
            "tests/oracle.json": json.dumps(spec),
            f"solution/{MODULE}.py": f"def {FUNCTION}():\n    return {value!r}\n",
        },
        metadata={"factory": "verifiers", "environment": name},
    )


def question_of(row: Mapping[str, Any]) -> str:
    """What the row asks: `question`, or the messages of `prompt`, roles left out."""
    prompt = row.get("prompt")
    if isinstance(prompt, list):
        texts = [message.get("content") for message in prompt if isinstance(message, Mapping)]
        return "\n\n".join(text.strip() for text in texts if isinstance(text, str) and text.strip())
    said = prompt or row.get("question")
    return said.strip() if isinstance(said, str) else ""


def number_of(answer: str) -> int | float | str:
    """The answer as the number it spells, thousands' commas and all, or as text."""
    plain = answer.replace(",", "") if answer.replace(",", "").lstrip("-").replace(".", "", 1).isdigit() else answer
    for kind in (int, float):
        try:
            value = kind(plain)
        except ValueError:
            continue
        return value if abs(value) < 1e300 else answer
    return answer
