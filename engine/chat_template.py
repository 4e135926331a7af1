"""Chat templates: from a conversation to the text that the model was trained to read.

Rendering is transformers' own (sandboxed Jinja with ``raise_exception``, ``strftime_now``, ``tojson``, loop controls);
this module prepares the messages and turns failures into errors for the client.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2

from ..errors import ConfigError, RequestError

PROBE = "probe-of-content"


class ChatTemplate:
    """One model's templates by name: ``default``, and ``tool_use`` where tools are given.

    ``source`` names where they come from, for errors. Templates see the ``special_tokens`` (``bos_token`` ...).
    """

    def __init__(self, templates: Mapping[str, str], source: str, special_tokens: Mapping[str, str]) -> None:
        self._templates = dict(templates)
        self._special_tokens = dict(special_tokens)
        self._source = source

    @functools.cached_property
    def accepts_parts(self) -> bool:
        """Whether it prints content that is a list of parts. The first look takes a second: it imports transformers."""
        return self._shows([{"type": "text", "text": PROBE}])

    @functools.cached_property
    def _accepts_text(self) -> bool:
        return self._shows(PROBE)

    @property
    def is_defined(self) -> bool:
        return bool(self._templates)

    @property
    def text(self) -> str:
        """The source: that for conversations with tools where there is one, else the default."""
        return self._templates.get("tool_use", self._templates.get("default", ""))

    def check_syntax(self) -> None:
        """Raise ConfigError now for a template that could only fail at the first request."""
        for template in self._templates.values():
            try:
                self._render(template, [{"role": "user", "content": PROBE}], add_generation_prompt=True)
            except jinja2.TemplateSyntaxError as error:
                raise ConfigError(self._syntax_message(error)) from None
            except Exception:  # a template may refuse this conversation for any reason of its own
                continue

    def render(
        self,
        messages: Sequence[Mapping[str, Any]],
        *,
        tools: Sequence[Mapping[str, Any]] | None = None,
        add_generation_prompt: bool = True,
        continue_final_message: bool = False,
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> str:
        """The prompt's text. RequestError when there is no template, or when it refuses the conversation.

        Content given as a list of text parts is joined without a separator for templates that expect a string.
        """
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other", param="continue_final_message"
            )
        template = self._choose(bool(tools))
        prepared = prepare_messages(messages, as_parts=self.accepts_parts, as_text=self._accepts_text)
        options = {
            "tools": [dict(tool) for tool in tools] if tools else None,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
        }
        extras = dict(template_kwargs or {})
        if clashes := sorted(set(options) & set(extras)):
            raise RequestError(
                f"chat_template_kwargs has {clashes[0]!r}, which has a field of its own", param="chat_template_kwargs"
            )
        try:
            return self._render_calls(template, prepared, options | extras)
        except jinja2.TemplateSyntaxError as error:
            raise RequestError(self._syntax_message(error), param="messages") from None
        except jinja2.TemplateError as error:
            raise RequestError(
                f"the chat template refuses these messages: {error.message or error}", param="messages"
            ) from None
        except (TypeError, ValueError, KeyError, AttributeError) as error:
            raise RequestError(f"the chat template cannot render these messages: {error}", param="messages") from None

    def _choose(self, has_tools: bool) -> str:
        if not self._templates:
            raise RequestError(
                "this model has no chat template; use plain completions, or start with --chat-template FILE",
                param="messages",
            )
        if has_tools and "tool_use" in self._templates:
            return self._templates["tool_use"]
        if "default" in self._templates:
            return self._templates["default"]
        raise RequestError(f"no default chat template among {', '.join(self._templates)}", param="messages")

    def _syntax_message(self, error: jinja2.TemplateSyntaxError) -> str:
        return f"the chat template of {self._source} has a syntax error in line {error.lineno}: {error.message}"

    def _render(self, template: str, messages: list[dict[str, Any]], **options: Any) -> str:
        from transformers.utils.chat_template_utils import render_jinja_template

        settings = self._special_tokens | options
        result: Any = render_jinja_template([messages], chat_template=template, **settings)
        return result[0][0]

    def _render_calls(self, template: str, messages: list[dict[str, Any]], options: dict[str, Any]) -> str:
        """Most templates print a call's arguments as an object; where one cannot, it wants the JSON text."""
        try:
            return self._render(template, messages, **options)
        except (TypeError, jinja2.TemplateError):
            if not any(message.get("tool_calls") for message in messages):
                raise
            return self._render(template, [_with_text_arguments(message) for message in messages], **options)

    def _shows(self, content: str | list[dict[str, str]]) -> bool:
        """Whether the default template prints a user's content as text, and not as the form of a list."""
        template = self._templates.get("default", next(iter(self._templates.values()), ""))
        try:
            text = self._render(template, [{"role": "user", "content": content}], add_generation_prompt=True)
        except Exception:  # refusing is an answer, too
            return False
        return PROBE in text and "'text'" not in text and '"text"' not in text


