"""Tool calls in tags, as Qwen3-Coder and Qwen3.5 write them. Values are text; the tool's schema says what they mean.

<tool_call>
<function=read_file>
<parameter=path>
src/app.py
</parameter>
</function>
</tool_call>
"""

from __future__ import annotations

import json
import re
from typing import Any

from stretto.harness.parse import Attempt
from stretto.records import CallStatus

_FUNCTION = re.compile(r"\s*<function=([^>\n]*)>(.*)</function>\s*", re.DOTALL)
_PARAMETER = re.compile(r"\s*<parameter=([^>\n]+)>(.*?)</parameter>\s*(?=<parameter=|\Z)", re.DOTALL)


def read(body: str, start: int, end: int) -> Attempt:
    """The attempt in `body`, what stands between the tags of a call at the characters `[start, end)`."""
    if "<function=" not in body:
        return Attempt(CallStatus.NO_NAME, start=start, end=end, error="the call has no <function=name>")
    function = _FUNCTION.fullmatch(body)
    if function is None:
        return Attempt(CallStatus.BAD_JSON, start=start, end=end, error="the call is not <function=name> … </function>")
    name, inner = function[1].strip(), function[2]
    if not name:
        return Attempt(CallStatus.NO_NAME, start=start, end=end, error="the call has no <function=name>")
    arguments: dict[str, Any] = {}
    at = 0
    while inner[at:].strip():
        parameter = _PARAMETER.match(inner, at)
        if parameter is None:
            error = "a parameter is not <parameter=name> … </parameter>"
            return Attempt(CallStatus.BAD_ARGUMENTS, name, start=start, end=end, error=error)
        if parameter[1] in arguments:
            error = f"parameter {parameter[1][:40]!r} is given twice"
            return Attempt(CallStatus.BAD_ARGUMENTS, name, start=start, end=end, error=error)
        arguments[parameter[1]] = parameter[2].removeprefix("\n").removesuffix("\n")
        at = parameter.end()
    return Attempt(CallStatus.OK, name, arguments, start, end, spelled=True)


def call_text(name: str, arguments: dict[str, Any]) -> str:
    """A tool call as the policy writes it."""
    lines = ["<tool_call>", f"<function={name}>"]
    for key, value in arguments.items():
        text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
        lines += [f"<parameter={key}>", text, "</parameter>"]
    return "\n".join([*lines, "</function>", "</tool_call>"])


def tool_prompt(tools: list[dict[str, Any]]) -> str:
    """The system text that shows tools (OpenAI `tools` entries)."""
    schemas = "\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools)
    return (
        f"# Tools\n\nYou have access to the following functions:\n\n<tools>\n{schemas}\n</tools>\n\n"
        "If you choose to call a function ONLY reply in the following format with NO suffix:\n\n"
        "<tool_call>\n<function=example_function_name>\n<parameter=example_parameter_1>\nvalue_1\n</parameter>\n"
        "<parameter=example_parameter_2>\nThis is the value for the second parameter\nthat can span\nmultiple lines\n"
        "</parameter>\n</function>\n</tool_call>"
    )
