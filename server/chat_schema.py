"""Bodies of /v1/chat/completions."""

from __future__ import annotations

from typing import Any, ClassVar, Protocol

import msgspec

from ..engine.sampling_params import MAX_LOGPROBS
from ..errors import RequestError
from .completion_schema import PromptLogprobs
from .schema import GenerationBody, Usage


class Message(msgspec.Struct, kw_only=True):
    """One turn. What content parts and tool calls may hold is the chat template's side to check."""

    role: str
    content: str | list[dict[str, Any]] | None = None
    name: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    tool_call_id: str | None = None
    reasoning_content: str | None = None
    # Another name for the same, which newer clients send back.
    reasoning: str | None = None
    # An answer that OpenAI's models refused to give reads like any other here.
    refusal: str | None = None
    # Refused; they would be lost otherwise.
    function_call: Any = None
    audio: Any = None


class Conversation(Protocol):
    """What makes a chat prompt, in whichever body it comes."""

    messages: list[Message]
    add_generation_prompt: bool | None
    continue_final_message: bool | None
    chat_template_kwargs: dict[str, Any] | None
    tools: list[dict[str, Any]] | None


def read_effort(given: dict[str, Any] | None, name: str) -> str | None:
    """``effort`` of the object in the field ``name`` of another API's request (RequestError for what is no text)."""
    effort = (given or {}).get("effort")
    if effort is not None and not isinstance(effort, str):
        raise RequestError(f"{name}.effort must be a text", param=f"{name}.effort")
    return effort


def check_conversation(body: Conversation) -> None:
    """RequestError for no messages, or for two wishes that exclude each other."""
    if not body.messages:
        raise RequestError("messages is empty; give at least one message", param="messages")
    for index, message in enumerate(body.messages):
        for name, remedy in (("function_call", "give tool_calls"), ("audio", "only text is served")):
            if getattr(message, name) is not None:
                place = f"messages[{index}].{name}"
                raise RequestError(f"{place} is not served; {remedy}", param=place)
    if body.continue_final_message and body.add_generation_prompt:
        raise RequestError(
            "continue_final_message goes on with the last message and add_generation_prompt opens a new one; "
            "set one of them",
            param="continue_final_message",
        )


class ChatRequest(GenerationBody, kw_only=True):
    """``max_completion_tokens`` and its older name ``max_tokens`` both bound the output: the smaller holds."""

    served: ClassVar[frozenset[str]] = frozenset({"tools", "tool_choice"})

    messages: list[Message]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    reasoning_effort: str | None = None
    include_reasoning: bool | None = None
    thinking_token_budget: int | None = None
    max_completion_tokens: int | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None

    def check(self) -> None:
        """RequestError for fields that are refused, exclude each other, or lie outside their limits."""
        self.check_common()
        check_conversation(self)
        if self.best_of is not None and self.best_of != (self.n or 1):
            raise RequestError(
                f"best_of is {self.best_of} and n is {self.n or 1}; candidates are ranked by /v1/completions only, "
                "so best_of must equal n",
                param="best_of",
            )
        if self.top_logprobs is not None:
            if not 0 <= self.top_logprobs <= MAX_LOGPROBS:
                raise RequestError(
                    f"top_logprobs is {self.top_logprobs}; it must be from 0 to {MAX_LOGPROBS}", param="top_logprobs"
                )
            if not self.logprobs:
                raise RequestError("top_logprobs needs logprobs true", param="top_logprobs")
        if self.max_completion_tokens is not None and self.max_completion_tokens < 1:
            raise RequestError(
                f"max_completion_tokens is {self.max_completion_tokens}; it must be at least 1",
                param="max_completion_tokens",
            )

    def token_limit(self) -> int | None:
        """Generated tokens at most; None: as many as the context allows."""
        limits = [limit for limit in (self.max_completion_tokens, self.max_tokens) if limit is not None]
        return min(limits) if limits else None


class TokenCandidate(msgspec.Struct, kw_only=True):
    token: str
    logprob: float
    bytes: list[int]


class TokenEntry(TokenCandidate, kw_only=True):
    top_logprobs: list[TokenCandidate]


class ChatLogprobs(msgspec.Struct, kw_only=True):
    content: list[TokenEntry]
    refusal: None = None


class FunctionCall(msgspec.Struct, kw_only=True):
    """``arguments`` is JSON text."""

    name: str
    arguments: str = ""


class ToolCall(msgspec.Struct, kw_only=True):
    id: str
    type: str = "function"
    function: FunctionCall


class FunctionDelta(msgspec.Struct, kw_only=True):
    name: str | msgspec.UnsetType = msgspec.UNSET
    arguments: str | msgspec.UnsetType = msgspec.UNSET


class ToolCallDelta(msgspec.Struct, kw_only=True):
    """The first of an index has id, type and name; the others go on with its arguments."""

    index: int
    id: str | msgspec.UnsetType = msgspec.UNSET
    type: str | msgspec.UnsetType = msgspec.UNSET
    function: FunctionDelta


class AnswerMessage(msgspec.Struct, kw_only=True):
    role: str = "assistant"
    content: str | None
    refusal: None = None
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCall] | msgspec.UnsetType = msgspec.UNSET


class Delta(msgspec.Struct, kw_only=True):
    role: str | msgspec.UnsetType = msgspec.UNSET
    content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning_content: str | msgspec.UnsetType = msgspec.UNSET
    reasoning: str | msgspec.UnsetType = msgspec.UNSET
    tool_calls: list[ToolCallDelta] | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct, kw_only=True):
    index: int
    message: AnswerMessage
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None


class ChatChunkChoice(msgspec.Struct, kw_only=True):
    index: int
    delta: Delta
    logprobs: ChatLogprobs | None = None
    finish_reason: str | None = None
    stop_reason: str | int | msgspec.UnsetType | None = msgspec.UNSET


class ChatCompletion(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion"
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage
    prompt_logprobs: PromptLogprobs | msgspec.UnsetType = msgspec.UNSET


class ChatChunk(msgspec.Struct, kw_only=True):
    id: str
    object: str = "chat.completion.chunk"
    created: int
    model: str
    choices: list[ChatChunkChoice]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
