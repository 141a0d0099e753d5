"""What carries tools out, by the name that a declaration's `does` gives. Each takes a workspace and the tool's fields,
answers with an observation, and refuses with a sentence (`Refused`, `BoxError`)."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from stretto.harness.toolbox import files, lines, search, talk, terminal

Implementation = Callable[..., Awaitable[str]]

IMPLEMENTATIONS: dict[str, Implementation] = {
    "read_whole": lines.read_whole,
    "edit_line": lines.edit_line,
    "run_tests": lines.run_tests,
    "read_file": files.read_file,
    "edit_file": files.edit_file,
    "list_dir": files.list_dir,
    "glob": search.glob,
    "grep": search.grep,
    "search_code": search.search_code,
    "run": terminal.run,
    "todo": talk.todo,
    "ask_user": talk.ask_user,
    "submit": talk.submit,
    "give_up": talk.give_up,
}
