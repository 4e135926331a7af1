"""Thoughts told apart from answers over HTTP, in whole answers and in streams, with a budget."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import anthropic
import pytest
from chain_model import build_chain_model
from http_server import RunningServer, running_server
from twofold.server.thought_tokens import num_thought_tokens

THINKING = "{% for m in messages %}{{ m.content }}{% endfor %}{# <think> </think> #}"
OPENED = (
    "{% for m in messages %}{{ m.content }}{% endfor %}{% if enable_thinking is not defined or enable_thinking %}"
    + ("<think>\n{% else %}<think>\n\n</think>\n\n{% endif %}")
)
HARMONY = "{% for m in messages %}{{ m.content }}{% endfor %}{# <|channel|> tools #}"
SCRIPTS: list[list[bytes | str]] = [
    ["C", b"<think>x", b"y", b"</think>", b"be", b"cause"],
    ["D", "o", "k"],
]


@pytest.fixture(scope="module")
def thinker(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """A scripted model that thinks."""
    folder = tmp_path_factory.mktemp("thinker")
    build_chain_model(folder, SCRIPTS, chat_template=THINKING)
    with running_server(folder, num_threads=1) as server:
        yield server


@pytest.fixture(scope="module")
def opened(tiny_model: Callable[..., Path]) -> Iterator[RunningServer]:
    """A random model whose prompt begins the thoughts."""
    with running_server(tiny_model("llama"), num_threads=1, chat_template=OPENED) as server:
        yield server


def ask(server: RunningServer, content: str, **options: Any) -> Any:
    messages = [{"role": "user", "content": content}]
    return server.openai.chat.completions.create(
        **{"model": server.model, "messages": messages, "max_tokens": 60, **options}
    )


def test_split(thinker: RunningServer) -> None:
    message = ask(thinker, "C").choices[0].message
    assert (message.content, message.reasoning_content, message.reasoning) == ("because", "xy", "xy")
    thoughts = content = ""
    for chunk in ask(thinker, "C", stream=True):
        delta = chunk.choices[0].delta
        thoughts += getattr(delta, "reasoning_content", None) or ""
        content += delta.content or ""
        assert not (getattr(delta, "reasoning_content", None) and delta.content)
    assert (thoughts, content) == ("xy", "because")
    plain = ask(thinker, "D").choices[0].message
    assert plain.content == "ok" and not hasattr(plain, "reasoning_content")


def test_usage_counts_thoughts(thinker: RunningServer) -> None:
    """C's thoughts are the tokens ``<think>x`` and ``y``; the end mark, the answer and the end of text are none."""
    for answer in (ask(thinker, "C"), ask(thinker, "C", extra_body={"include_reasoning": False})):
        assert answer.usage.completion_tokens_details.reasoning_tokens == 2 < answer.usage.completion_tokens
    assert ask(thinker, "C", n=3).usage.completion_tokens_details.reasoning_tokens == 6
    assert ask(thinker, "C", max_tokens=1).usage.completion_tokens_details.reasoning_tokens == 1
    assert ask(thinker, "D").usage.completion_tokens_details.reasoning_tokens == 0
    *_, last = ask(thinker, "C", stream=True, stream_options={"include_usage": True})
    assert last.usage.completion_tokens_details.reasoning_tokens == 2
    response = thinker.openai.responses.create(model=thinker.model, input="C")
    assert response.usage.output_tokens_details.reasoning_tokens == 2
    with anthropic.Anthropic(base_url=thinker.url, api_key="none", max_retries=0) as client:
        turn = {"role": "user", "content": "C"}
        message = client.messages.create(model=thinker.model, max_tokens=60, messages=[turn])
        assert message.usage.output_tokens_details.thinking_tokens == 2


@pytest.mark.parametrize(
    ("pieces", "style", "options", "expected"),
    [
        (["<th", "ink>", "a", "b</thi", "nk>c"], "think", {}, 2),
        (["a", "b", "</think>", "c"], "think", {"opened": True}, 2),
        (["a", "b"], "think", {"opened": True}, 2),
        (["a", "b"], "think", {"closed": True}, 0),
        (["a <think>b</think>"], "think", {}, 0),
        (["\n", "<think>", "\n", "x", "</think>"], "think", {}, 2),
        (["<think>x</think>"], None, {}, 0),
        (
            [
                "<|channel|>",
                "analysis",
                "<|message|>",
                "a",
                "b",
                "<|end|>",
                "<|start|>assistant<|channel|>",
                "analysis",
                "<|message|>",
                "c",
                "<|end|>",
                "<|start|>assistant<|channel|>final<|message|>",
                "d",
            ],
            "gpt_oss",
            {},
            3,
        ),
        (["<|channel|>", "analysis", "<|message|>", "a", "b"], "gpt_oss", {}, 2),
        (["<|channel|>analysis to=functions.f<|message|>", "{}"], "gpt_oss", {}, 0),
    ],
)
def test_tokens_of_thoughts(pieces: list[str], style: str | None, options: dict[str, bool], expected: int) -> None:
    ids = range(len(pieces))
    assert num_thought_tokens(ids, lambda token: pieces[token].encode(), style, **options) == expected


