"""Bodies of /v1/messages."""

from __future__ import annotations

from typing import Any, Literal

import msgspec

from ...errors import RequestError
from ..refusals import Refusals, check_refused

# Taken without effect on the answer: for the clients' own books, or hints to a cache that keeps every prompt anyway.
NOTED = ("metadata", "cache_control", "service_tier", "user_profile_id", "workspace_id")

REFUSED: Refusals = {
    "container": ("the server runs no code", (None,)),
    "mcp_servers": ("the server calls no other servers", (None, [])),
    "context_management": ("input that is too long is refused, never edited", (None, {})),
    "diagnostics": ("what the cache lacked is not told", (None, {})),
    "inference_geo": ("the server computes where it stands", (None,)),
    "speed": ("there is one speed", (None, "standard")),
}
_THINKING = ("enabled", "disabled", "adaptive")
# Anthropic's own bound.
_MIN_BUDGET = 1024
_DISPLAYS = (None, "summarized", "omitted")


class InputMessage(msgspec.Struct, kw_only=True):
    role: Literal["user", "assistant", "system"]
    content: str | list[dict[str, Any]]


class CountTokensRequest(msgspec.Struct, kw_only=True):
    """What makes the prompt."""

    model: str
    messages: list[InputMessage]
    system: str | list[dict[str, Any]] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: dict[str, Any] | None = None
    thinking: dict[str, Any] | None = None
    output_config: dict[str, Any] | None = None
    container: Any = None
    mcp_servers: Any = None
    context_management: Any = None
    diagnostics: Any = None
    inference_geo: Any = None
    speed: Any = None
    cache_control: Any = None
    user_profile_id: Any = None
    workspace_id: Any = None
    # Not Anthropic's.
    chat_template_kwargs: dict[str, Any] | None = None
    cache_salt: str | None = None

    def check(self) -> None:
        """RequestError for what is not served."""
        check_refused(self, REFUSED)
        self._check_thinking()
        if not self.messages:
            raise RequestError("messages is empty; give at least one message", param="messages")

    def _check_thinking(self) -> None:
        for name, accepted in (("type", _THINKING), ("display", _DISPLAYS)):
            value = (self.thinking or {}).get(name, accepted[0])
            if value not in accepted:
                named = ", ".join(str(item) for item in accepted if item is not None)
                raise RequestError(f"thinking.{name} is {value!r}; it must be one of {named}", param=f"thinking.{name}")
        budget = (self.thinking or {}).get("budget_tokens")
        if budget is not None and (type(budget) is not int or budget < _MIN_BUDGET):
            raise RequestError(
                f"thinking.budget_tokens is {budget!r}; it must be a whole number of at least {_MIN_BUDGET}",
                param="thinking.budget_tokens",
            )


class MessagesRequest(CountTokensRequest, kw_only=True):
    """Anthropic's fields, and some sampling fields of the chat route."""

    max_tokens: int
    stop_sequences: list[str] | None = None
    stream: bool | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    metadata: dict[str, Any] | None = None
    service_tier: str | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    seed: int | None = None
    ignore_eos: bool | None = None

    def check(self) -> None:
        super().check()
        if self.max_tokens < 1:
            raise RequestError(f"max_tokens is {self.max_tokens}; it must be at least 1", param="max_tokens")


class TextBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="text"):
    text: str = ""
    citations: None = None


class ThinkingBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="thinking"):
    thinking: str = ""
    signature: str = ""


class ToolUseBlock(msgspec.Struct, kw_only=True, tag_field="type", tag="tool_use"):
    id: str
    name: str
    input: Any = {}


Block = TextBlock | ThinkingBlock | ToolUseBlock


class MessageTokensDetails(msgspec.Struct, kw_only=True):
    thinking_tokens: int = 0


class MessageUsage(msgspec.Struct, kw_only=True):
    """``input_tokens`` leaves out those that came from the prefix cache, which have a field of their own."""

    input_tokens: int
    cache_creation_input_tokens: int = 0
    cache_read_input_tokens: int = 0
    output_tokens: int = 0
    output_tokens_details: MessageTokensDetails = msgspec.field(default_factory=MessageTokensDetails)


class AnthropicMessage(msgspec.Struct, kw_only=True):
    id: str
    type: str = "message"
    role: str = "assistant"
    model: str
    content: list[Block] = []
    stop_reason: str | None = None
    stop_sequence: str | None = None
    usage: MessageUsage
