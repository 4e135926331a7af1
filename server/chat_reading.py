"""How one chat request's output is read: which parsers, which forms, and what the engine has to know of thoughts."""

from __future__ import annotations

import json
from collections.abc import Callable, Collection, Sequence
from typing import Any

from ..engine.structured_output import ReasoningSpan, StructuredOutput
from ..errors import RequestError
from .answer_reader import AnswerReader
from .chat_schema import ChatRequest
from .reasoning import THINK, THINK_END, ThinkParser, prompt_state
from .thought_tokens import num_thought_tokens
from .tools import harmony
from .tools.grammar import tool_grammar
from .tools.request import read_tools
from .tools.style import Style

_HARMONY_START = "<|channel|>analysis<|message|>"
_HARMONY_END = "<|end|>"
_HARMONY_FINAL = "<|start|>assistant<|channel|>final<|message|>"


class ChatReading:
    """One request's parsers and forms."""

    def __init__(self, body: ChatRequest, style: Style) -> None:
        self.use = read_tools(body.tools, body.tool_choice, body.parallel_tool_calls)
        self._style = style
        self._budget = body.thinking_token_budget
        self._opened = self._closed = False
        if self._budget is not None and self._budget < 0:
            raise RequestError(
                f"thinking_token_budget is {self._budget}; it must be at least 0", param="thinking_token_budget"
            )
        if self._budget is not None and style.thoughts is None:
            raise RequestError(
                "thinking_token_budget is given, and this model does not think before it answers (--reasoning-parser)",
                param="thinking_token_budget",
            )

    @property
    def is_plain(self) -> bool:
        """True where the model's text is the answer."""
        return self._style.thoughts is None and not self.use.tools

    def see_prompt(self, prompt: str) -> None:
        """Look at how the rendered prompt ends."""
        self._opened, self._closed = prompt_state(prompt) if self._style.thoughts == "think" else (False, False)

    def fields(self, answer: StructuredOutput | None, special_tokens: Collection[str]) -> dict[str, Any]:
        """Fields of SamplingParams; ``answer`` is the form that the client wants for text.

        Checks schemas, which may take some tenths of a second for very large ones.
        """
        fields: dict[str, Any] = {}
        structured = tool_grammar(self.use, self._style.tools, answer)
        if structured is not None and self._style.thoughts == "gpt_oss":
            structured = _in_harmony(structured, is_call=structured.param == "tools" and self.use.forced)
        fields["structured"] = structured
        if self._style.thoughts is not None and (structured is not None or self._budget is not None):
            fields["reasoning"] = self._span(structured is not None)
        if set(self._style.marks(self.use)) & set(special_tokens):
            fields["skip_special_tokens"] = False
        return fields

    def reader(self) -> AnswerReader:
        """Parsers for one choice."""
        parallel = self.use.parallel
        if self._style.thoughts == "gpt_oss":
            names = frozenset(tool.name for tool in self.use.tools)
            return AnswerReader(harmony.HarmonyParser(names), None, parallel=parallel)
        thoughts = ThinkParser(opened=self._opened, closed=self._closed) if self._style.thoughts else None
        calls = self._style.tools.parser(self.use.tools) if self.use.tools else None
        return AnswerReader(thoughts, calls, parallel=parallel)

    def num_thought_tokens(self, token_ids: Sequence[int], token_bytes: Callable[[int], bytes]) -> int:
        """How many of one choice's tokens are thoughts."""
        style = self._style.thoughts
        return num_thought_tokens(token_ids, token_bytes, style, opened=self._opened, closed=self._closed)

    def _span(self, has_form: bool) -> ReasoningSpan:
        if self._style.thoughts == "gpt_oss":
            closing = _HARMONY_END if has_form else _HARMONY_END + _HARMONY_FINAL
            return ReasoningSpan(
                start=_HARMONY_START, end=_HARMONY_END, opened=True, budget=self._budget, closing=closing
            )
        return ReasoningSpan(
            start=THINK,
            end=THINK_END,
            opened=self._opened,
            closed=self._closed,
            budget=self._budget,
            closing=f"\n{THINK_END}\n\n",
        )


def _in_harmony(structured: StructuredOutput, *, is_call: bool) -> StructuredOutput:
    """The form as the message that follows the thoughts, with its header."""
    if is_call:
        node = json.loads(structured.text())["format"]
        head = "<|start|>assistant"
    else:
        node, head = _node(structured), _HARMONY_FINAL
    elements = [{"type": "const_string", "value": head}, node]
    return StructuredOutput(
        structural_tag={"format": {"type": "sequence", "elements": elements}}, param=structured.param
    )


def _node(structured: StructuredOutput) -> dict[str, Any]:
    if structured.kind == "json":
        return {"type": "json_schema", "json_schema": json.loads(structured.text())}
    if structured.kind == "json_object":
        return {"type": "json_schema", "json_schema": {"type": "object"}}
    if structured.kind == "regex":
        return {"type": "regex", "pattern": structured.text()}
    if structured.kind == "choice":
        texts = structured.choice or ()
        return {"type": "or", "elements": [{"type": "const_string", "value": text} for text in texts]}
    raise structured.error(
        f"{structured.param}: this model's channels take JSON, regular expressions, choices and forced calls only"
    )