def test_cut_thoughts(thinker: RunningServer) -> None:
    choice = ask(thinker, "C", max_tokens=2).choices[0]
    assert choice.finish_reason == "length" and choice.message.content == ""
    assert choice.message.reasoning_content == "xy"


def test_left_out(thinker: RunningServer) -> None:
    message = ask(thinker, "C", extra_body={"include_reasoning": False}).choices[0].message
    assert message.content == "because" and not hasattr(message, "reasoning_content")


def test_history_may_hold_thoughts(thinker: RunningServer) -> None:
    turns = [{"role": "user", "content": "C"}, {"role": "assistant", "content": "because", "reasoning": "xy"}]
    answer = thinker.openai.chat.completions.create(
        model=thinker.model, messages=[*turns, {"role": "user", "content": "D"}], max_tokens=5
    )
    assert answer.choices[0].message.content == "ok"


@pytest.mark.parametrize("budget", [0, 5])
def test_budget(opened: RunningServer, budget: int) -> None:
    """The end is forced after so many tokens of thought; then the form of the answer holds."""
    options = {"extra_body": {"thinking_token_budget": budget, "structured_outputs": {"regex": "[ab]{6}"}}}
    answer = ask(opened, "x", seed=1, n=3, **options)
    for choice in answer.choices:
        assert set(choice.message.content) <= set("ab") and len(choice.message.content) == 6
        assert choice.finish_reason == "stop"
        assert len((getattr(choice.message, "reasoning_content", "") or "").encode()) <= 3 * budget
    assert answer.usage.completion_tokens <= 3 * (budget + len("\n</think>\n\n") + 2 + 6)


def test_a_form_holds_for_the_answer_only(opened: RunningServer) -> None:
    """Without a budget the random model never ends its thoughts, and no end of text gets it out of them."""
    bias = {"256": 100.0}
    choice = ask(opened, "x", response_format={"type": "json_object"}, max_tokens=30, logit_bias=bias).choices[0]
    assert choice.finish_reason == "length" and choice.message.content == "" and choice.message.reasoning_content


def test_thoughts_that_the_prompt_has_closed(opened: RunningServer) -> None:
    off = {"chat_template_kwargs": {"enable_thinking": False}}
    form = {"type": "json_schema", "json_schema": {"name": "b", "schema": {"type": "boolean"}}}
    for extra in (off, {"reasoning_effort": "none"}):
        message = ask(opened, "x", response_format=form, extra_body=extra).choices[0].message
        assert json.loads(message.content) in (True, False) and not hasattr(message, "reasoning_content")


def test_budget_for_a_model_that_does_not_think(tiny: RunningServer) -> None:
    body = {"model": tiny.model, "messages": [{"role": "user", "content": "x"}], "thinking_token_budget": 5}
    response = tiny.post("/v1/chat/completions", body)
    assert response.status_code == 400 and response.json()["error"]["param"] == "thinking_token_budget"


def test_channels(tmp_path: Path) -> None:
    """gpt-oss's marks are special tokens, which the parser sees and the client does not."""
    specials = ("<|channel|>", "<|message|>", "<|end|>", "<|start|>", "<|constrain|>", "<|call|>")
    script: list[bytes | str] = ["A", "<|channel|>", b"analysis", "<|message|>", b"Hm", "<|end|>"]
    build_chain_model(tmp_path, [script], specials=specials, chat_template=HARMONY)
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    tools = [{"type": "function", "function": {"name": "f", "parameters": schema}}]
    with running_server(tmp_path, num_threads=1) as server:
        plain = ask(server, "A").choices[0].message
        assert (plain.content, plain.reasoning_content) == ("", "Hm")
        form = {"type": "json_schema", "json_schema": {"name": "b", "schema": {"const": 7}}}
        answer = ask(server, "A", response_format=form, temperature=0).choices[0]
        assert (answer.message.content, answer.message.reasoning_content) == ("7", "Hm")
        assert answer.finish_reason == "stop"
        answer = ask(server, "A", tools=tools, tool_choice="required", temperature=0, max_tokens=200).choices[0]
        assert answer.finish_reason == "tool_calls" and answer.message.content is None
        assert answer.message.reasoning_content == "Hm"
        assert [call.function.name for call in answer.message.tool_calls] == ["f"]
