"""Why a rollout stopped. What that means for its grade is decided in `grading/outcome.py`."""

from __future__ import annotations

import enum


class Ending(enum.StrEnum):
    SUBMITTED = "submitted"
    TURNS = "turns"  # the turn limit
    TOKENS = "tokens"  # the token budget
    TIME = "time"  # the policy's tools used up their share of the lease
    GAVE_UP = "gave_up"  # the policy said that the task can't be done
    FAULT = "fault"  # calls that can't be carried out, again and again; a workspace that can't be collected
    INFRA = "infra"  # our engine, our box, our lease
