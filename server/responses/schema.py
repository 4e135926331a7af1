"""Bodies of /v1/responses."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, Literal

import msgspec

from ...engine.sampling_params import MAX_LOGPROBS
from ...errors import RequestError
from ..chat_schema import TokenEntry
from ..refusals import COMMON, Refusals, check_keys, check_refused
from ..schema import StreamOptions, check_stream_options

MAX_METADATA = 16

# Taken without effect on the answer; the response repeats most of them.
NOTED = ("user", "metadata", "safety_identifier", "prompt_cache_key", "prompt_cache_retention")

REFUSED: Refusals = {
    **COMMON,
    "conversation": ("conversations are not kept; use previous_response_id", (None,)),
    "prompt": ("prompt templates are not kept here", (None,)),
    "max_tool_calls": ("the server runs no tools of its own", (None,)),
    "context_management": ("input that is too long is refused, never compacted", (None, [])),
    "access_programs": ("there are no such programs", (None, {}, {"cyber": "standard"})),
    "background_options": ("work in the background begins at once", (None, {}, {"completion_window": "soonest"})),
    "image": ("only text is served", (None, {})),
}
TEXT_REFUSED: Refusals = {"verbosity": ("how much a model says is for the conversation to ask", (None, "medium"))}
REASONING_REFUSED: Refusals = {
    "context": ("the chat template decides which thoughts are shown again", (None, "auto")),
    "mode": ("there is one mode", (None, "standard")),
}
LOGPROBS = "message.output_text.logprobs"
ENCRYPTED = "reasoning.encrypted_content"
INCLUDABLE = (LOGPROBS, ENCRYPTED)
NOT_INCLUDABLE = (
    "file_search_call.results",
    "web_search_call.results",
    "web_search_call.action.sources",
    "message.input_image.image_url",
    "computer_call_output.output.image_url",
    "code_interpreter_call.outputs",
)


class ResponseRequest(msgspec.Struct, kw_only=True):
    """OpenAI's fields, and the sampling fields that the chat route knows."""

    model: str
    input: str | list[dict[str, Any]] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None
    store: bool | None = None
    background: bool | None = None
    stream: bool | None = None
    max_output_tokens: int | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_logprobs: int | None = None
    include: list[str] | None = None
    metadata: dict[str, str] | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    text: dict[str, Any] | None = None
    reasoning: dict[str, Any] | None = None
    user: str | None = None
    safety_identifier: str | None = None
    prompt_cache_key: str | None = None
    conversation: Any = None
    prompt: Any = None
    max_tool_calls: Any = None
    truncation: Literal["auto", "disabled"] | None = None
    context_management: Any = None
    moderation: Any = None
    service_tier: Any = None
    prompt_cache_options: Any = None
    prompt_cache_retention: str | None = None
    access_programs: Any = None
    background_options: Any = None
    image: Any = None
    stream_options: StreamOptions | None = None
    # Not OpenAI's.
    top_k: int | None = None
    min_p: float | None = None
    min_tokens: int | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[str, float] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    ignore_eos: bool | None = None
    cache_salt: str | None = None
    chat_template_kwargs: dict[str, Any] | None = None

    @property
    def is_stored(self) -> bool:
        return self.store is not False

    @property
    def wants_logprobs(self) -> bool:
        return self.top_logprobs is not None or LOGPROBS in (self.include or ())

    @property
    def wants_encrypted(self) -> bool:
        """True where reasoning items carry their thoughts as one opaque text too."""
        return ENCRYPTED in (self.include or ())

    def check(self) -> None:
        """RequestError for what is not served and for fields that exclude each other."""
        check_refused(self, REFUSED)
        check_keys(self.text, "text", TEXT_REFUSED)
        check_keys(self.reasoning, "reasoning", REASONING_REFUSED)
        check_stream_options(self.stream_options, self.stream)
        check_include(self.include or ())
        if not self.input:
            raise RequestError("input is empty; give a text or at least one item", param="input")
        if self.background and not self.is_stored:
            raise RequestError("a background response must be stored; leave out store or background", param="store")
        if self.max_output_tokens is not None and self.max_output_tokens < 1:
            raise RequestError(
                f"max_output_tokens is {self.max_output_tokens}; it must be at least 1", param="max_output_tokens"
            )
        if self.top_logprobs is not None and not 0 <= self.top_logprobs <= MAX_LOGPROBS:
            raise RequestError(
                f"top_logprobs is {self.top_logprobs}; it must be from 0 to {MAX_LOGPROBS}", param="top_logprobs"
            )
        if self.metadata is not None and len(self.metadata) > MAX_METADATA:
            raise RequestError(f"metadata has {len(self.metadata)} keys; the limit is {MAX_METADATA}", param="metadata")


