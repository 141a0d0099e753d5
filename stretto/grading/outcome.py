"""How a rollout ended, decided in one place and from outside the policy's reach.

| ending of the play | grade | outcome |
|---|---|---|
| submitted | the grader's | the grade's: `scored`, or `fault`, `void`, `infra` |
| turns, tokens, time | – | `truncated` |
| gave up | – | `scored`, unsolved: an honest "can't be done" is worth as much as an honest failure |
| fault | – | `fault` |
| infra | – | `infra`, the only one that leaves the batch |
"""

from __future__ import annotations

from dataclasses import dataclass, field

from stretto.harness.ending import Ending
from stretto.records import Outcome


@dataclass(frozen=True)
class Grade:
    """What a submission was worth. `reason` is for people; it may tell hidden inputs, so no policy sees it."""

    solved: bool
    outcome: Outcome
    passed: int  # hidden calls that agree with the oracle, or required tests that passed
    total: int
    reason: str = ""
    detected: list[str] = field(default_factory=list)  # names of detectors that fired, whatever they did to the outcome


UNGRADED = {
    Ending.TURNS: (Outcome.TRUNCATED, "the turn limit was reached"),
    Ending.TOKENS: (Outcome.TRUNCATED, "the token budget was used up"),
    Ending.TIME: (Outcome.TRUNCATED, "the tools ran for too long"),
    Ending.GAVE_UP: (Outcome.SCORED, "the policy gave up"),
    Ending.FAULT: (Outcome.FAULT, "the policy broke its own rollout"),
    Ending.INFRA: (Outcome.INFRA, "a part of ours failed"),
}


def settle(ending: Ending | str, grade: Grade | None = None, reason: str = "") -> Grade:
    """The rollout's final grade. Raises ValueError for a submission without a grade or a grade without submission."""
    ending = Ending(ending)
    if (ending is Ending.SUBMITTED) != (grade is not None):
        raise ValueError(f"a rollout that ended by {ending} {'needs a' if grade is None else 'has no'} grade")
    if grade is not None:
        return grade
    outcome, usual = UNGRADED[ending]
    return Grade(solved=False, outcome=outcome, passed=0, total=0, reason=reason or usual)
