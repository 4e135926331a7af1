"""The tools of a request, checked, and what the model may do with them."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from ...errors import RequestError

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_.:/-]{1,128}")
_CHOICES = ("none", "auto", "required")


@dataclass(frozen=True, slots=True)
class Tool:
    """One function; ``parameters`` is the JSON schema of its arguments, ``{}`` where it takes none."""

    name: str
    parameters: Mapping[str, Any]
    strict: bool


@dataclass(frozen=True, slots=True)
class ToolUse:
    """``tools`` that the model may call; ``forced``: it must call at least one; ``parallel``: it may call several."""

    tools: tuple[Tool, ...] = ()
    forced: bool = False
    parallel: bool = True

    @property
    def is_strict(self) -> bool:
        """True where the grammar has to guard the arguments of calls that the model makes by itself."""
        return any(tool.strict for tool in self.tools)


def read_tools(tools: Sequence[Any] | None, choice: Any, parallel: bool | None) -> ToolUse:
    """What a chat body asks for (RequestError that names the field)."""
    known = [_tool(tool, index) for index, tool in enumerate(tools or ())]
    if len(known) > MAX_TOOLS:
        raise RequestError(f"tools has {len(known)} entries; the limit is {MAX_TOOLS}", param="tools")
    names = [tool.name for tool in known]
    for index, name in enumerate(names):
        if name in names[:index]:
            raise RequestError(
                f"tools[{index}] is a second tool called {name!r}; names must differ",
                param=f"tools[{index}].function.name",
            )
    allowed = parallel is not False
    if choice is None or choice == "auto":
        return ToolUse(tuple(known), parallel=allowed)
    if choice == "none":
        return ToolUse()
    if choice == "required":
        if not known:
            raise RequestError("tool_choice is 'required', and there are no tools", param="tool_choice")
        return ToolUse(tuple(known), forced=True, parallel=allowed)
    if isinstance(choice, Mapping) and choice.get("type") == "allowed_tools":
        return _allowed(choice, known, allowed)
    name = _chosen_name(choice)
    chosen = tuple(tool for tool in known if tool.name == name)
    if not chosen:
        raise RequestError(f"tool_choice names {name!r}, which is none of the tools", param="tool_choice")
    return ToolUse(chosen, forced=True, parallel=False)


def _allowed(choice: Mapping[str, Any], known: Sequence[Tool], parallel: bool) -> ToolUse:
    """Some of the tools, with the mode auto or required."""
    given = choice.get("allowed_tools")
    mode = given.get("mode") if isinstance(given, Mapping) else None
    tools = given.get("tools") if isinstance(given, Mapping) else None
    if mode not in ("auto", "required") or not isinstance(tools, list) or not tools:
        raise RequestError(
            "tool_choice.allowed_tools must have a mode, auto or required, and a list of tools",
            param="tool_choice.allowed_tools",
        )
    names = {_chosen_name(tool) for tool in tools}
    missing = sorted(names - {tool.name for tool in known})
    if missing:
        raise RequestError(f"tool_choice names {missing[0]!r}, which is none of the tools", param="tool_choice")
    chosen = tuple(tool for tool in known if tool.name in names)
    return ToolUse(chosen, forced=mode == "required", parallel=parallel)


def _tool(tool: Any, index: int) -> Tool:
    where = f"tools[{index}]"
    function = tool.get("function") if isinstance(tool, Mapping) else None
    if not isinstance(tool, Mapping) or tool.get("type") != "function" or not isinstance(function, Mapping):
        raise RequestError(f"{where} must have the type 'function' and a function", param=where)
    name, parameters = function.get("name"), function.get("parameters")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise RequestError(
            f"{where}.function.name is {name!r}; it must be 1 to 128 letters, digits or any of _.:/-",
            param=f"{where}.function.name",
        )
    if parameters is not None and not isinstance(parameters, Mapping):
        raise RequestError(f"{where}.function.parameters must be an object", param=f"{where}.function.parameters")
    strict = function.get("strict")
    if strict not in (None, False, True):
        raise RequestError(f"{where}.function.strict must be true or false", param=f"{where}.function.strict")
    return Tool(name, parameters or {}, bool(strict))


def _chosen_name(choice: Any) -> str:
    function = choice.get("function") if isinstance(choice, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(choice, Mapping) or choice.get("type") != "function" or not isinstance(name, str):
        raise RequestError(
            f"tool_choice is {choice!r}; it must be one of {', '.join(_CHOICES)}, or name a function as "
            '{"type": "function", "function": {"name": ...}}',
            param="tool_choice",
        )
    return name
