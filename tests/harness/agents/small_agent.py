"""A product's own agent in forty lines of the standard library: shell commands until the policy says it is done.

Modes, as its first argument, are ways to misbehave.
"""

import contextlib
import json
import os
import subprocess
import sys
import time
import urllib.error
import urllib.request

TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "bash",
            "parameters": {"type": "object", "properties": {"command": {"type": "string"}}, "required": ["command"]},
        },
    }
]


def ask(messages, timeout=30, **options):
    body = {"model": "any-name", "messages": messages, "tools": TOOLS, **options}
    request = urllib.request.Request(
        os.environ["OPENAI_BASE_URL"] + "/chat/completions",
        json.dumps(body).encode(),
        {"Content-Type": "application/json", "Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]},
    )
    try:
        with urllib.request.urlopen(request, timeout=timeout) as answer:
            return json.load(answer)["choices"][0]["message"]
    except urllib.error.HTTPError as error:
        sys.exit("refused: " + error.read().decode())


def results(message):
    for call in message.get("tool_calls") or []:
        command = json.loads(call["function"]["arguments"]).get("command", "")
        done = subprocess.run(["bash", "-c", command], capture_output=True, text=True, stdin=subprocess.DEVNULL)
        yield {"role": "tool", "tool_call_id": call["id"], "content": done.stdout + done.stderr}


def main(mode, task):
    if mode == "crash":
        sys.exit("no such model")
    if mode == "idle":
        return
    messages = [{"role": "system", "content": "You work in a shell."}, {"role": "user", "content": task}]
    if mode == "impatient":
        with contextlib.suppress(TimeoutError):
            ask(messages, timeout=0.2)
    while True:
        message = ask(messages)
        messages.append(message)
        if mode == "sleep":
            time.sleep(1000)
        if mode == "endless":
            messages.append({"role": "user", "content": "Go on."})
            continue
        messages += results(message)
        if mode == "compact":
            messages = [messages[0], {"role": "user", "content": "So far: " + str(messages[-1]["content"])[:40]}]
        if not message.get("tool_calls"):
            break
    sys.exit(3 if mode == "fail" else 0)


main(sys.argv[1] if len(sys.argv) > 1 else "", sys.stdin.read())
