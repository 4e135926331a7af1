"""The offline API on real cores: chain models that script the output, and small random models."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from chain_model import ChainTokenizer, build_chain_model
from counting_core import ByteTokenizer, SlowCore
from tiny_models import build_tiny_model
from twofold import LLM, SamplingParams
from twofold.engine.config import EngineConfig
from twofold.errors import ConfigError, ContextLengthError, ModelNotFoundError, RequestError, TwofoldError

GREEDY = SamplingParams(temperature=0, max_tokens=30)
UNICODE = "é你😀👨‍👩‍👧"
SIZES = {"kv_cache_bytes": 1 << 22, "max_num_seqs": 8, "max_num_batched_tokens": 64}


@pytest.fixture(scope="module")
def chain(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[LLM, ChainTokenizer]]:
    directory = tmp_path_factory.mktemp("chain")
    scripts = [list("xySTOPz"), list("ABC"), [b"(", b"\xf0", b"\x9f", b"\x98", b")"], [*"0123456789", "0"]]
    tokenizer = build_chain_model(directory, scripts)
    with LLM(str(directory), **SIZES) as llm:
        yield llm, tokenizer


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    directory = build_tiny_model(tmp_path_factory.mktemp("tiny"), "llama")
    with LLM(str(directory), **SIZES) as llm:
        yield llm


def complete(llm: LLM, prompt: str | list[int], **params: object) -> tuple[str, str | None, int]:
    (output,) = llm.generate(prompt, SamplingParams(**{"temperature": 0, "max_tokens": 30, **params}), progress=False)
    sample = output.outputs[0]
    assert output.usage.completion_tokens == len(sample.token_ids)
    return sample.text, sample.finish_reason, len(sample.token_ids)


@pytest.mark.parametrize(
    ("prompt", "params", "want"),
    [
        ("x", {}, ("ySTOPz", "stop", 7)),
        ("x", {"stop": ("STOP",)}, ("y", "stop", 5)),
        ("x", {"stop": ("yS", "STOP")}, ("", "stop", 2)),
        ("x", {"stop": ("STOQ",)}, ("ySTOPz", "stop", 7)),
        ("x", {"stop": ("STOP",), "include_stop_str_in_output": True}, ("ySTOP", "stop", 5)),
        ("x", {"max_tokens": 3}, ("yST", "length", 3)),
        ("A", {"stop_token_ids": (ord("C"),)}, ("B", "stop", 2)),
        ("A", {"stop_token_ids": (ord("C"),), "include_stop_str_in_output": True}, ("BC", "stop", 2)),
        ("(", {"max_tokens": 3}, ("\ufffd", "length", 3)),
        ("(", {}, ("\ufffd)", "stop", 5)),
        ("0", {"stop": ("34",), "min_tokens": 5}, ("123456789012", "stop", 14)),
    ],
)
def test_scripted_outputs(
    chain: tuple[LLM, ChainTokenizer], prompt: str, params: dict, want: tuple[str, str, int]
) -> None:
    assert complete(chain[0], prompt, **params) == want


def test_output_has_everything(chain: tuple[LLM, ChainTokenizer]) -> None:
    llm, tokenizer = chain
    params = [GREEDY, SamplingParams(temperature=0, n=2, logprobs=2, prompt_logprobs=1, max_tokens=2)]
    first, second = llm.generate(["A", [ord("x"), ord("y")]], params)
    assert (first.prompt, first.prompt_token_ids) == ("A", [ord("A")])
    assert (second.prompt, second.prompt_token_ids) == (None, [ord("x"), ord("y")])
    assert first.outputs[0].token_ids == [ord("B"), ord("C"), tokenizer.eos]
    assert (first.outputs[0].stop_reason, first.outputs[0].logprobs) == (None, None)
    assert [sample.index for sample in second.outputs] == [0, 1]
    assert [sample.text for sample in second.outputs] == ["ST", "ST"]
    assert (second.usage.prompt_tokens, second.usage.completion_tokens) == (2, 4)
    assert [[item.token_id for item in sample.logprobs or []] for sample in second.outputs] == [[83, 84]] * 2
    assert second.prompt_logprobs is not None and second.prompt_logprobs[0] is None
    assert len(second.prompt_logprobs) == 2 and second.prompt_logprobs[1].token_id == ord("y")


def test_single_and_many_prompts(chain: tuple[LLM, ChainTokenizer]) -> None:
    llm, _ = chain
    assert llm.generate([], GREEDY) == []
    assert llm.generate([ord("A")], GREEDY, progress=False)[0].outputs[0].text == "BC"
    outputs = llm.generate(["A", "x"] * 20, GREEDY, progress=False)
    assert [output.outputs[0].text for output in outputs] == ["BC", "ySTOPz"] * 20
    assert len({output.request_id for output in outputs}) == 40


def test_chat_goes_through_the_template(chain: tuple[LLM, ChainTokenizer]) -> None:
    llm, _ = chain
    conversation = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "A"}]
    (output,) = llm.chat(conversation, GREEDY, progress=False)
    assert (output.prompt, output.outputs[0].text) == ("xA", "BC")
    outputs = llm.chat([conversation, conversation[:1]], GREEDY, progress=False)
    assert [output.outputs[0].text for output in outputs] == ["BC", "ySTOPz"]


def test_wrong_prompts_run_nothing(chain: tuple[LLM, ChainTokenizer]) -> None:
    llm, _ = chain
    with pytest.raises(RequestError, match="the prompt is empty"):
        llm.generate(["A", ""], GREEDY)
    with pytest.raises(ContextLengthError, match="600"):
        llm.generate(["A", [1] * 600], GREEDY)
    with pytest.raises(RequestError, match="2 sampling parameters for 3 prompts"):
        llm.generate(["A"] * 3, [GREEDY] * 2)
    assert not llm._core.has_work()


def test_cached_tokens_are_counted(tiny: LLM) -> None:
    prompt = list(range(3, 50))
    first, second = (tiny.generate(prompt, GREEDY, progress=False)[0] for _ in range(2))
    assert (first.usage.cached_tokens, second.usage.cached_tokens) == (0, 32)
    assert first.outputs[0].token_ids == second.outputs[0].token_ids
    (salted,) = tiny.generate(prompt, GREEDY, progress=False, cache_salt="other")
    assert salted.usage.cached_tokens == 0


def test_seeded_samples_repeat_and_differ(tiny: LLM) -> None:
    params = SamplingParams(seed=42, n=3, temperature=1.0, max_tokens=12, ignore_eos=True)
    alone, again = (tiny.generate([5, 6, 7], params, progress=False)[0] for _ in range(2))
    other = [SamplingParams(temperature=1.0, max_tokens=20, ignore_eos=True)] * 6
    *_, mixed = tiny.generate([[9, 8]] * 6 + [[5, 6, 7]], [*other, params], progress=False)
    ids = [sample.token_ids for sample in alone.outputs]
    assert ids == [sample.token_ids for sample in again.outputs] == [sample.token_ids for sample in mixed.outputs]
    assert len({tuple(one) for one in ids}) == 3


def test_logits_agree_with_the_greedy_tokens(tiny: LLM) -> None:
    prompt = [5, 6, 7, 8]
    (output,) = tiny.generate(prompt, SamplingParams(temperature=0, max_tokens=6, ignore_eos=True), progress=False)
    tokens = output.outputs[0].token_ids
    logits = tiny.logits(prompt + tokens)
    assert logits.dtype == torch.float32 and logits.shape[0] == len(prompt) + 6
    vocabulary = tiny.info.vocab_size
    assert logits[len(prompt) - 1 : -1, :vocabulary].argmax(-1).tolist() == tokens
    with pytest.raises(RequestError):
        tiny.logits([vocabulary])


def test_closed_llm_says_so(tmp_path: Path) -> None:
    build_chain_model(tmp_path, [list("AB")])
    llm = LLM(str(tmp_path), **SIZES)
    llm.close()
    llm.close()
    with pytest.raises(TwofoldError, match="closed"):
        llm.generate("A", GREEDY)


def test_mistakes_at_the_start(tmp_path: Path) -> None:
    with pytest.raises(ModelNotFoundError):
        LLM(str(tmp_path / "nothing"))
    with pytest.raises(ConfigError, match="float31"):
        LLM(str(tmp_path), dtype="float31")


def test_progress_is_shown_on_standard_error(
    chain: tuple[LLM, ChainTokenizer], capfd: pytest.CaptureFixture[str]
) -> None:
    llm, _ = chain
    llm.generate(["A"] * 3, GREEDY, progress=False)
    assert capfd.readouterr() == ("", "")
    llm.generate(["A"] * 3, GREEDY)
    out, err = capfd.readouterr()
    assert out == "" and "3/3" in err and "tok/s out" in err


def slow_llm() -> LLM:
    return LLM.from_parts(SlowCore(EngineConfig(model="counting")), ByteTokenizer())


def test_interrupt_aborts_and_leaves_a_working_engine() -> None:
    llm = slow_llm()
    core, steps = llm._core, SlowCore.step
    handler = signal.getsignal(signal.SIGINT)

    def step() -> list[Any]:
        if core.counts.num_steps == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return steps(core)

    core.step = step
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["a", "b"], SamplingParams(max_tokens=4000, ignore_eos=True), progress=False)
    assert core.counts.num_steps == 6
    assert signal.getsignal(signal.SIGINT) is handler
    assert not llm._core.has_work() and len(llm._outputs) == 0
    assert llm.generate("a", SamplingParams(max_tokens=2), progress=False)[0].outputs[0].text == "bc"


def test_interrupt_waits_for_the_end_of_the_step() -> None:
    llm = slow_llm()
    core = llm._core
    finished: list[bool] = []

    def step() -> list[Any]:
        os.kill(os.getpid(), signal.SIGINT)
        outputs = SlowCore.step(core)
        finished.append(True)
        return outputs

    core.step = step
    with pytest.raises(KeyboardInterrupt):
        llm.generate("a", SamplingParams(max_tokens=5), progress=False)
    assert finished == [True]


def test_error_in_the_middle_aborts_the_rest() -> None:
    llm = slow_llm()
    with pytest.raises(ContextLengthError, match="255 is one too many"):
        llm.generate([[1], [255]], SamplingParams(), progress=False)
    assert not llm._core.has_work() and len(llm._outputs) == 0


@pytest.mark.parametrize(
    "prompts",
    [None, 5, [1.5], ["a", None], {"a": 1}, b"abc", {"a"}, [b"abc"], [[1.5]], [None], [True], [1, "a"], ["a", {}]],
)
def test_what_is_no_prompt(chain: tuple[LLM, ChainTokenizer], prompts: Any) -> None:
    with pytest.raises(RequestError, match="a text") as caught:
        chain[0].generate(prompts, GREEDY)
    assert caught.value.param in ("prompt", "prompts")
    assert not chain[0]._core.has_work()


@pytest.mark.parametrize("messages", [None, 5, [5], "hello", {"role": "user", "content": "x"}, [[5]], [None], ["x"]])
def test_what_is_no_conversation(chain: tuple[LLM, ChainTokenizer], messages: Any) -> None:
    with pytest.raises(RequestError, match=r'messages .*"role": "user"') as caught:
        chain[0].chat(messages, GREEDY)
    assert caught.value.param == "messages"
    with pytest.raises(RequestError, match="messages holds 5"):
        chain[0].chat([{"role": "user", "content": "x"}, 5], GREEDY)


@pytest.mark.parametrize("params", [5, [5], {"temperature": 0}, "greedy", [None]])
def test_what_are_no_params(chain: tuple[LLM, ChainTokenizer], params: Any) -> None:
    with pytest.raises(RequestError, match="SamplingParams"):
        chain[0].generate("A", params)
    with pytest.raises(RequestError, match="cache_salt is 5"):
        chain[0].generate("A", GREEDY, cache_salt=5)
    with pytest.raises(RequestError, match="the prompt is None"):
        chain[0].logits(None)


@pytest.mark.parametrize(
    ("model", "options", "words"),
    [
        (None, {}, "model is None; it must be a text"),
        (5, {}, "model is 5; it must be a text"),
        ("m", {"num_threads": "a"}, "num_threads is 'a'; it must be a whole number or None"),
        ("m", {"num_threads": True}, "num_threads is True"),
        ("m", {"max_num_seqs": None}, "max_num_seqs is None; it must be a whole number$"),
        ("m", {"block_size": 16.0}, "block_size is 16.0; it must be a whole number$"),
        ("m", {"memory_fraction": "half"}, "memory_fraction is 'half'; it must be a number"),
        ("m", {"quantize": 5}, "quantize is 5; it must be a text or None"),
        ("m", {"quantization": 5}, "quantization is 5; it must be one of int8"),
        ("m", {"enable_prefix_caching": 1}, "enable_prefix_caching is 1; it must be True or False"),
        ("m", {"device": 5}, "device is 5; it must be one of auto"),
        ("m", {"dtype": torch.float32}, "dtype is torch.float32; it must be one of auto"),
        ("m", {"num_thread": 2}, "there is no option 'num_thread'; did you mean num_threads?"),
        ("m", {"foo": 1}, "there is no option 'foo'; the options are model, device"),
    ],
)
def test_options_of_the_wrong_kind(model: Any, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        LLM(model, **options)


@pytest.mark.parametrize(
    "options",
    [
        {"stop": 5}, {"stop": [5]}, {"stop": b"x"}, {"stop": {"a": 1}}, {"stop": [""]}, {"stop_token_ids": 5},
        {"stop_token_ids": ["a"]}, {"stop_token_ids": [True]}, {"stop_token_ids": "5"}, {"logit_bias": [1]},
        {"logit_bias": None}, {"temperature": 10**400}, {"temperature": "1"}, {"ignore_eos": "yes"}, {"n": "a"},
    ],
)  # fmt: skip
def test_sampling_params_of_the_wrong_kind(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(RequestError, match=name) as caught:
        SamplingParams(**options)
    assert caught.value.param == name


def test_paths_and_plain_values_are_taken(tmp_path: Path) -> None:
    config = EngineConfig(model=tmp_path, memory_fraction=1, chat_template=tmp_path / "t")
    assert (config.model, config.chat_template) == (str(tmp_path), str(tmp_path / "t"))
    assert SamplingParams(stop=None, stop_token_ids=[3]).stop_token_ids == (3,)
    assert SamplingParams(stop={"a"}).stop == ("a",)
