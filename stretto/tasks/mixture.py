"""Several sources in given proportions, and hard or easy tasks less often.

    [[source]]                      # tasks.source = "mix.toml"
    path = "mutate"                 # a folder of tasks, relative to this file
    weight = 2.0
    [[source]]
    path = "codeio"
    [difficulty]
    rates = "rates.json"            # task id -> share of attempts that solved it, as measured before
    low = 0.05
    high = 0.95
    outside = 0.1                   # how often a task beyond low or high comes, against once per epoch

Which task an ordinal means depends on nothing but the run's seed and its tasks, each of which carries source, weight
and chance in its metadata (`asked`): sources take turns in a fixed pattern, and each goes through its own epochs. Rates
are read once, when a run begins, so that a resumed run asks what it would have asked.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from bisect import bisect_right
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from stretto.records import Task
from stretto.tasks.folder import TaskError

ASKED = "asked"
CYCLE = 1000
"""Length of the pattern in which sources take turns: a weight is kept to a thousandth."""
EMPTY_EPOCHS = 1000


class Source(msgspec.Struct, frozen=True, kw_only=True):
    name: str
    weight: float
    chances: dict[str, float]  # task id -> how likely an epoch has it


class Mixture(msgspec.Struct, frozen=True, kw_only=True):
    """What tasks say of their sources."""

    sources: list[Source]

    @staticmethod
    def of(tasks: Iterable[Task]) -> Mixture | None:
        """None when the tasks are no mixture, and all asked equally often. Raises ValueError when only some are."""
        tasks = sorted(tasks, key=lambda task: task.id)
        marks: list[Any] = [task.metadata.get(ASKED) for task in tasks]
        if not any(marks):
            return None
        found: dict[str, Source] = {}
        try:
            for task, mark in zip(tasks, marks, strict=True):
                name, weight, chance = str(mark["source"]), float(mark["weight"]), float(mark["chance"])
                source = found.setdefault(name, Source(name=name, weight=weight, chances={}))
                source.chances[task.id] = chance
        except (TypeError, KeyError) as error:
            raise ValueError("some tasks are of a mixture and others are not: lay the run's tasks anew") from error
        return Mixture(sources=[found[name] for name in sorted(found)])


@dataclass
class Order:
    """Ordinals to task ids. Pure: equal for equal seed and mixture, whatever was asked before."""

    seed: int
    mixture: Mixture
    _epochs: list[list[list[str]]] = field(default_factory=list)
    _ends: list[list[int]] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._pattern = pattern([source.weight for source in self.mixture.sources])
        self._places = [[at for at, turn in enumerate(self._pattern) if turn == n] for n in range(len(self))]
        self._epochs = [[] for _ in range(len(self))]
        self._ends = [[0] for _ in range(len(self))]

    def __len__(self) -> int:
        return len(self.mixture.sources)

    def task(self, ordinal: int) -> str:
        cycle, place = divmod(ordinal, len(self._pattern))
        source = self._pattern[place]
        before = bisect_right(self._places[source], place - 1)
        return self._nth(source, cycle * len(self._places[source]) + before)

    def _nth(self, source: int, number: int) -> str:
        """The task that a source gives when it is its turn for the `number`-th time, from 0."""
        epochs, ends = self._epochs[source], self._ends[source]
        while ends[-1] <= number:
            epochs.append(self.epoch(source, len(epochs)))
            ends.append(ends[-1] + len(epochs[-1]))
            if len(epochs) > EMPTY_EPOCHS and ends[-1] == 0:
                raise TaskError(
                    f"no task of {self.mixture.sources[source].name} is ever asked: raise difficulty.outside"
                )
        at = bisect_right(ends, number) - 1
        return epochs[at][number - ends[at]]

    def epoch(self, source: int, number: int) -> list[str]:
        """Ids of one epoch of a source, in order."""
        of = self.mixture.sources[source]
        chosen = [id for id, chance in of.chances.items() if draw(self.seed, "chance", of.name, number, id) < chance]
        return sorted(chosen, key=lambda id: (draw(self.seed, "order", of.name, number, id), id))


def draw(*of: object) -> float:
    """A number in [0, 1) that depends on nothing but what it is drawn of."""
    return int.from_bytes(hashlib.blake2b(repr(of).encode(), digest_size=7).digest()) / 2**56


def pattern(weights: list[float]) -> list[int]:
    """Who takes the turn at each place of a cycle: evenly spread, each as often as its weight says, at least once."""
    total = sum(weights)
    counts = [max(1, round(CYCLE * weight / total)) for weight in weights]
    turns = [((place + 0.5) / count, n) for n, count in enumerate(counts) for place in range(count)]
    return [n for _, n in sorted(turns)]


def chance(rate: float | None, low: float, high: float, outside: float) -> float:
    """How likely an epoch has a task with this measured solve rate; None: never measured."""
    return 1.0 if rate is None or low <= rate <= high else outside


@dataclass(frozen=True)
class Recipe:
    """A mixture's TOML file."""

    path: Path
    sources: dict[str, float]  # folder, as the file names it -> weight
    rates: dict[str, float]
    low: float
    high: float
    outside: float

    def marked(self, task: Task, source: str) -> Task:
        """The task with what a run has to know of its source."""
        often = chance(self.rates.get(task.id), self.low, self.high, self.outside)
        asked = {"source": source, "weight": self.sources[source], "chance": often}
        return msgspec.structs.replace(task, metadata={**task.metadata, ASKED: asked})

    def folder(self, source: str) -> Path:
        return self.path.parent / source


