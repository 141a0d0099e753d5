"""An agent that knows nothing of Stretto: it speaks to the OpenAI-compatible endpoint that its environment names, and
works in the folder it is started in. Here, with the shipped nano model, it repairs one small Python file.

This model writes its calls as text between <tool_call> tags and was trained on these four tools, so none are shown to
it; with another model, send `tools` and read `message.tool_calls` instead.
"""

import json
import os
import re
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

CALL = re.compile(r"<tool_call>(.*?)</tool_call>", re.DOTALL)


def ask(messages):
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps({"model": os.environ["OPENAI_MODEL"], "messages": messages}).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    try:
        with urllib.request.urlopen(request) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        sys.exit(error.read().decode())


def read_file(path):
    return "\n".join(f"{number}\t{line}" for number, line in enumerate(Path(path).read_text().splitlines(), 1))


def edit_file(path, line, text):
    """Replace a line of the file as it was given: a later edit takes the place of an earlier one."""
    given.setdefault(path, Path(path).read_text().splitlines())
    if not 1 <= line <= len(given[path]):
        raise ValueError(f"{path} has no line {line}")
    lines = [*given[path][: line - 1], text, *given[path][line:]]
    Path(path).write_text("\n".join(lines) + "\n")
    return "ok"


def run_tests():
    """One `assert call == value` after the other, and the first that fails."""
    done = subprocess.run(
        [sys.executable, Path(__file__).with_name("tests.py")], capture_output=True, text=True, timeout=5
    )
    return done.stdout.strip() or f"FAILED the tests died (exit code {done.returncode})"


given = {}
TOOLS = {"read_file": read_file, "edit_file": edit_file, "run_tests": run_tests}


def carry_out(text):
    """The result of one call, or None when it hands in the work."""
    try:
        call = json.loads(text)
        if call["name"] == "submit":
            return None
        return TOOLS[call["name"]](**call.get("arguments", {}))
    except Exception as error:  # whatever the model got wrong, it is told
        return f"error: {error!r}"


messages = [{"role": "user", "content": sys.stdin.read()}]
while True:
    messages.append(ask(messages))
    calls = CALL.findall(messages[-1]["content"])
    results = [carry_out(call) for call in calls] or ["error: no tool call; write <tool_call> … </tool_call>"]
    if None in results:
        break
    messages += [{"role": "tool", "content": result} for result in results]
