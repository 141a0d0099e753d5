"""Tool sets: what the policy may call, under which names, with which limits. Data.

    toolset.schemas      OpenAI `tools` entries, the same in training, evaluation and serving
    toolset.version      "code-5f0c…": the hash of names, schemas, limits and texts, kept with each rollout

This file is what is declared, and how arguments are read by it; `declare.py` makes it out of TOML.
"""

from __future__ import annotations

import functools
import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

TEXTS = 1
"""Version of the observations' wording. Policies learn from it: raise it when a sentence changes."""
TYPES: dict[str, type] = {"string": str, "integer": int, "boolean": bool, "array": list, "object": dict}


class ToolSetError(ValueError):
    """A sentence for whoever declared the tools."""


@dataclass(frozen=True)
class Limits:
    """What tools may take and tell."""

    observation: int = 16_000
    """Length of one observation."""
    cut: str = "middle"
    """What is left out of a longer one: its `middle`, as the terminal does it, or all after its `head`."""
    lines: int = 400
    """Lines that read_file shows at once."""
    matches: int = 100
    """Lines that grep, and places that search_code, shows."""
    entries: int = 400
    """Names that list_dir and glob show."""
    seconds: float = 60.0
    """Longest time of one command."""
    questions: int = 3
    """Questions that are answered; further ones are refused."""
    files: int = 2000
    """Files that a submission may hold."""
    bytes: int = 16 << 20
    """What they may hold together."""


@dataclass(frozen=True)
class Parameter:
    """One field: what the policy calls it, and its JSON schema."""

    name: str
    schema: dict[str, Any]
    required: bool = True


@dataclass(frozen=True)
class Tool:
    """`key` is what the tool is, `name` what this set calls it, `does` the implementation, unless `command` is one."""

    key: str
    name: str
    does: str
    description: str
    parameters: dict[str, Parameter]  # by the implementation's argument
    command: str = ""

    @property
    def schema(self) -> dict[str, Any]:
        """The OpenAI `tools` entry."""
        properties = {parameter.name: parameter.schema for parameter in self.parameters.values()}
        required = [parameter.name for parameter in self.parameters.values() if parameter.required]
        parameters = {"type": "object", "properties": properties, "required": required}
        function = {"name": self.name, "description": self.description, "parameters": parameters}
        return {"type": "function", "function": function}

    def arguments(self, given: Mapping[str, Any], spelled: bool = False) -> dict[str, Any]:
        """The implementation's arguments. `spelled`: every value came as text and is read by its declared type.
        Raises ValueError with a sentence for the policy."""
        read: dict[str, Any] = {}
        for argument, parameter in self.parameters.items():
            name = parameter.name
            if name in given:
                value = _spelled(given[name], parameter.schema) if spelled else given[name]
                if problem := mismatch(value, parameter.schema, name):
                    raise ValueError(problem)
                read[argument] = value
            elif parameter.required:
                raise ValueError(f"{self.name} needs {name}")
        extra = sorted(set(given) - {parameter.name for parameter in self.parameters.values()})
        if extra:
            raise ValueError(f"{self.name} takes no {extra[0][:40]!r}")
        return read


@dataclass(frozen=True)
class ToolSet:
    """The tools of one rollout. `user` are the answers to its questions, in order."""

    name: str
    tools: dict[str, Tool]  # by the name the policy writes
    limits: Limits = Limits()
    user: tuple[str, ...] = ()
    libraries: tuple[str, ...] = field(default=())
    """Python distributions that the tools need in the box."""

    @functools.cached_property
    def schemas(self) -> list[dict[str, Any]]:
        return [tool.schema for tool in self.tools.values()]

    @functools.cached_property
    def version(self) -> str:
        what = {
            "tools": [[tool.key, tool.does, tool.command, tool.schema] for tool in self.tools.values()],
            "limits": vars(self.limits),
            "texts": TEXTS,
        }
        digest = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        return f"{self.name}-{digest[:12]}"

    @property
    def needs(self) -> list[str]:
        """Capabilities of the sandbox without which some of these tools can't work."""
        shell = any(tool.does in ("run", "command") for tool in self.tools.values())
        return [*(["shell"] if shell else []), *(["libraries"] if self.libraries else [])]

    def by_key(self, key: str) -> Tool | None:
        return next((tool for tool in self.tools.values() if tool.key == key), None)


def mismatch(value: Any, schema: Mapping[str, Any], name: str) -> str:
    """What is wrong with a value, as a sentence for the policy, or nothing. Knows the keywords that tools declare."""
    kind = schema["type"]
    if type(value) is not TYPES[kind]:
        return f"{name} must be of type {kind}"
    if "enum" in schema and value not in schema["enum"]:
        return f"{name} must be one of {', '.join(schema['enum'])}"
    if "minimum" in schema and value < schema["minimum"]:
        return f"{name} must be at least {schema['minimum']}"
    if kind == "array" and "items" in schema:
        return next(filter(None, (mismatch(item, schema["items"], f"an item of {name}") for item in value)), "")
    if kind == "object":
        for key, inner in schema.get("properties", {}).items():
            if key in value and (problem := mismatch(value[key], inner, f"{key} in {name}")):
                return problem
            if key not in value and key in schema.get("required", ()):
                return f"{name} needs {key}"
    return ""


def typed(arguments: Mapping[str, Any], name: str, tools: list[dict[str, Any]]) -> dict[str, Any]:
    """Arguments that were written as text, read by the types that the OpenAI `tools` entry of that name declares."""
    functions = [tool.get("function") or {} for tool in tools]
    function = next((function for function in functions if function.get("name") == name), {})
    properties = (function.get("parameters") or {}).get("properties") or {}
    return {key: _spelled(value, _plain(properties.get(key))) for key, value in arguments.items()}


def _plain(schema: Any) -> Mapping[str, Any]:
    """A client's schema of a field, with one type: text, where that is one of several that it may have."""
    if not isinstance(schema, Mapping):
        return {}
    kinds = schema.get("type") or [one.get("type") for one in schema.get("anyOf", ()) if isinstance(one, Mapping)]
    kinds = [kind for kind in (kinds if isinstance(kinds, list) else [kinds]) if kind != "null"]
    return {"type": kinds[0] if kinds and "string" not in kinds else "string"}


def _spelled(value: Any, schema: Mapping[str, Any]) -> Any:
    """A value written as text, in formats that mark no types; what can't be read stays text and won't match."""
    kind = schema.get("type", "string")
    if kind == "string" or not isinstance(value, str):
        return value
    try:
        return json.loads(value.strip().lower() if kind == "boolean" else value)
    except (ValueError, RecursionError):
        return value
