"""Keys and values in 8 and 16 bits through the whole engine: tokens, logits, calibrated scales, refusals."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_core import check_idle, run
from kv_codes import rounded
from paged_runner import PagedRunner, load, logits_of
from real_checkpoints import CHECKPOINTS, reference, relative_error, row_errors
from smollm2 import smollm2_files, smollm2_judge
from tiny_models import judge
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from twofold import LLM
from twofold.cli import main
from twofold.engine.config import EngineConfig
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.core.kv_cache import model_block_bytes
from twofold.engine.core.loading import load_parts
from twofold.engine.kv_cache_type import KVCacheType, kv_cache_type
from twofold.engine.messages import EngineRequest
from twofold.engine.sampling_params import SamplingParams
from twofold.engine.tokenizer import load_tokenizer
from twofold.errors import ConfigError

TinyModel = Callable[..., Path]
DTYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
TEXT = list(range(40, 180, 3)) + list(range(20, 60))


def core_of(model: Path, kind: str, **options: Any) -> EngineCore:
    config = EngineConfig(
        model=str(model), device="cpu", dtype="float32", kv_cache_dtype=kind, num_threads=1, **options
    )
    parts = load_parts(config)
    return EngineCore.from_parts(config, parts.model, parts.platform, parts.kernels, vocab_size=parts.vocab_size)


def requests(count: int, **options: Any) -> list[EngineRequest]:
    return [
        EngineRequest(
            request_id=str(index),
            prompt_token_ids=[(7 * index + 3 * place) % 256 for place in range((5, 16, 33, 70)[index % 4])],
            params=SamplingParams(
                **{"max_tokens": 12, "temperature": 0.0, "ignore_eos": True, "logprobs": 1, **options}
            ),
        )
        for index in range(count)
    ]


def assert_same(first: dict[Any, Any], second: dict[Any, Any]) -> None:
    """Not the least bit may differ: a token's codes depend on its own key and value only."""
    assert first.keys() == second.keys()
    for key, output in first.items():
        assert output.token_ids == second[key].token_ids, key
        values = [[entry.logprob for entry in out.logprobs] for out in (output, second[key])]
        assert values[0] == pytest.approx(values[1], abs=1e-4), key


@pytest.mark.parametrize("kind", [*DTYPES, "bfloat16"])
def test_no_decision_of_the_scheduler_shows(tiny_model: TinyModel, kind: str) -> None:
    model, work = tiny_model("llama"), requests(6)
    plain = core_of(model, kind)
    together = run(plain, *work)
    for request in work[:3]:
        assert_same({(request.request_id, 0): together[request.request_id, 0]}, run(core_of(model, kind), request))
    assert_same(run(core_of(model, kind, max_num_batched_tokens=7), *work), together)
    warm = run(plain, *work)
    assert_same(warm, together)
    assert sum(output.num_cached_tokens for output in warm.values()) >= 64
    check_idle(plain)


@pytest.mark.parametrize("kind", [*DTYPES, "bfloat16"])
def test_preemption_and_forks(tiny_model: TinyModel, kind: str) -> None:
    model, work = tiny_model("llama"), requests(6, max_tokens=40)
    roomy = core_of(model, kind)
    tight = core_of(model, kind, kv_cache_bytes=9 * model_block_bytes(16, roomy._model))
    assert tight.info().num_blocks == 9
    assert_same(run(tight, *work), run(roomy, *work))
    assert tight.stats().num_preemptions > 0
    # Samples share the prompt's last, partial block and copy it, scales included, when they write.
    several = requests(3, n=3, temperature=1.0, seed=5)[2]
    forked = run(core_of(model, kind), several)
    separate = run(core_of(model, kind, enable_prefix_caching=False, max_num_seqs=1), several)
    assert len({tuple(output.token_ids) for output in forked.values()}) == 3
    assert_same(forked, separate)


@pytest.mark.parametrize("kind", DTYPES)
@pytest.mark.parametrize("family", ["llama", "qwen3"])
def test_logits_are_those_of_rounded_keys_and_values(tiny_model: TinyModel, family: str, kind: str) -> None:
    """The judge is transformers' model with keys and values rounded in torch; qwen3 takes the unfused path."""
    model = load(tiny_model(family), kv_cache_dtype=kind)
    logits = logits_of(model, TEXT)
    plain = judge_logits_rounded(judge(tiny_model(family)), TEXT, None)
    expected = judge_logits_rounded(judge(tiny_model(family)), TEXT, DTYPES[kind])
    # A key that stands on a tie may round either way after a different sum; a few do, and that is all.
    assert relative_error(logits, expected) < relative_error(plain, expected) / 4
    assert row_errors(logits, expected).median() < 1e-4


