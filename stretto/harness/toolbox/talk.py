"""What goes to people rather than to the workspace: the plan, a question, handing in, giving up."""

from __future__ import annotations

from stretto.harness.toolbox.workspace import Refused, Workspace

NO_USER = "no user is available; decide yourself"
_MARKS = {"open": "[ ]", "doing": "[>]", "done": "[x]"}


async def todo(workspace: Workspace, items: list[dict[str, str]]) -> str:
    workspace.todos = items
    return "\n".join(f"{_MARKS[item['status']]} {item['text']}" for item in items) or "the plan is empty"


async def ask_user(workspace: Workspace, question: str) -> str:
    """The next declared answer; the last one stands for good."""
    if not question.strip():
        raise Refused("the question is empty")
    workspace.questions += 1
    if workspace.questions > workspace.limits.questions:
        raise Refused(f"the user answers {workspace.limits.questions} questions, and no more")
    if not workspace.user:
        return NO_USER
    return workspace.user[min(workspace.questions, len(workspace.user)) - 1]


async def submit(workspace: Workspace) -> str:
    return "submitted"


async def give_up(workspace: Workspace, reason: str) -> str:
    return "ended without handing in"
