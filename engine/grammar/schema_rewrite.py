"""Keywords of JSON schemas that llguidance does not know, said in those that it knows.

A rewritten schema takes the same instances, or fewer where no ``oneOf`` could turn fewer into more; what cannot be said
so is left as it is, and llguidance refuses it.
"""

from __future__ import annotations

import itertools
import json
import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

# Positions of schemas: under a name each, in a list, alone.
_NAMED = ("properties", "patternProperties", "definitions", "$defs")
_LISTED = ("allOf", "anyOf", "oneOf", "prefixItems")
_SINGLE = ("additionalProperties", "additionalItems")
_TYPES = ("null", "boolean", "number", "string", "array", "object")
# Each dependency doubles the ways to write an object; each value multiplies the orders of a list.
_MAX_DEPENDENCIES = 6
_MAX_UNIQUE = 4
_MAX_ORDERS = 1000


@dataclass(slots=True)
class _Rules:
    """What may be done to one schema: take fewer instances; and so many orders of lists."""

    may_narrow: bool
    num_orders: int = _MAX_ORDERS


def rewritten(schema: Any) -> Any:
    """The schema, or the part of one, without ``not``, ``dependencies`` and ``uniqueItems`` where that is possible."""
    try:
        return _rewritten(schema, _Rules(may_narrow='"oneOf"' not in json.dumps(schema)))
    except RecursionError:
        return schema


def _rewritten(schema: Any, rules: _Rules) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    made = dict(schema)
    for key in _NAMED:
        if isinstance(made.get(key), Mapping):
            made[key] = {name: _rewritten(part, rules) for name, part in made[key].items()}
    for key in (*_LISTED, "items"):
        if isinstance(made.get(key), list):
            made[key] = [_rewritten(part, rules) for part in made[key]]
    for key in (*_SINGLE, "items"):
        if isinstance(made.get(key), Mapping):
            made[key] = _rewritten(made[key], rules)
    # What stands beside a reference means different things in different drafts.
    if "$ref" in made:
        return made
    _unique_items(made, rules)
    _dependencies(made, rules)
    return _negation(made, rules)


def _negation(schema: dict[str, Any], rules: _Rules) -> Any:
    if "not" not in schema:
        return schema
    negated = schema["not"]
    rest = {key: value for key, value in schema.items() if key != "not"}
    if negated is True or negated == {}:
        return False
    if negated is False:
        return rest
    if not isinstance(negated, Mapping) or len(negated) != 1:
        return schema
    ((key, value),) = negated.items()
    if key == "type":
        return _other_types(schema, rest, [value] if isinstance(value, str) else value, rules)
    if key in ("const", "enum") and isinstance(rest.get("enum"), list) and (key == "const" or isinstance(value, list)):
        left_out = {_canonical(item) for item in ([value] if key == "const" else value)}
        left = [item for item in rest["enum"] if _canonical(item) not in left_out]
        return {**rest, "enum": left} if left else False
    if key == "required" and isinstance(value, list) and len(value) == 1:
        return _with(rest, {"type": "object", "properties": {value[0]: False}})
    return schema


def _other_types(schema: dict[str, Any], rest: dict[str, Any], refused: Any, rules: _Rules) -> Any:
    """All types but ``refused``. Numbers that are no integers cannot be told, so with integers all numbers go."""
    if not isinstance(refused, list) or not all(item in (*_TYPES, "integer") for item in refused):
        return schema
    given = rest.get("type", list(_TYPES))
    given = [given] if isinstance(given, str) else given
    gone = {*refused, *({"integer"} if "number" in refused else ())}
    if "integer" in gone and "number" not in gone and "number" in given:
        if not rules.may_narrow:
            return schema
        gone.add("number")
    left = [item for item in given if item not in gone]
    # Nothing left is a mistake that the client should hear of.
    return {**rest, "type": left} if left else schema


def _dependencies(schema: dict[str, Any], rules: _Rules) -> None:
    """An object either lacks the name, or has it and what depends on it."""
    found: list[tuple[str, Any]] = []
    keys = [key for key in ("dependencies", "dependentRequired", "dependentSchemas") if key in schema]
    for key in keys:
        if not isinstance(schema[key], Mapping):
            return
        for name, needed in schema[key].items():
            names = isinstance(needed, list) and all(isinstance(item, str) for item in needed)
            if not names and not isinstance(needed, (Mapping, bool)):
                return
            # Where no properties are listed the order of the names is that of ``required``.
            wanted = {"required": needed} if names else _rewritten(needed, rules)
            found.append((name, {"allOf": [wanted, {"required": [name]}]}))
    if len(found) > _MAX_DEPENDENCIES:
        return
    for key in keys:
        del schema[key]
    for name, wanted in found:
        schema.update(_with(schema, {"anyOf": [{"properties": {name: False}}, wanted]}))


def _unique_items(schema: dict[str, Any], rules: _Rules) -> None:
    """A list of few values is one of the orders of some of them."""
    if schema.get("uniqueItems") is False or (schema.get("uniqueItems") is True and schema.get("maxItems") in (0, 1)):
        del schema["uniqueItems"]
        return
    items = schema.get("items")
    if not isinstance(items, Mapping) or not set(items) <= {"enum", "type"} or "prefixItems" in schema:
        return
    values = items.get("enum")
    if schema.get("uniqueItems") is not True or not isinstance(values, list):
        return
    distinct = list({_canonical(value): value for value in values}.values())
    if len(distinct) > _MAX_UNIQUE or schema.get("type") != "array":
        return
    least, most = schema.get("minItems", 0), min(schema.get("maxItems", len(distinct)), len(distinct))
    if not isinstance(least, int) or least > most:
        return
    num_orders = sum(math.perm(len(distinct), length) for length in range(least, most + 1))
    if num_orders > rules.num_orders:
        return
    rules.num_orders -= num_orders
    kind = {key: items[key] for key in items if key == "type"}
    orders: list[dict[str, Any]] = []
    for length in range(least, most + 1):
        for order in itertools.permutations(distinct, length):
            parts = [{**kind, "enum": [value]} for value in order]
            orders.append({"type": "array", "prefixItems": parts, "items": False, "minItems": length})
    for key in ("uniqueItems", "items", "minItems", "maxItems"):
        schema.pop(key, None)
    schema.update(_with(schema, {"anyOf": orders}))


def _with(schema: Mapping[str, Any], other: Any) -> dict[str, Any]:
    """Both at once."""
    return {**schema, "allOf": [*schema.get("allOf", []), other]}


def _canonical(value: Any) -> str:
    """Equal for values that JSON schema calls equal: 1 and 1.0, but not 1 and true."""

    def plain(item: Any) -> Any:
        if isinstance(item, float) and item.is_integer():
            return int(item)
        if isinstance(item, list):
            return [plain(part) for part in item]
        if isinstance(item, dict):
            return {name: plain(part) for name, part in item.items()}
        return item

    return json.dumps(plain(value), sort_keys=True)