def judge_logits_rounded(
    model: PreTrainedModel,
    tokens: list[int],
    dtype: torch.dtype | None,
    scales: list[tuple[Tensor, Tensor]] | None = None,
) -> Tensor:
    """float32 [T,V] of transformers' model whose attention sees keys and values as a cache of the dtype keeps them."""

    def attend(module: torch.nn.Module, query: Tensor, key: Tensor, value: Tensor, *rest: Any, **options: Any) -> Any:
        if dtype is not None:
            given = (None, None) if scales is None else scales[module.layer_idx]
            key, value = (rounded(x, dtype, scale) for x, scale in zip((key, value), given, strict=True))
        return sdpa_attention_forward(module, query, key, value, *rest, **options)

    AttentionInterface.register("rounding", attend)
    before = model.config._attn_implementation
    model.set_attn_implementation("rounding")
    try:
        with torch.inference_mode():
            return model(input_ids=torch.tensor([tokens]), use_cache=False).logits[0].float()
    finally:
        model.set_attn_implementation(before)


PROSE = """A cache keeps what was computed once, so that it need not be computed again. The keys and values of every
token that a model has read are such a cache: a new token looks at all of them. They are many numbers, and most of the
time of a long conversation is spent on reading them from memory, so a smaller number is a faster one. What is lost when
each of them is rounded to eight bits? Very little, if every row of numbers brings along a scale of its own."""


def test_smollm2() -> None:
    """A real model: how far bfloat16 and 8 bits move the next token's distribution, and these where they should."""
    tokens = list(load_tokenizer(smollm2_files()).encode(PROSE))
    model = load(smollm2_files().path)

    def logits_with(dtype: torch.dtype) -> Tensor:
        model.kv_dtype = (
            dtype  # the kernels that were chosen read every type; loading again would take most of the time
        )
        return logits_of(model, tokens)

    plain = logits_with(torch.float32).log_softmax(-1)
    assert 0 < divergence(plain, logits_with(torch.bfloat16).log_softmax(-1)) < 0.001
    for dtype, limit in ((torch.int8, 0.003), (torch.float8_e4m3fn, 0.015)):
        found = logits_with(dtype).log_softmax(-1)
        expected = judge_logits_rounded(smollm2_judge(), tokens, dtype).log_softmax(-1)
        assert 0 < divergence(plain, found) < limit
        # Over 30 layers codes flip that stand on a tie, and what follows differs: early rows are exact, others near.
        assert row_errors(found[:2], expected[:2]).max() < 1e-4
        assert divergence(expected, found) < 0.8 * divergence(expected, plain)


def divergence(first: Tensor, second: Tensor) -> float:
    """Kullback-Leibler, nats per token, of log-probabilities [T,V]."""
    return (first.exp() * (first - second)).sum(-1).mean().item()


REAL = ["autofp8-static-kv-qwen2", "llmcompressor-fp8-static-kv-qwen3", "llmcompressor-kvonly-llama-tied"]


@pytest.mark.parametrize("name", REAL)
def test_calibrated_scales_of_real_tools(name: str, caplog: pytest.LogCaptureFixture) -> None:
    folder = CHECKPOINTS / name
    if not folder.is_dir():
        pytest.skip("the shared checkpoints are not here")
    stored = reference(folder)
    expected = stored["logits_weights_acts_kv" if "logits_weights_acts" in stored else "logits_weights_kv"]
    without = stored["logits_weights_acts" if "logits_weights_acts" in stored else "logits_weights_fp32"]
    with caplog.at_level(logging.INFO), LLM(str(folder), device="cpu", dtype="float32", kv_cache_dtype="fp8") as llm:
        logits = torch.stack([llm.logits(row) for row in stored["input_ids"].tolist()])
    assert "KV cache in fp8, with the checkpoint's calibrated scales for 2 layers" in caplog.text
    assert row_errors(logits, expected).median() < 1e-3
    assert (logits.argmax(-1) == expected.argmax(-1)).float().mean() > 0.9
    # Not merely close to the model without a rounded cache.
    assert row_errors(logits, expected).median() < row_errors(logits, without).median() / 4


