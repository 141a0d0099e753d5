"""Tool sets out of TOML: a declared set, and what a task's [tools] table makes of it.

    toolset = load("code")            shipped: nano, code; or the path of a TOML file of your own
    toolset = of(task)                what this task's rollouts get: a set, with the task's [tools] table applied

A declaration names the fields a tool takes and what carries it out: an implementation of this package
(`toolbox/implementations.py`), or a command of the box. A `[tools]` table chooses, renames, redescribes and limits.
"""

from __future__ import annotations

import difflib
import functools
import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import fields, replace
from importlib import resources
from pathlib import Path
from typing import Any

from stretto.harness.toolbox.implementations import IMPLEMENTATIONS
from stretto.harness.toolset import TYPES, Limits, Parameter, Tool, ToolSet, ToolSetError
from stretto.records import Task

SHIPPED = resources.files("stretto.harness") / "toolsets"


def of(task: Task, default: str = "") -> ToolSet:
    """The tools of a task's rollouts: the set its [tools] table names, else `default`, else `nano` for a task without
    such a table that an oracle grades on its few given files, and `code` for others; then what the table changes.
    Raises ToolSetError."""
    table = task.tools
    small = task.mode == "oracle" and not task.environment and not table
    name = table.get("set") or default or ("nano" if small else "code")
    try:
        if not isinstance(name, str):
            raise ToolSetError(f"set = {name!r} must be the name of a set or a TOML file")
        return override(load(name), table)
    except ToolSetError as error:
        raise ToolSetError(f"the tools of task {task.id}: {error}") from None


@functools.cache
def load(name: str) -> ToolSet:
    """A shipped set by name, or a TOML file. Raises ToolSetError."""
    shipped = sorted(entry.name.removesuffix(".toml") for entry in SHIPPED.iterdir())
    if name in shipped:
        text = (SHIPPED / f"{name}.toml").read_text()
    elif name.endswith(".toml"):
        try:
            text = Path(name).read_text()
        except (OSError, UnicodeDecodeError) as error:
            raise ToolSetError(f"cannot read {name}: {getattr(error, 'strerror', None) or error}") from None
    else:
        raise ToolSetError(f"no tool set is named {name!r}: give a .toml file or one of {', '.join(shipped)}")
    try:
        return declared(tomllib.loads(text), Path(name).stem)
    except tomllib.TOMLDecodeError as error:
        raise ToolSetError(f"{name} is not valid TOML: {error}") from None


def declared(tree: Mapping[str, Any], name: str) -> ToolSet:
    """A set from its TOML tree: `[limits]`, `libraries` and a table `[tools.NAME]` for each tool."""
    demand_known(tree, ("limits", "libraries", "tools"), f"tool set {name}")
    tools = [_tool(key, _table(table, f"tools.{key}")) for key, table in _table(tree.get("tools"), "tools").items()]
    if not tools:
        raise ToolSetError(f"tool set {name} has no [tools.NAME] table")
    return ToolSet(
        name=name,
        tools={tool.name: tool for tool in tools},
        limits=_limits(Limits(), tree.get("limits", {})),
        libraries=tuple(tree.get("libraries", ())),
    )


def override(toolset: ToolSet, table: Mapping[str, Any]) -> ToolSet:
    """What a task's [tools] table makes of a set: `only` or `without` some, `user` answers, `[tools.limits]`, and
    `[tools.NAME]` with `name`, `description` and `fields = {argument = "new name"}`."""
    keys = [tool.key for tool in toolset.tools.values()]
    demand_known(table, ("set", "only", "without", "user", "limits", *keys), "the [tools] table")
    chosen = _names(table.get("only", keys), "only", keys)
    left_out = _names(table.get("without", []), "without", keys)
    tools: dict[str, Tool] = {}
    for tool in toolset.tools.values():
        if tool.key not in chosen or tool.key in left_out:
            continue
        changed = _changed(tool, _table(table.get(tool.key), f"tools.{tool.key}"))
        if changed.name in tools:
            raise ToolSetError(f"two tools are named {changed.name!r}")
        tools[changed.name] = changed
    if not tools:
        raise ToolSetError("no tool is left: a policy without tools can't submit")
    user = table.get("user", [])
    answers = (user,) if isinstance(user, str) else tuple(user) if isinstance(user, list) else (None,)
    if not all(isinstance(answer, str) for answer in answers):
        raise ToolSetError("user must be a text, or a list of texts, one for each question")
    return replace(
        toolset, tools=tools, limits=_limits(toolset.limits, table.get("limits", {})), user=toolset.user + answers
    )


