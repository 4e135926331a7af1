"""Chat templates over HTTP: BOS once, none at all, refusals in the template's own words, sandboxing."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from pathlib import Path

import pytest
import transformers
from chain_model import ChainTokenizer
from http_server import RunningServer, running_server
from twofold.engine.sources import resolve_model
from twofold.engine.tokenizer import load_tokenizer
from twofold.errors import ConfigError

BOS = "<|bos|>"
PLAIN = "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% endfor %}"
STRICT = """{% for m in messages %}
{%- if m.role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}
{%- if (m.role == 'user') != (loop.index0 % 2 == 0) %}{{ raise_exception('Roles must alternate') }}{% endif %}
{{- m.content }}{% endfor %}"""


def write_tokenizer(folder: Path, template: str | list | None, *, add_bos: bool = False) -> Path:
    """A byte-level tokenizer whose pipeline adds BOS by itself where ``add_bos`` says so."""
    ChainTokenizer(specials=[BOS]).save(folder, template if isinstance(template, str) else None)
    path = folder / "tokenizer_config.json"
    settings = json.loads(path.read_text()) | {"bos_token": BOS, "add_bos_token": add_bos}
    if isinstance(template, list):
        settings["chat_template"] = template
    path.write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"model_type": "llama"}))
    return folder


@contextlib.contextmanager
def serving(folder: Path, override: str | None = None) -> Iterator[RunningServer]:
    tokenizer = load_tokenizer(resolve_model(str(folder)), override)
    client = {"core_factory": "wide_core:WideCore", "tokenizer": tokenizer}
    with running_server(folder, client=client) as server:
        yield server


def chat(server: RunningServer, *messages: tuple[str, object], **fields: object) -> dict:
    """Status and answer of a conversation."""
    body = {
        "model": server.model,
        "max_tokens": 1,
        "messages": [{"role": r, "content": c} for r, c in messages],
        **fields,
    }
    response = server.post("/v1/chat/completions", body)
    return {"status": response.status_code, **response.json()}


@pytest.mark.parametrize("template", ["{{ bos_token }}" + PLAIN, PLAIN])
def test_b065_bos_as_the_template_says(tmp_path: Path, template: str) -> None:
    with serving(write_tokenizer(tmp_path, template, add_bos=True)) as server:
        messages = [{"role": "user", "content": "hi there"}]
        judge = transformers.AutoTokenizer.from_pretrained(tmp_path)
        expected = judge.apply_chat_template(messages, tokenize=True, return_dict=False)
        assert server.post("/tokenize", {"messages": messages}).json()["tokens"] == expected
        assert expected.count(judge.bos_token_id) == template.count("bos_token")
        assert chat(server, ("user", "hi there"))["usage"]["prompt_tokens"] == len(expected)
        assert server.complete("hi", max_tokens=1)["usage"]["prompt_tokens"] == 3
        assert server.complete("hi", max_tokens=1, add_special_tokens=False)["usage"]["prompt_tokens"] == 2
        assert server.post("/tokenize", {"prompt": "hi"}).json()["tokens"][0] == judge.bos_token_id


def test_b066_no_template(tmp_path: Path) -> None:
    folder = write_tokenizer(tmp_path, None)
    with serving(folder) as server:
        assert server.complete("a", max_tokens=1)["choices"][0]["text"] == "b"
        answer = chat(server, ("user", "a"))
        assert answer["status"] == 400 and "no chat template" in answer["error"]["message"]
    template = tmp_path / "own.jinja"
    template.write_text(PLAIN)
    with serving(folder, str(template)) as server:
        assert chat(server, ("user", "a"))["usage"]["prompt_tokens"] == len("[user]a")
    template.write_text("{% for %}")
    with pytest.raises(ConfigError, match=r"own\.jinja"):
        load_tokenizer(resolve_model(str(folder)), str(template))


def test_b066_named_templates(tmp_path: Path) -> None:
    named = [{"name": "tool_use", "template": "TOOLS" + PLAIN}, {"name": "default", "template": PLAIN}]
    with serving(write_tokenizer(tmp_path, named)) as server:
        assert chat(server, ("user", "a"))["usage"]["prompt_tokens"] == len("[user]a")


def test_b067_template_raises(tmp_path: Path) -> None:
    with serving(write_tokenizer(tmp_path, STRICT)) as server:
        for messages, text in (
            ([("system", "x"), ("user", "a")], "System role not supported"),
            ([("developer", "x"), ("user", "a")], "System role not supported"),
            ([("user", "a"), ("user", "b")], "Roles must alternate"),
        ):
            answer = chat(server, *messages)
            assert answer["status"] == 400 and text in answer["error"]["message"]
            assert answer["error"]["type"] == "invalid_request_error"
        assert chat(server)["status"] == 400
        assert chat(server, ("alien", "a"))["status"] == 400
        assert chat(server, ("user", "a"))["status"] == 200


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{{ strftime_now('%Y')|length }}{{ messages[0].content }}", "4a"),
        ("{{ messages[0]|tojson|length > 5 }}", "True"),
        ("{% for m in [1, 2, 3] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}a", "1a"),
        ("{{ nothing }}a{% if messages[0].nothing is defined %}b{% endif %}", "a"),
        ("{{ flavor|default('none') }}", "none"),
    ],
)
def test_b067_template_helpers(tmp_path: Path, template: str, expected: str) -> None:
    with serving(write_tokenizer(tmp_path, template)) as server:
        assert chat(server, ("user", "a"))["usage"]["prompt_tokens"] == len(expected)
        flavored = chat(server, ("user", "a"), chat_template_kwargs={"flavor": "cherry"})
        if "flavor" in template:
            assert flavored["usage"]["prompt_tokens"] == len("cherry")
        for clash in ("messages", "chat_template", "add_generation_prompt", "tools"):
            assert chat(server, ("user", "a"), chat_template_kwargs={clash: "x"})["status"] in (200, 400)


@pytest.mark.parametrize(
    "template", ["{{ messages.__class__ }}", "{{ ''.__class__.__mro__ }}", "{{ raise_exception.__globals__ }}"]
)
def test_b067_sandbox(tmp_path: Path, template: str) -> None:
    with serving(write_tokenizer(tmp_path, template)) as server:
        answer = chat(server, ("user", "a"))
        # An undefined name prints nothing, and then the prompt is empty; either way nothing of the host shows.
        assert answer["status"] == 400 and "class" not in answer["error"]["message"].replace("__class__", "")


def test_b068_parts_aware_template(tmp_path: Path) -> None:
    template = "{% for m in messages %}{% for p in m.content %}<{{ p.text }}>{% endfor %}{% endfor %}"
    with serving(write_tokenizer(tmp_path, template)) as server:
        parts = [{"type": "text", "text": "hi "}, {"type": "text", "text": "you"}]
        assert chat(server, ("user", parts))["usage"]["prompt_tokens"] == len("<hi ><you>")
        assert chat(server, ("user", "hi you"))["usage"]["prompt_tokens"] == len("<hi you>")


def test_tool_arguments_may_be_anything(tmp_path: Path) -> None:
    calls = "{% for c in m.tool_calls or [] %}{{ c.function.arguments }}{% endfor %}"
    template = "{% for m in messages %}{{ m.content }}" + calls + "{% endfor %}"
    with serving(write_tokenizer(tmp_path, template)) as server:
        for arguments in ("{}", "not json", "[" * 100_000, ""):
            call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": arguments}}
            messages = [{"role": "user", "content": "a"}, {"role": "assistant", "tool_calls": [call]}]
            response = server.post("/v1/chat/completions", {"model": server.model, "messages": messages})
            assert response.status_code in (200, 400), response.text