def test_scales_made_for_fp8_are_not_used_for_int8_nor_without_being_asked(caplog: pytest.LogCaptureFixture) -> None:
    folder = CHECKPOINTS / "llmcompressor-kvonly-llama-tied"
    if not folder.is_dir():
        pytest.skip("the shared checkpoints are not here")
    stored = reference(folder)
    errors = {}
    unused = "--kv-cache-dtype fp8 uses them"
    for kind, words in (("auto", unused), ("bfloat16", unused), ("int8", "int8 does not use them"), ("fp8", "")):
        caplog.clear()
        with caplog.at_level(logging.INFO):
            model = load(folder, kv_cache_dtype=kind)
        assert words in caplog.text and bool(model.kv_scales) == (kind == "fp8")
        runner = PagedRunner(model)
        assert runner.caches[0].static_scales == (kind == "fp8")
        tokens = stored["input_ids"][0].tolist()
        errors[kind] = relative_error(runner.step({"only": tokens})["only"], stored["logits_weights_fp32"][0])
    assert errors["auto"] < 1e-4 and errors["int8"] < errors["fp8"] / 2, errors


@pytest.mark.parametrize("kind", DTYPES)
def test_without_a_kernel_of_ours_torch_dequantizes(tiny_model: TinyModel, kind: str) -> None:
    """The C kernels are for float32; 16-bit activations on a CPU take torch's operations, as does a CPU without C."""
    folder, logits = str(tiny_model("qwen2")), {}
    for option in ("auto", kind):
        with LLM(folder, device="cpu", dtype="float16", kv_cache_dtype=option) as llm:
            logits[option] = llm.logits(TEXT).float()
            kernels = {row["op"]: row for row in llm.info.kernels}
    assert kernels["paged_attention"]["kernel"] == "torch_sdpa_dequantize"
    assert kernels["paged_attention"]["quality"] == "dequantizing" and kernels["write_kv"]["kernel"] == "torch"
    assert 0 < relative_error(logits[kind], logits["auto"]) < 0.15


def test_the_type_follows_the_device(gpu: Callable[[str], Any]) -> None:
    half, spec = torch.float16, gpu("gfx942")
    assert kv_cache_type("auto", half, spec, {"kv_cache_scheme": "static"}) == KVCacheType(half)
    assert kv_cache_type("auto", torch.float32, spec, None) == KVCacheType(torch.float32)
    assert kv_cache_type("auto", torch.float32, spec, None, "bf16") == KVCacheType(torch.bfloat16)
    assert kv_cache_type("int8", torch.float32, spec, None, "bf16") == KVCacheType(torch.int8)
    assert kv_cache_type("fp8", half, spec, None) == KVCacheType(torch.float8_e4m3fnuz, True)
    assert kv_cache_type("fp8", half, gpu("sm_80"), None) == KVCacheType(torch.float8_e4m3fn, True)
    assert kv_cache_type("int8", half, spec, None) == KVCacheType(torch.int8, False)
    assert kv_cache_type("bfloat16", half, spec, {"kv_cache_scheme": "static"}) == KVCacheType(torch.bfloat16, False)
    integers = {"kv_cache_scheme": {"type": "int", "num_bits": 8}}
    assert kv_cache_type("int8", half, spec, integers) == KVCacheType(torch.int8, True)
    assert kv_cache_type("fp8", half, spec, integers) == KVCacheType(torch.float8_e4m3fnuz, False)


@pytest.fixture
def gpu() -> Iterator[Callable[[str], Any]]:
    from gpu_specs import gpu_spec

    yield gpu_spec


def test_wrong_values_and_the_report(tiny_model: TinyModel, capsys: pytest.CaptureFixture) -> None:
    for value in ("fp4", "float16", None, 8):
        with pytest.raises(ConfigError, match=r"kv_cache_dtype is .* it must be one of auto, bfloat16, fp8, int8"):
            EngineConfig(model="m", kv_cache_dtype=value)  # type: ignore[arg-type]
    with pytest.raises(SystemExit):
        main(["doctor", "m", "--kv-cache-dtype", "int4"])
    assert "'int4'" in capsys.readouterr().err
    model = str(tiny_model("llama"))
    assert main(["doctor", model, "--device", "cpu", "--dtype", "float32", "--kv-cache-dtype", "int8"]) == 0
    assert "cache int8" in capsys.readouterr().out
    report = core_of(tiny_model("llama"), "fp8").info().kernels
    assert any("cache float8_e4m3fn" in row["problem"] for row in report if row["op"] == "paged_attention")