def read_recipe(path: Path) -> Recipe:
    """Raises TaskError with a sentence that names the file and what is wrong in it."""
    try:
        toml: dict[str, Any] = tomllib.loads(path.read_text())
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise TaskError(f"{path} cannot be read: {error}") from error
    if unknown := set(toml) - {"source", "difficulty"}:
        raise TaskError(f"{path}: unknown key {min(unknown)}; a mixture has [[source]] and [difficulty]")
    listed = toml.get("source")
    if not isinstance(listed, list) or not listed:
        raise TaskError(f"{path} names no [[source]]: a mixture needs at least one, with its path")
    sources = [_source(path, entry) for entry in listed]
    names = [name for name, _ in sources]
    if twice := sorted({name for name in names if names.count(name) > 1}):
        raise TaskError(f"{path} names the source {twice[0]} twice; give it one weight")
    table = toml.get("difficulty", {})
    numbers = {"low": 0.0, "high": 1.0, "outside": 0.0}
    if not isinstance(table, dict) or (unknown := set(table) - {"rates", *numbers}):
        raise TaskError(f"{path}: [difficulty] has rates, low, high and outside")
    for key in numbers:
        value = table.get(key, numbers[key])
        if isinstance(value, bool) or not isinstance(value, int | float) or not 0 <= value <= 1:
            raise TaskError(f"{path}: difficulty.{key} is {value!r}; it lies between 0 and 1")
        numbers[key] = float(value)
    return Recipe(path, dict(sources), _rates(path, table.get("rates")), **numbers)


def _source(path: Path, entry: object) -> tuple[str, float]:
    if not isinstance(entry, dict) or not isinstance(entry.get("path"), str) or set(entry) - {"path", "weight"}:
        raise TaskError(f"{path}: a [[source]] has a path, as text, and perhaps a weight")
    weight = entry.get("weight", 1.0)
    if isinstance(weight, bool) or not isinstance(weight, int | float) or not 0 < weight < 1e6:
        raise TaskError(f"{path}: the weight of {entry['path']} is {weight!r}; it is a positive number")
    return entry["path"], float(weight)


def _rates(path: Path, name: object) -> dict[str, float]:
    if name is None:
        return {}
    try:
        rates = json.loads((path.parent / str(name)).read_text())
        return {str(id): float(rate) for id, rate in rates.items()}
    except (OSError, ValueError, AttributeError, TypeError) as error:
        raise TaskError(f"{path}: rates {name} cannot be read as a table of task ids and numbers: {error}") from error
