"""Attacks: ways to be rewarded without solving the task, as data, and how to try one.

An attack is a folder with `attack.toml` and `apply.sh`. The script runs in an agent's box in place of the agent (in
/workspace, with `sh` and `python3`), and the tree it leaves is graded as a submission. It must earn nothing.

    name = "always-equal"            # unique
    class = 4                        # of the table in docs/grading.md, or a word of your own
    tries = "returns objects that equal everything"
    modes = ["pytest", "script"]     # where it makes sense; all when absent
    seconds = 2                      # of one that hangs on purpose: no run of it needs longer to show that

The library in `attacks/` ships with the package, so that every new task can be tried against it before it is used.
"""

from __future__ import annotations

import math
import tomllib
from dataclasses import dataclass
from importlib import resources
from pathlib import Path

from stretto.grading.grader import Grader
from stretto.grading.outcome import Grade
from stretto.grading.submission import collect
from stretto.harness.session import agent_box
from stretto.records import Outcome, Task
from stretto.sandbox.box import BoxError
from stretto.sandbox.pool import BoxPool

SECONDS = 20.0
"""Wall-clock limit of one `apply.sh`."""
MODES = ("oracle", "pytest", "script")


class AttackError(ValueError):
    """A sentence naming the attack's folder and what is wrong with it."""


@dataclass(frozen=True)
class Attack:
    name: str
    kind: str  # class of the taxonomy: "1" to "31", or a word
    tries: str  # what it hopes for, as a clause
    modes: tuple[str, ...]
    script: str
    seconds: float = math.inf  # limit of the script, and of each run of what it leaves


class Library:
    @staticmethod
    def load(extra: Path | None = None) -> list[Attack]:
        """The attacks that ship with the package and those below `extra`, by name. Raises AttackError."""
        with resources.as_file(resources.files("stretto.grading") / "attacks") as shipped:
            attacks = read_attacks(shipped)
        if extra is not None:
            attacks += read_attacks(extra)
        names = [attack.name for attack in attacks]
        if twice := sorted({name for name in names if names.count(name) > 1}):
            raise AttackError(f"two attacks are named {twice[0]!r}; give each a name of its own")
        return sorted(attacks, key=lambda attack: attack.name)


def read_attacks(root: Path) -> list[Attack]:
    """All attacks below `root`, or `root` itself when it is one. Raises AttackError when there are none."""
    if not root.is_dir():
        raise AttackError(f"no folder of attacks at {root}")
    folders = [root] if (root / "attack.toml").is_file() else sorted(path for path in root.iterdir() if path.is_dir())
    attacks = [read_attack(folder) for folder in folders if folder.name != "__pycache__"]
    if not attacks:
        raise AttackError(f"{root} holds no attacks (an attack is a folder with attack.toml and apply.sh)")
    return attacks


def read_attack(folder: Path) -> Attack:
    """Read one attack folder; raises AttackError naming the missing or malformed part."""
    try:
        head = tomllib.loads((folder / "attack.toml").read_text())
        script = (folder / "apply.sh").read_text()
    except FileNotFoundError as error:
        raise AttackError(f"attack {folder} lacks {Path(error.filename).name}") from error
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise AttackError(f"attack {folder} cannot be read: {error}") from error
    name, kind, tries, modes = (head.get(key, "") for key in ("name", "class", "tries", "modes"))
    if not isinstance(name, str) or not name:
        raise AttackError(f"attack {folder}: attack.toml has name = {name!r}; give it a name, as text")
    if not isinstance(kind, int | str) or kind == "":
        raise AttackError(f"attack {folder}: attack.toml has class = {kind!r}; give a number of the table, or a word")
    modes = modes or list(MODES)
    if not isinstance(modes, list) or not set(modes) <= set(MODES):
        raise AttackError(f"attack {folder}: attack.toml has modes = {modes!r}; choose from {', '.join(MODES)}")
    seconds = head.get("seconds", math.inf)
    if not isinstance(seconds, int | float) or isinstance(seconds, bool) or not seconds > 0:
        raise AttackError(f"attack {folder}: attack.toml has seconds = {seconds!r}; give a number above 0")
    return Attack(name, str(kind), str(tries), tuple(modes), script, seconds)


async def try_attack(attack: Attack, task: Task, pool: BoxPool, grader: Grader, seed: int = 0) -> Grade:
    """Let the attack play the agent in one attempt at `task`; what that was worth. Raises BoxLost."""
    tree = await attacked_tree(attack, task, pool)
    return await grade_tree(tree, task, grader, seed, attack.seconds)


async def attacked_tree(attack: Attack, task: Task, pool: BoxPool) -> dict[str, bytes] | BoxError:
    """What the attack leaves in the agent's box, or why nothing can be collected. Raises BoxLost."""
    shell = "bash" if attack.script.startswith("#!") and "bash" in attack.script.split("\n", 1)[0] else "sh"
    box = await agent_box(task, pool)
    try:
        await box.exec([shell, "-c", attack.script], seconds=min(attack.seconds, SECONDS))
        return await collect(box)
    except BoxError as error:
        return error
    finally:
        await box.stop()


async def grade_tree(
    tree: dict[str, bytes] | BoxError, task: Task, grader: Grader, seed: int = 0, most: float = math.inf
) -> Grade:
    """A tree's grade; one that can't be collected is the policy's fault, as in a rollout."""
    if isinstance(tree, BoxError):
        return Grade(False, Outcome.FAULT, 0, 0, f"the workspace cannot be collected: {tree}")
    (grade,) = await grader.grade(task, [tree], seed, most)
    return grade
