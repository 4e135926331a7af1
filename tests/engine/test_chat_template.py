"""Chat templates: none, named, broken (B066), refusing (B067), content in parts (B068), null content (B013)."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from twofold.engine.chat_template import ChatTemplate
from twofold.engine.sources import ModelFiles
from twofold.engine.tokenizer import load_tokenizer
from twofold.errors import ConfigError, RequestError

STRINGS = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
BOTH = (
    "{% for m in messages %}[{{ m.role }}]{% if m.content is string %}{{ m.content }}{% else %}"
    "{% for part in m.content %}{{ part.text }}|{% endfor %}{% endif %}{% endfor %}"
)
PARTS = "{% for m in messages %}[{{ m.role }}]{% for part in m.content %}{{ part.text }}|{% endfor %}{% endfor %}"
USER = {"role": "user", "content": "hi there"}
TWO_PARTS = [{"type": "text", "text": "hi "}, {"type": "text", "text": "there"}]


def template(text: str, **special: str) -> ChatTemplate:
    return ChatTemplate({"default": text}, "test", special)


def render(text: str, *messages: dict[str, Any], **options: Any) -> str:
    return template(text).render(list(messages), **options)


class TestChoice:
    def test_none(self) -> None:
        with pytest.raises(RequestError, match="no chat template"):
            ChatTemplate({}, "test", {}).render([USER])

    def test_named(self) -> None:
        named = ChatTemplate({"default": "plain", "tool_use": "tools"}, "test", {})
        assert named.render([USER]) == "plain"
        assert named.render([USER], tools=[]) == "plain"
        assert named.render([USER], tools=[{"type": "function", "function": {"name": "f"}}]) == "tools"

    def test_syntax_error_names_its_source(self) -> None:
        broken = ChatTemplate({"default": "a\n{% for %}"}, "my.jinja", {})
        with pytest.raises(RequestError, match=r"of my\.jinja has a syntax error in line 2"):
            broken.render([USER])
        with pytest.raises(ConfigError, match=r"of my\.jinja has a syntax error in line 2"):
            broken.check_syntax()

    def test_file_beside_the_config_wins(self, tiny_model: Callable[..., Path], tmp_path: Path) -> None:
        for name in ("tokenizer.json", "tokenizer_config.json"):
            (tmp_path / name).write_bytes((tiny_model("llama") / name).read_bytes())
        (tmp_path / "chat_template.jinja").write_text("from the file")
        files = ModelFiles("x", tmp_path, "directory")
        assert load_tokenizer(files).render_chat([USER]) == "from the file"
        other = tmp_path / "other.jinja"
        other.write_text("from the option")
        assert load_tokenizer(files, str(other)).render_chat([USER]) == "from the option"
        assert load_tokenizer(files, "{{ 'inline' }}").render_chat([USER]) == "inline"
        with pytest.raises(ConfigError, match=r"missing\.jinja"):
            load_tokenizer(files, "missing.jinja")
        other.write_text("{% if %}")
        with pytest.raises(ConfigError, match=r"other\.jinja"):
            load_tokenizer(files, str(other))
        (tmp_path / "chat_template.jinja").write_text("{% if %}")
        with pytest.raises(RequestError, match=r"chat_template\.jinja"):
            load_tokenizer(files).render_chat([USER])


class TestRefusal:
    RAISES = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}ok"

    def test_the_templates_own_words(self) -> None:
        with pytest.raises(RequestError, match="System role not supported") as caught:
            render(self.RAISES, {"role": "system", "content": "x"}, USER)
        assert caught.value.param == "messages"
        assert render(self.RAISES, USER) == "ok"

    def test_undefined_fields_and_type_errors(self) -> None:
        with pytest.raises(RequestError):
            render("{{ messages[0].nothing.more }}", USER)
        with pytest.raises(RequestError):
            render("{{ messages[0].content + 1 }}", USER)

    @pytest.mark.parametrize("attack", ["''.__class__.__mro__", "raise_exception.__globals__.items()"])
    def test_sandboxed(self, attack: str) -> None:
        with pytest.raises(RequestError):
            render("{{ " + attack + " }}", USER)

    def test_helpers(self) -> None:
        text = (
            "{{ strftime_now('%Y') | length }}{{ {'a': '<é>'} | tojson }}"
            "{% for x in [1, 2, 3] %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}"
        )
        assert render(text, USER) == '4{"a": "<é>"}1'

    def test_special_tokens_and_own_arguments(self) -> None:
        shown = template("{{ bos_token }}{{ mood }}{% if add_generation_prompt %}>{% endif %}", bos_token="<s>")
        assert shown.render([USER], template_kwargs={"mood": "calm"}) == "<s>calm>"
        assert shown.render([USER], add_generation_prompt=False) == "<s>"

    @pytest.mark.parametrize(
        ("messages", "param"),
        [
            ([], "messages"),
            ([{"content": "x"}], "messages[0].role"),
            ([USER, {"role": "user", "content": None}], "messages[1].content"),
            ([{"role": "user", "content": 5}], "messages[0].content"),
            ([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}], "messages[0].content[0].type"),
            ([{"role": "user", "content": [{"type": "text"}]}], "messages[0].content[0].text"),
            ([{"role": "user", "content": ["text"]}], "messages[0].content[0].type"),
        ],
    )
    def test_wrong_messages_name_the_field(self, messages: list[dict[str, Any]], param: str) -> None:
        with pytest.raises(RequestError) as caught:
            template(BOTH).render(messages)
        assert caught.value.param == param


class TestContent:
    @pytest.mark.parametrize("role", ["user", "system", "assistant", "tool"])
    def test_parts_are_joined_without_a_separator_for_string_templates(self, role: str) -> None:
        assert not template(STRINGS).accepts_parts
        assert render(STRINGS, {"role": role, "content": TWO_PARTS}) == f"[{role}]hi there"
        assert render(STRINGS, {"role": role, "content": []}) == f"[{role}]"

    def test_templates_that_know_parts_get_them(self) -> None:
        assert template(BOTH).accepts_parts
        assert render(BOTH, {"role": "user", "content": TWO_PARTS}) == "[user]hi |there|"
        assert render(BOTH, USER) == "[user]hi there"

    def test_templates_that_know_only_parts_get_strings_as_one_part(self) -> None:
        assert render(PARTS, USER) == "[user]hi there|"

    def test_null_and_absent_assistant_content_are_the_same(self) -> None:
        call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": '{"a": 1}'}}
        text = STRINGS + "{{ messages[1].tool_calls[0].function.arguments.a }}"
        history = [USER, {"role": "assistant", "content": None, "tool_calls": [call]}]
        absent = [USER, {"role": "assistant", "tool_calls": [call]}]
        assert render(text, *history) == render(text, *absent) == "[user]hi there[assistant]1"
        assert call["function"] == {"name": "f", "arguments": '{"a": 1}'}

    def test_continue_final_message(self) -> None:
        text = STRINGS + "{% if add_generation_prompt %}[assistant]{% endif %}<end>"
        final = {"role": "assistant", "content": "The answer is"}
        options = {"add_generation_prompt": False, "continue_final_message": True}
        assert render(text, USER, final, **options) == "[user]hi there[assistant]The answer is"
        with pytest.raises(RequestError, match="exclude each other"):
            render(text, USER, final, continue_final_message=True)


@pytest.mark.parametrize("name", ["tools", "add_generation_prompt", "continue_final_message"])
def test_extras_do_not_replace_fields(name: str) -> None:
    template = ChatTemplate({"default": "{{ messages[0].content }}{{ extra }}"}, "test", {})
    messages = [{"role": "user", "content": "x"}]
    assert template.render(messages, template_kwargs={"extra": 5}) == "x5"
    with pytest.raises(RequestError) as caught:
        template.render(messages, template_kwargs={name: "y"})
    assert caught.value.param == "chat_template_kwargs"