def _tool(key: str, table: Mapping[str, Any]) -> Tool:
    demand_known(table, ("name", "does", "description", "parameters", "command"), f"[tools.{key}]")
    parameters = {}
    for argument, schema in _table(table.get("parameters"), f"tools.{key}.parameters").items():
        schema = dict(_table(schema, f"tools.{key}.parameters.{argument}"))
        if schema.get("type") not in TYPES:
            raise ToolSetError(f"tools.{key}.parameters.{argument} needs type = one of {', '.join(TYPES)}")
        optional = schema.pop("optional", False)
        parameters[argument] = Parameter(argument, schema, not optional)
    does, command = table.get("does", key), table.get("command", "")
    if not command and does not in IMPLEMENTATIONS:
        near = difflib.get_close_matches(str(does), IMPLEMENTATIONS, n=1, cutoff=0)[0]
        raise ToolSetError(f"[tools.{key}]: nothing carries out {does!r}; did you mean {near}? Or give it a command")
    if not isinstance(table.get("description"), str) or not isinstance(command, str):
        raise ToolSetError(f"[tools.{key}] needs a description, as text (and a command is text)")
    name = _name(table.get("name", key), f"tools.{key}.name")
    return Tool(key, name, "command" if command else does, table["description"], parameters, command)


def _changed(tool: Tool, table: Mapping[str, Any]) -> Tool:
    where = f"[tools.{tool.key}]"
    demand_known(table, ("name", "description", "fields"), where)
    renamed = _table(table.get("fields"), f"tools.{tool.key}.fields")
    demand_known(renamed, tool.parameters, f"{where} fields")
    parameters = {
        argument: replace(parameter, name=_name(renamed.get(argument, parameter.name), f"{where} fields.{argument}"))
        for argument, parameter in tool.parameters.items()
    }
    if len({parameter.name for parameter in parameters.values()}) < len(parameters):
        raise ToolSetError(f"{where}: two fields have the same name")
    return replace(
        tool,
        name=_name(table.get("name", tool.name), f"{where} name"),
        description=str(table.get("description", tool.description)),
        parameters=parameters,
    )


def _limits(limits: Limits, table: Any) -> Limits:
    table = _table(table, "limits")
    known = {item.name: type(getattr(limits, item.name)) for item in fields(limits)}
    demand_known(table, known, "limits")
    for name, value in table.items():
        wanted = (int, float) if known[name] is float else known[name]
        if not isinstance(value, wanted) or isinstance(value, bool) or (isinstance(value, int | float) and value < 0):
            raise ToolSetError(f"limits.{name} = {value!r} must be a {known[name].__name__} that is not negative")
    if table.get("cut", "head") not in ("head", "middle"):
        raise ToolSetError(f"limits.cut = {table['cut']!r} must be head or middle")
    return replace(limits, **table)


def _table(value: Any, where: str) -> Mapping[str, Any]:
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ToolSetError(f"{where} must be a table, not {value!r}")
    return value


def _names(value: Any, where: str, known: list[str]) -> list[str]:
    if not isinstance(value, list):
        raise ToolSetError(f"{where} must be a list of tools")
    demand_known({str(name): None for name in value}, known, where)
    return value


def _name(value: Any, where: str) -> str:
    if not isinstance(value, str) or not value.replace("-", "_").isidentifier():
        raise ToolSetError(f"{where} = {value!r} is no name: use letters, digits, _ and -")
    return value


def demand_known(table: Iterable[str], known: Iterable[str], where: str) -> None:
    """ToolSetError for a key that is none of `known`, with the nearest one."""
    known = list(known)
    for key in table:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0)
            raise ToolSetError(f"{where} knows no {key!r}" + (f"; did you mean {near[0]}?" if near else ""))