def prepare_messages(
    messages: Sequence[Mapping[str, Any]], *, as_parts: bool = False, as_text: bool = True
) -> list[dict[str, Any]]:
    """Check OpenAI-style messages and bring them into the form that templates expect.

    Null fields are dropped; an assistant's absent content becomes empty text; arguments of tool calls are parsed from
    JSON. RequestError names the wrong field as ``messages[i]...``.
    """
    if not messages:
        raise RequestError("messages is empty; give at least one", param="messages")
    return [_prepare(message, f"messages[{index}]", as_parts, as_text) for index, message in enumerate(messages)]


def _prepare(message: Mapping[str, Any], where: str, as_parts: bool, as_text: bool) -> dict[str, Any]:
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise RequestError(f"{where} needs a role", param=f"{where}.role")
    prepared = {key: value for key, value in message.items() if value is not None}
    content = prepared.get("content")
    if content is None:
        if prepared["role"] != "assistant":
            raise RequestError(f"{where}.content is missing", param=f"{where}.content")
        content = ""
    prepared["content"] = _content(content, f"{where}.content", as_parts, as_text)
    if prepared.get("tool_calls"):
        prepared["tool_calls"] = [_tool_call(call) for call in prepared["tool_calls"]]
    return prepared


def _content(content: Any, where: str, as_parts: bool, as_text: bool) -> str | list[dict[str, str]]:
    if isinstance(content, str):
        return content if as_text or not as_parts else [{"type": "text", "text": content}]
    if not isinstance(content, Sequence):
        raise RequestError(f"{where} must be a string or a list of text parts", param=where)
    texts = [_part_text(part, f"{where}[{index}]") for index, part in enumerate(content)]
    return [{"type": "text", "text": text} for text in texts] if as_parts else "".join(texts)


def _part_text(part: Any, where: str) -> str:
    kind = part.get("type") if isinstance(part, Mapping) else None
    if kind != "text":
        raise RequestError(f"{where} has type {kind!r}; this model reads only text parts", param=f"{where}.type")
    text = part.get("text")
    if not isinstance(text, str):
        raise RequestError(f"{where} has no text", param=f"{where}.text")
    return text


def _tool_call(call: Any) -> Any:
    """A copy whose arguments are an object: clients send JSON text, templates print objects."""
    if not isinstance(call, Mapping) or not isinstance(call.get("function"), Mapping):
        return call
    function = dict(call["function"])
    if isinstance(function.get("arguments"), str):
        try:
            function["arguments"] = json.loads(function["arguments"])
        except (ValueError, RecursionError):
            return call
    return {**call, "function": function}


def _with_text_arguments(message: dict[str, Any]) -> dict[str, Any]:
    if not message.get("tool_calls"):
        return message
    calls = []
    for call in message["tool_calls"]:
        function = call.get("function") if isinstance(call, Mapping) else None
        if isinstance(function, Mapping) and not isinstance(function.get("arguments"), str):
            text = json.dumps(function.get("arguments") or {}, ensure_ascii=False)
            call = {**call, "function": {**function, "arguments": text}}
        calls.append(call)
    return {**message, "tool_calls": calls}


def read_override(option: str) -> tuple[dict[str, str], str]:
    """The template that the user gave: a file's path, or the template itself. ConfigError when neither."""
    if "{" in option or "\n" in option:
        return {"default": option}, "the chat_template option"
    path = Path(option).expanduser()
    try:
        return {"default": path.read_text(encoding="utf-8")}, str(path)
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"chat template {option!r} cannot be read: {error}") from None


def stored_templates(stored: Any) -> dict[str, str]:
    """Templates by name from the value of ``chat_template`` in a config: one text, or a list of named ones."""
    if isinstance(stored, str):
        return {"default": stored}
    if isinstance(stored, list):
        return {entry["name"]: entry["template"] for entry in stored}
    return dict(stored or {})


def read_templates(directory: Path, settings: Mapping[str, Any]) -> tuple[dict[str, str], str]:
    """The templates of a model folder by name, and where they were found; newer places win over older ones."""
    templates, source = stored_templates(settings.get("chat_template")), str(directory / "tokenizer_config.json")
    legacy, file = directory / "chat_template.json", directory / "chat_template.jinja"
    if not templates and legacy.is_file():
        source = str(legacy)
        templates = stored_templates(json.loads(legacy.read_text(encoding="utf-8")).get("chat_template"))
    if file.is_file():
        source = str(file)
        templates["default"] = file.read_text(encoding="utf-8")
    for extra in sorted((directory / "additional_chat_templates").glob("*.jinja")):
        templates[extra.stem] = extra.read_text(encoding="utf-8")
    return templates, source
