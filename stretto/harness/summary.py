"""Self-summary: a policy whose context fills up writes down what it must remember, and goes on in a new segment.

    segment 0   prompt | turn | result | … | result, ASK | summary
    segment 1   prompt with the summary and the plan     | turn | …

The summary is the policy's own turn, sampled and trained on like any other: all segments of a rollout share its reward,
so that it learns what is worth keeping (Composer 2's report; Cursor, "Training Composer for longer horizons").
"""

from __future__ import annotations

from collections.abc import Sequence

from stretto.harness.effort import THINKING

ASK = (
    "Your context is nearly full and will be cleared. Write down all you need to finish the task: what you have found, "
    "what you have changed, what remains to be done and how. Call no tool in this message."
)
NO_ROOM = "[left out: your context has no room for it; ask for it again afterwards]"
"""In place of results that would leave no room for the summary."""


def again(instruction: str, said: str, plan: Sequence[dict[str, str]], count: int) -> str:
    """The first message of the segment after the `count`-th summary. `said` is the turn that holds it: what was thought
    aloud is left out. `plan` are the steps of the last todo."""
    summary = THINKING.sub("", said).strip() or "(nothing)"
    parts = [instruction, f"# What you wrote down before your context was cleared ({count})\n\n{summary}"]
    if plan:
        steps = "\n".join(f"- {step['text']} ({step['status']})" for step in plan)
        parts.append(f"# Your plan\n\n{steps}")
    return "\n\n".join([*parts, "Go on from there."])
