"""What a model's text looks like: its way to write calls, and its way to think."""

from __future__ import annotations

from dataclasses import dataclass

from ..reasoning import THINK, THINK_END
from . import harmony
from .formats import ToolFormat, choose_format
from .request import ToolUse


@dataclass(frozen=True, slots=True)
class Style:
    """What the served model's text looks like. ``thoughts`` is ``think``, ``gpt_oss`` or None."""

    tools: ToolFormat
    thoughts: str | None
    shows_tools: bool

    def marks(self, use: ToolUse) -> tuple[str, ...]:
        """Texts that the parsers must see even where they are special tokens."""
        thoughts = (THINK, THINK_END) if self.thoughts == "think" else ()
        calls = self.tools.marks if use.tools or self.thoughts == "gpt_oss" else ()
        return (*thoughts, *calls)


def choose_style(template: str, tool_parser: str = "auto", reasoning_parser: str = "auto") -> Style:
    """The style that the options name, or that the chat template shows."""
    thoughts: str | None = None if reasoning_parser in ("none", "auto") else reasoning_parser
    if reasoning_parser == "auto":
        thoughts = "gpt_oss" if harmony.CHANNEL in template else "think" if THINK_END in template else None
    return Style(choose_format(template, tool_parser), thoughts, "tools" in template)