def check_include(include: Iterable[str]) -> None:
    """RequestError for what no response can include."""
    for name in include:
        if name in NOT_INCLUDABLE:
            raise RequestError(f"include: no response has {name} here; leave it out", param="include")
        if name not in INCLUDABLE:
            raise RequestError(f"include has {name[:80]!r}; known: {', '.join(INCLUDABLE)}", param="include")


class OutputText(msgspec.Struct, kw_only=True, tag_field="type", tag="output_text"):
    text: str = ""
    annotations: list[Any] = []
    logprobs: list[TokenEntry] = []


class ReasoningText(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning_text"):
    text: str = ""


class MessageItem(msgspec.Struct, kw_only=True, tag_field="type", tag="message"):
    id: str
    status: str = "in_progress"
    role: str = "assistant"
    content: list[OutputText] = []


class FunctionCallItem(msgspec.Struct, kw_only=True, tag_field="type", tag="function_call"):
    id: str
    call_id: str
    name: str
    arguments: str = ""
    status: str = "in_progress"


class ReasoningItem(msgspec.Struct, kw_only=True, tag_field="type", tag="reasoning"):
    id: str
    summary: list[Any] = []
    content: list[ReasoningText] = []
    encrypted_content: str | msgspec.UnsetType = msgspec.UNSET
    status: str = "in_progress"


OutputItem = MessageItem | FunctionCallItem | ReasoningItem


class InputTokensDetails(msgspec.Struct, kw_only=True):
    cached_tokens: int


class OutputTokensDetails(msgspec.Struct, kw_only=True):
    reasoning_tokens: int


class ResponseUsage(msgspec.Struct, kw_only=True):
    input_tokens: int
    input_tokens_details: InputTokensDetails
    output_tokens: int
    output_tokens_details: OutputTokensDetails
    total_tokens: int


class ResponseError(msgspec.Struct, kw_only=True):
    code: str
    message: str


class IncompleteDetails(msgspec.Struct, kw_only=True):
    reason: str


class Response(msgspec.Struct, kw_only=True):
    """``status`` is queued, in_progress, completed, incomplete, failed or cancelled."""

    id: str
    object: str = "response"
    created_at: int
    completed_at: int | None = None
    status: str = "in_progress"
    background: bool = False
    error: ResponseError | None = None
    incomplete_details: IncompleteDetails | None = None
    instructions: str | None = None
    max_output_tokens: int | None = None
    max_tool_calls: None = None
    metadata: dict[str, str] = {}
    model: str
    output: list[OutputItem] = []
    parallel_tool_calls: bool = True
    previous_response_id: str | None = None
    prompt_cache_key: str | None = None
    reasoning: dict[str, Any] = {}
    safety_identifier: str | None = None
    service_tier: str = "default"
    store: bool = True
    temperature: float
    text: dict[str, Any] = {}
    tool_choice: str | dict[str, Any] = "auto"
    tools: list[dict[str, Any]] = []
    top_logprobs: int = 0
    top_p: float
    truncation: str = "disabled"
    usage: ResponseUsage | None = None
    user: str | None = None


class ItemList(msgspec.Struct, kw_only=True):
    object: str = "list"
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
