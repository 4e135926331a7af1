"""Hypothesis strategies from JSON schemas: bodies that follow one, and bodies with something else in some place."""

from __future__ import annotations

from typing import Any

from hypothesis import strategies as st

TEXTS = st.one_of(
    st.sampled_from(["", "a", "auto", "user", "assistant", "tool", "text", "function", "none", "a" * 300, "é\x00😀"]),
    st.text(max_size=12),
)
INTEGERS = st.one_of(st.integers(-2, 6), st.sampled_from([0, 1, 40, 2**31, 2**63 - 1, -(2**63), 10**30]))
NUMBERS = st.one_of(st.floats(-2, 3), st.sampled_from([0, 1, 1e-9, 1e308, -1e308, 5]))
ANYTHING: st.SearchStrategy[Any] = st.recursive(
    st.one_of(st.none(), st.booleans(), INTEGERS, NUMBERS, TEXTS),
    lambda inner: st.one_of(st.lists(inner, max_size=3), st.dictionaries(TEXTS, inner, max_size=3)),
    max_leaves=5,
)
# What objects without a schema hold in these APIs, so that what lies behind their first check is reached as well.
PARTS = st.fixed_dictionaries(
    {
        "type": st.sampled_from(
            ["text", "input_text", "output_text", "image_url", "tool_use", "tool_result", "thinking"]
        )
    },
    optional={"text": TEXTS, "id": TEXTS, "name": TEXTS, "input": ANYTHING, "tool_use_id": TEXTS, "content": ANYTHING},
)
ITEMS = st.fixed_dictionaries(
    {"type": st.sampled_from(["message", "function_call", "function_call_output", "reasoning", "function", "custom"])},
    optional={
        "role": st.sampled_from(["user", "assistant", "system", "tool"]),
        "content": st.one_of(TEXTS, st.lists(PARTS, max_size=2), ANYTHING),
        "call_id": TEXTS,
        "name": TEXTS,
        "arguments": TEXTS,
        "output": TEXTS,
        "function": ANYTHING,
        "parameters": ANYTHING,
        "input_schema": ANYTHING,
    },
)
OBJECTS = st.one_of(PARTS, ITEMS, st.dictionaries(TEXTS, ANYTHING, max_size=3))


class Strategies:
    """For the schemas of one OpenAPI document. ``fixed`` are properties, by name, that get these values only."""

    def __init__(self, document: dict[str, Any], fixed: dict[str, st.SearchStrategy[Any]]) -> None:
        self._schemas = document["components"]["schemas"]
        self._fixed = fixed

    def body(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        """Bodies of which one in three has a wrong value or a wrong field in it."""
        right = self.strategy(schema)
        spoiled = st.tuples(right, TEXTS, ANYTHING).map(lambda drawn: _spoil(*drawn))
        return st.one_of(right, right, spoiled)

    def strategy(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        if "$ref" in schema:
            return self.strategy(self._schemas[schema["$ref"].rsplit("/", 1)[1]])
        for key in ("anyOf", "oneOf"):
            if key in schema:
                return st.one_of([self.strategy(part) for part in schema[key]])
        if "enum" in schema:
            return st.sampled_from(schema["enum"])
        if "const" in schema:
            return st.just(schema["const"])
        kind = schema.get("type")
        if kind == "object":
            return self._object(schema)
        if kind == "array":
            return st.lists(self.strategy(schema.get("items", {})), max_size=3)
        plain = {"string": TEXTS, "integer": INTEGERS, "number": NUMBERS, "boolean": st.booleans(), "null": st.none()}
        return plain.get(kind, ANYTHING)

    def _object(self, schema: dict[str, Any]) -> st.SearchStrategy[Any]:
        if "properties" not in schema:
            values = schema.get("additionalProperties")
            return (
                OBJECTS if not isinstance(values, dict) else st.dictionaries(TEXTS, self.strategy(values), max_size=3)
            )
        required, optional = {}, {}
        for name, part in schema["properties"].items():
            target = required if name in schema.get("required", ()) or name in self._fixed else optional
            target[name] = self._fixed[name] if name in self._fixed else self.strategy(part)
        # Few at a time: a body with every optional field is refused for the first of them.
        chosen = st.lists(st.sampled_from(sorted(optional)), max_size=3, unique=True) if optional else st.just([])
        return chosen.flatmap(
            lambda names: st.fixed_dictionaries({**required, **{name: optional[name] for name in names}})
        )


def _spoil(body: Any, name: str, value: Any) -> Any:
    """``body`` with ``value`` in the place of one of its fields, chosen by ``name``."""
    if not isinstance(body, dict) or not body:
        return value
    names = sorted(body)
    return {**body, names[len(name) % len(names)]: value}
