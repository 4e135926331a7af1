"""What each family's calls and thoughts turn into, however the text is cut."""

from __future__ import annotations

import itertools
import json

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tool_texts import BOTH, CASES, NOW, PARAMETERS, PARIS, TOOLS, calls, read
from twofold.server.answer_reader import AnswerReader
from twofold.server.config import TOOL_PARSERS
from twofold.server.reasoning import ThinkParser, prompt_state
from twofold.server.tools.events import Event, Text, Thought
from twofold.server.tools.formats import FORMATS, choose_format

MARKS = sorted({mark for tool_format in FORMATS.values() for mark in tool_format.marks})


def reader_of(name: str, *, parallel: bool = True) -> AnswerReader:
    return AnswerReader(None, FORMATS[name].parser(TOOLS), parallel=parallel)


def cut(text: str, places: list[int]) -> list[str]:
    """The text in pieces that end at these places."""
    bounds = [0, *sorted(place % (len(text) + 1) for place in places), len(text)]
    return [text[start:end] for start, end in itertools.pairwise(bounds)]


@pytest.mark.parametrize(("name", "text", "events"), CASES)
def test_what_a_text_means(name: str, text: str, events: list[Event]) -> None:
    assert read(reader_of(name), [text]) == events
    assert read(reader_of(name), list(text)) == events, "character by character"


@settings(max_examples=150, deadline=None)
@given(st.sampled_from(CASES), st.lists(st.integers(0, 400), max_size=12))
def test_cuts_do_not_matter(case: tuple[str, str, list[Event]], places: list[int]) -> None:
    name, text, events = case
    assert read(reader_of(name), cut(text, places)) == events


PIECES = st.lists(
    st.sampled_from(
        [
            *MARKS,
            "{",
            "}",
            "[",
            "]",
            '"',
            ":",
            ",",
            "\\",
            "name",
            '"name": "now"',
            '"arguments"',
            "now",
            "weather",
            "x",
            " ",
            "\n",
            "<think>",
            "</think>",
            "```json\n",
            "function",
            "to=functions.now",
            "analysis",
            "1",
            "é",
            f'{{"name": "weather", "arguments": {PARIS}}}',
        ]
    ),
    max_size=14,
)


@settings(max_examples=400, deadline=None)
@given(st.sampled_from(sorted(FORMATS)), PIECES, st.lists(st.integers(0, 400), max_size=20))
def test_cuts_do_not_matter_in_any_text(name: str, pieces: list[str], places: list[int]) -> None:
    text = "".join(pieces)

    def reader() -> AnswerReader:
        thoughts = None if name == "gpt_oss" else ThinkParser()
        return AnswerReader(thoughts, FORMATS[name].parser(TOOLS))

    assert read(reader(), cut(text, places)) == read(reader(), [text])


@settings(max_examples=100, deadline=None)
@given(st.sampled_from(sorted(set(FORMATS) - {"gpt_oss"})), st.text(alphabet="abc {}<>[]|\n\t_,\"'é", max_size=40))
def test_text_without_calls_stays(name: str, text: str) -> None:
    events = read(reader_of(name), [text])
    assert "".join(event.text for event in events if isinstance(event, Text)) == text or not text.strip()
    assert all(isinstance(event, Text) for event in events)


@pytest.mark.parametrize("name", ["hermes", "mistral", "deepseek_v31", "glm", "qwen3_coder", "json"])
def test_b083_one_call_only(name: str) -> None:
    text = next(text for known, text, events in CASES if known == name and events[-4:] == BOTH)
    events = read(reader_of(name, parallel=False), list(text))
    assert events[-2:] == BOTH[:2] and BOTH[2] not in events


def test_calls_count_when_their_arguments_are_whole() -> None:
    whole, part = reader_of("hermes"), reader_of("hermes")
    read(whole, ['<tool_call>{"name": "now", "arguments": {}}'])
    read(part, ['<tool_call>{"name": "now", "arguments": {"a": '])
    assert whole.has_calls and not part.has_calls and not reader_of("hermes").has_calls


@pytest.mark.parametrize(
    ("state", "text", "events"),
    [
        ({}, "<think>\nWhy?\n</think>\n\nBecause. ", [Thought("Why?"), Text("Because. ")]),
        ({}, "\n<think>a</think>b", [Thought("a"), Text("b")]),
        ({}, "No <think>ing", [Text("No <think>ing")]),
        ({}, "<thi", [Text("<thi")]),
        ({"opened": True}, "Why?</think>Because", [Thought("Why?"), Text("Because")]),
        ({"opened": True}, "Why? </thin", [Thought("Why? </thin")]),
        ({"closed": True}, "\n\n<think>x", [Text("\n\n<think>x")]),
        ({}, "  indented ", [Text("  indented ")]),
    ],
)
def test_thoughts(state: dict, text: str, events: list[Event]) -> None:
    for pieces in ([text], list(text)):
        assert read(AnswerReader(ThinkParser(**state), None), pieces) == events


def test_thoughts_then_calls() -> None:
    text = (
        '<think>I need {"name": "now"} <tool_call>.</think>\n\n<tool_call>{"name": "now", "arguments": {}}</tool_call>'
    )
    events = [Thought('I need {"name": "now"} <tool_call>.'), *calls(("now", NOW))]
    for pieces in ([text], list(text)):
        assert read(AnswerReader(ThinkParser(), FORMATS["hermes"].parser(TOOLS)), pieces) == events


def test_how_a_prompt_ends() -> None:
    assert prompt_state("<|assistant|>\n<think>\n") == (True, False)
    assert prompt_state("<|assistant|>\n<think>\n\n</think>\n\n") == (False, True)
    assert prompt_state("say <think> <|assistant|>") == (False, False)


@pytest.mark.parametrize(
    ("template", "name"),
    [
        ("{{ '<tool_call>' }}", "hermes"),
        ("<|python_tag|>", "llama3"),
        ('{"name": function name, "parameters": dictionary} Environment: ipython', "llama3"),
        ("[TOOL_CALLS] [", "mistral"),
        ("[TOOL_CALLS]{{ name }}[ARGS]", "mistral_args"),
        ("<｜tool▁call▁begin｜>function<｜tool▁sep｜>```json", "deepseek_v3"),
        ("<｜tool▁call▁begin｜>{{ name }}<｜tool▁sep｜>", "deepseek_v31"),
        ("<tool_call>{function-name}<arg_key>", "glm"),
        ("<tool_call>\n<function={{ name }}>\n<parameter=", "qwen3_coder"),
        ("<|start|>system<|channel|>", "gpt_oss"),
        ("{{ messages }}", "json"),
        ("", "json"),
    ],
)
def test_choice_by_template(template: str, name: str) -> None:
    assert choose_format(template).name == name
    assert choose_format(template, "mistral").name == "mistral"


def test_options_name_every_format() -> None:
    assert set(TOOL_PARSERS) == {"auto", *FORMATS}


def test_arguments_of_the_cases_are_json() -> None:
    assert json.loads(PARIS)["days"] == 2 and set(json.loads(PARIS)) <= set(PARAMETERS["properties"])
