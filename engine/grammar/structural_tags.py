"""Structural tags: text in which certain beginnings start a part that follows a schema, written as a Lark grammar.

Two shapes are read: ``{"structures": [{"begin", "schema", "end"}], "triggers": [...]}``, and ``{"format": {...}}`` with
the types ``triggered_tags``, ``tags_with_separator``, ``tag``, ``sequence``, ``or``, ``const_string``, ``json_schema``,
``regex`` and ``any_text``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

ErrorOf = Callable[[str], Exception]


def tag_grammar(tag: Mapping[str, Any], special_tokens: Mapping[str, int], error: ErrorOf) -> str:
    """The Lark text of a structural tag; ``error(message)`` makes the exception for an unknown shape."""
    builder = _Builder(special_tokens, error)
    if "format" in tag:
        body = builder.node(tag["format"], "format")
    elif "structures" in tag:
        body = builder.triggered(_from_structures(tag, error))
    else:
        raise error("a structural tag has either format, or structures and triggers")
    return "\n".join(["%llguidance {}", f"start: {body}", *builder.rules])


def _from_structures(tag: Mapping[str, Any], error: ErrorOf) -> dict[str, Any]:
    structures = tag["structures"]
    if not isinstance(structures, list) or not all(isinstance(item, Mapping) for item in structures):
        raise error("structures must be a list of objects with begin, schema and end")
    tags = [
        {
            "begin": item.get("begin"),
            "content": {"type": "json_schema", "json_schema": item.get("schema", {})},
            "end": item.get("end", ""),
        }
        for item in structures
    ]
    return {"type": "triggered_tags", "triggers": tag.get("triggers"), "tags": tags}


class _Builder:
    """Collects rules; every method gives the expression that stands for its node."""

    def __init__(self, special_tokens: Mapping[str, int], error: ErrorOf) -> None:
        self.rules: list[str] = []
        self._special = dict(special_tokens)
        alternatives = "|".join(map(re.escape, sorted(self._special, key=len, reverse=True)))
        self._split = re.compile(f"({alternatives})") if alternatives else None
        self._error = error

    def node(self, node: Any, where: str) -> str:
        """The expression of any format."""
        kind = node.get("type") if isinstance(node, Mapping) else None
        if kind == "triggered_tags":
            return self.triggered(node)
        if kind == "tags_with_separator":
            return self._separated(node)
        if kind == "tag":
            return self._tag(node)
        if kind in ("sequence", "or"):
            parts = [self.node(item, f"{where}.elements") for item in self._list(node, "elements", where)]
            return "(" + (" " if kind == "sequence" else " | ").join(part or '""' for part in parts) + ")"
        if kind == "const_string":
            return self._literal(self._text(node, "value", where))
        if kind == "json_schema":
            return self._schema(node.get("json_schema"), where)
        if kind == "regex":
            return self._rule(self._regex(self._text(node, "pattern", where)), terminal=True)
        if kind == "any_text":
            return self._free_text()
        raise self._error(f"{where} has type {kind!r}, which is not served in a structural tag")

    def triggered(self, node: Mapping[str, Any]) -> str:
        """Free text, in which each trigger begins one of the tags that start with it."""
        triggers = [
            trigger for trigger in self._list(node, "triggers", "format") if isinstance(trigger, str) and trigger
        ]
        groups: dict[str, list[str]] = {trigger: [] for trigger in triggers}
        for tag in self._list(node, "tags", "format"):
            begin = self._text(tag, "begin", "tags")
            trigger = next((trigger for trigger in triggers if begin.startswith(trigger)), None)
            if trigger is None:
                raise self._error(f"the begin {begin!r} starts with none of the triggers")
            groups[trigger].append(self._tag(tag, skip=len(trigger)))
        bodies = [f"{self._trigger(trigger)} ({' | '.join(tags)})" for trigger, tags in groups.items() if tags]
        if not bodies:
            raise self._error("a structural tag needs at least one tag")
        any_tag = self._rule(" | ".join(bodies))
        times = "" if node.get("stop_after_first") else ("+" if node.get("at_least_one") else "*")
        optional = "?" if node.get("stop_after_first") and not node.get("at_least_one") else ""
        after = "" if node.get("stop_after_first") and node.get("at_least_one") else f" {self._free_text()}"
        return f"{any_tag}{times}{optional}{after}"

    def _separated(self, node: Mapping[str, Any]) -> str:
        tags = [self._tag(tag) for tag in self._list(node, "tags", "format")]
        one = self._rule(" | ".join(tags))
        separator = self._literal(str(node.get("separator", "")))
        many = one if node.get("stop_after_first") else f"{one} ({separator} {one})*"
        return f"({many})" if node.get("at_least_one") else f"({many})?"

    def _tag(self, tag: Any, skip: int = 0) -> str:
        begin = self._text(tag, "begin", "tag")[skip:]
        end = tag.get("end", "")
        ends = end if isinstance(end, list) else [end]
        if not ends or not all(isinstance(text, str) for text in ends):
            raise self._error(f"the end {end!r} of a tag must be a text, or a list of texts")
        if _is_free(tag.get("content")) and all(ends) and not any(self._is_special(text) for text in ends):
            # The first end ends the text, which would go on over it otherwise.
            closed = " | ".join(self._literal(text) for text in ends)
            free = self._rule(f"{self._free_text()} ({closed})", lazy=True)
            return f"({self._literal(begin)} {free})" if begin else free
        closing = "(" + " | ".join(self._literal(text) or '""' for text in ends) + ")" if any(ends) else ""
        parts = (self._literal(begin), self.node(tag.get("content"), "content"), closing)
        return "(" + " ".join(part for part in parts if part) + ")"

    def _trigger(self, trigger: str) -> str:
        """Free text up to the trigger. One that begins with a special token ends the text by itself."""
        if self._is_special(trigger):
            return f"{self._free_text()} {self._literal(trigger)}"
        return self._rule(f"{self._free_text()} {self._literal(trigger)}", lazy=True)

    def _is_special(self, text: str) -> bool:
        """True where ``text`` begins with a special token."""
        return self._split is not None and self._split.match(text) is not None

    def _literal(self, text: str) -> str:
        """A text; special tokens in it are those tokens, which no spelling can stand for."""
        if not text:
            return ""
        pieces = [piece for piece in (self._split.split(text) if self._split else [text]) if piece]
        return " ".join(
            f"<[{self._special[piece]}]>" if piece in self._special else json.dumps(piece, ensure_ascii=False)
            for piece in pieces
        )

    def _schema(self, schema: Any, where: str) -> str:
        from .grammar_text import with_options

        if isinstance(schema, bool):
            schema = {} if schema else {"not": {}}
        if not isinstance(schema, Mapping):
            raise self._error(f"{where} has the schema {schema!r}; it must be an object")
        return self._rule("%json " + json.dumps(with_options(schema), ensure_ascii=False))

    def _regex(self, pattern: str) -> str:
        escaped = re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern)
        return f"/{escaped}/"

    def _free_text(self) -> str:
        if "TEXT: /(.|\\n)*/" not in self.rules:
            self.rules.append("TEXT: /(.|\\n)*/")
        return "TEXT"

    def _rule(self, body: str, *, lazy: bool = False, terminal: bool = False) -> str:
        name = f"{'T' if terminal else 'r'}{len(self.rules)}"
        self.rules.append(f"{name}{'[lazy]' if lazy else ''}: {body}")
        return name

    def _list(self, node: Mapping[str, Any], name: str, where: str) -> Sequence[Any]:
        items = node.get(name)
        if not isinstance(items, list) or not items:
            raise self._error(f"{where}.{name} must be a list that is not empty")
        return items

    def _text(self, node: Any, name: str, where: str) -> str:
        value = node.get(name) if isinstance(node, Mapping) else None
        if not isinstance(value, str):
            raise self._error(f"{where} needs {name}, a text")
        return value


def _is_free(content: Any) -> bool:
    return isinstance(content, Mapping) and content.get("type") == "any_text"
