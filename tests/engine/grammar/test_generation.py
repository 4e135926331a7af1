"""Structured output through the whole engine, on small random models."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from structured_models import check_valid, random_schema
from twofold import LLM, SamplingParams
from twofold.engine.outputs import CompletionOutput
from twofold.engine.structured_output import ReasoningSpan, StructuredOutput
from twofold.errors import RequestError

SCHEMA = {
    "type": "object",
    "properties": {"c": {"$ref": "#/$defs/C"}, "n": {"type": "integer", "minimum": 0, "maximum": 99}},
    "required": ["c", "n"],
    "additionalProperties": False,
    "$defs": {"C": {"enum": ["red", "blue"]}},
}


@pytest.fixture(scope="module")
def llm(tiny_model: Callable[..., Path]) -> Iterator[LLM]:
    """Small steps and few blocks: prompts are chunked and samples preempted."""
    folder = tiny_model("llama")
    with LLM(folder, num_threads=1, max_num_batched_tokens=16, max_num_seqs=8, kv_cache_bytes=300_000) as made:
        yield made


def run(llm: LLM, prompts: list[str], **options: object) -> list[CompletionOutput]:
    params = SamplingParams(**{"max_tokens": 300, "seed": 5, **options})
    return [sample for output in llm.generate(prompts, params, progress=False) for sample in output.outputs]


def test_random_schemas(llm: LLM) -> None:
    rng = random.Random(11)
    schemas = [random_schema(rng) for _ in range(60)]
    params = [
        SamplingParams(max_tokens=300, seed=i, structured=StructuredOutput(json=s)) for i, s in enumerate(schemas)
    ]
    finished = 0
    for schema, output in zip(schemas, llm.generate(["x"] * len(schemas), params, progress=False), strict=True):
        sample = output.outputs[0]
        if sample.finish_reason == "stop":
            finished += 1
            check_valid(sample.text, schema)
    assert finished >= 55, "short instances end well before 300 tokens"


def test_preemption_chunks_and_siblings(llm: LLM) -> None:
    long = {"type": "string", "minLength": 70, "maxLength": 80}
    schema = {**SCHEMA, "properties": {**SCHEMA["properties"], "s": long}, "required": ["c", "n", "s"]}
    form = StructuredOutput(json=schema)
    before = llm._core.stats().num_preemptions
    samples = run(llm, ["a long prompt of several chunks"] * 6, n=3, logprobs=2, structured=form)
    assert llm._core.stats().num_preemptions > before, "the pool is small enough"
    for sample in samples:
        check_valid(sample.text, schema)
        assert sample.finish_reason == "stop" and len(sample.logprobs) == len(sample.token_ids)
    alone = run(llm, ["a long prompt of several chunks"], n=3, structured=form)
    assert [sample.text for sample in samples[:3]] == [sample.text for sample in alone], "the same in any batch"


def test_free_rows_beside_constrained_ones(llm: LLM) -> None:
    free = SamplingParams(max_tokens=20, temperature=0.0, ignore_eos=True)
    (alone,) = llm.generate("hello", free, progress=False)
    bound = SamplingParams(max_tokens=100, temperature=0.0, structured=StructuredOutput(regex="[ab]{8}"))
    both = llm.generate(["hello", "hello"], [bound, free], progress=False)
    assert both[1].outputs[0].token_ids == alone.outputs[0].token_ids
    assert len(both[0].outputs[0].text) == 8 and set(both[0].outputs[0].text) <= set("ab")


def test_b076_unicode_values(llm: LLM) -> None:
    values = ["晴天", "naïve", "😀", 'a"b', "tab\t"]
    schema = {"type": "object", "properties": {"état": {"enum": values}}, "required": ["état"]}
    schema["additionalProperties"] = False
    for sample in run(llm, ["x"], n=20, structured=StructuredOutput(json=schema)):
        assert json.loads(sample.text)["état"] in values


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#/definitions/T", "definitions": {"T": {"enum": ["red", "blue"]}}},
        {"properties": {"a": {"enum": ["x"]}, "b": {"$ref": "#/properties/a"}}, "required": ["b"], "type": "object"},
        {"$ref": "#/$defs/a~1b", "$defs": {"a/b": {"enum": [1, 2]}}},
        {"$defs": {"B": {"$ref": "#/$defs/A"}, "A": {"const": 7}}, "$ref": "#/$defs/B"},
        {
            "$ref": "#/$defs/tree",
            "$defs": {
                "tree": {
                    "type": "object",
                    "properties": {"kids": {"type": "array", "items": {"$ref": "#/$defs/tree"}, "maxItems": 1}},
                    "additionalProperties": False,
                }
            },
        },
    ],
)
def test_b074_references(llm: LLM, schema: dict) -> None:
    if "properties" in schema:
        schema = {**schema, "additionalProperties": False}
    samples = run(llm, ["x"], n=12, structured=StructuredOutput(json=schema))
    finished = [sample for sample in samples if sample.finish_reason == "stop"]
    assert finished
    for sample in finished:
        check_valid(sample.text, schema)


def test_b078_white_space_ends(llm: LLM) -> None:
    schema = {"type": "object", "properties": {"s": {"type": "string", "maxLength": 5}}, "required": ["s"]}
    schema["additionalProperties"] = False
    bias = {32: 20.0, 10: 20.0}
    for sample in run(llm, ["x"], n=8, max_tokens=200, logit_bias=bias, structured=StructuredOutput(json=schema)):
        assert sample.finish_reason == "stop"
        check_valid(sample.text, schema)


def test_end_of_text_only_where_the_form_may_end(llm: LLM) -> None:
    form = StructuredOutput(regex="a{3}a*")
    for sample in run(llm, ["x"], n=4, logit_bias={256: 100.0}, ignore_eos=True, structured=form):
        assert sample.text == "aaa" and sample.finish_reason == "stop" and sample.token_ids[-1] == 256
    (cut,) = run(llm, ["x"], max_tokens=2, structured=form)
    assert cut.finish_reason == "length" and cut.text == "aa"


def test_stop_strings(llm: LLM) -> None:
    (sample,) = run(llm, ["x"], structured=StructuredOutput(regex="ab{50}"), stop=("bbb",))
    assert sample.text == "a" and sample.stop_reason == "bbb"


def test_nothing_left_to_draw(llm: LLM) -> None:
    (sample,) = run(llm, ["x"], structured=StructuredOutput(regex="a"), logit_bias={97: -100})
    assert sample.finish_reason == "error" and "every token is banned" in (sample.error or "")


def test_refused_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(RequestError) as caught:
        run(llm, ["x"], structured=StructuredOutput(json={"not": {}}))
    assert caught.value.param == "structured"
    with pytest.raises(RequestError):
        SamplingParams(structured={"regex": "a"})


@pytest.mark.parametrize("budget", [0, 1, 7])
def test_thoughts_end_with_their_budget(llm: LLM, budget: int) -> None:
    span = ReasoningSpan(start="<t>", end="</t>", opened=True, budget=budget)
    (sample,) = run(
        llm, ["x"], max_tokens=40, ignore_eos=True, reasoning=span, structured=StructuredOutput(regex="[ab]{4}")
    )
    assert bytes(sample.token_ids[budget : budget + 4]) == b"</t>"
    assert sample.text.endswith(tuple("ab")) and set(sample.text[-4:]) <= set("ab")
    assert len(sample.token_ids) <= budget + 4 + 2 + 4 and sample.finish_reason == "stop"


def test_budget_without_a_form(llm: LLM) -> None:
    span = ReasoningSpan(start="<t>", end="</t>", opened=True, budget=3, closing="!</t>")
    (sample,) = run(llm, ["x"], max_tokens=12, ignore_eos=True, reasoning=span)
    assert bytes(sample.token_ids[3:8]) == b"!</t>" and len(sample.token_ids) == 12
