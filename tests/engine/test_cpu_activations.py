"""Inputs in 8 and 16 bits through the whole engine: kernels, tokens alone and in a batch, refusals."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from smollm2 import smollm2_files
from twofold import LLM, SamplingParams
from twofold.engine.config import EngineConfig
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.core.loading import load_parts
from twofold.engine.cpu_bfloat16 import on_device
from twofold.engine.messages import EngineRequest
from twofold.errors import ConfigError
from twofold.kernels.cpu import linear_bf16
from twofold.kernels.cpu.library import unavailable
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.evaluation import EvaluationSpec, evaluate

TinyModel = Callable[..., Path]


needs_tiles = pytest.mark.skipif(linear_bf16.missing() is not None, reason=f"no bf16: {linear_bf16.missing()}")


@pytest.mark.skipif(unavailable() is not None, reason="no compiled kernels")
@pytest.mark.parametrize("mode", ["int8", pytest.param("bf16", marks=needs_tiles)])
def test_a_request_gets_the_same_tokens_alone_and_among_others(tiny_model: TinyModel, mode: str) -> None:
    model = str(tiny_model())
    prompts = [[(7 * index + 3 * place) % 256 for place in range(5 + 9 * index)] for index in range(8)]
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True)
    with LLM(model, device="cpu", dtype="float32", quantization="int4", cpu_activations=mode, num_threads=2) as llm:
        together = llm.generate(prompts, sampling, progress=False)
        alone = [llm.generate([prompt], sampling, progress=False)[0] for prompt in prompts[::4]]
    tokens = [output.outputs[0].token_ids for output in together]
    assert [output.outputs[0].token_ids for output in alone] == tokens[::4]


@pytest.mark.skipif(unavailable() is not None, reason="no compiled kernels")
@pytest.mark.parametrize(
    ("mode", "sensitive", "others"),
    [
        ("exact", "c_low_bit_float32", "c_low_bit_float32"),
        ("int8", "c_int16_activations", "c_int8_activations"),
        pytest.param("bf16", "c_bf16", "c_bf16", marks=needs_tiles),
    ],
)
def test_the_report_names_the_kernel(tiny_model: TinyModel, mode: str, sensitive: str, others: str) -> None:
    config = EngineConfig(
        model=str(tiny_model()), device="cpu", dtype="float32", quantization="int4", cpu_activations=mode, num_threads=1
    )
    rows = [row for row in load_parts(config).kernels.report() if row["op"] == "linear" and "w4" in row["problem"]]
    kernels = {row["layer"]: row["kernel"] for row in rows}
    assert kernels.pop("self_attn.q_proj+k_proj+v_proj") == sensitive
    assert kernels and set(kernels.values()) == {others}


@pytest.mark.skipif(unavailable() is not None, reason="no compiled kernels")
def test_a_real_model_strays_little() -> None:
    """With every input in 8 bits alone the divergence is 0.004 nats a token."""
    config = EngineConfig(
        model=str(smollm2_files().path), device="cpu", cpu_activations="int8", kv_cache_bytes=1 << 28, num_threads=2
    )
    found = evaluate(
        config, EvaluationSpec(num_windows=4, length=256), reference=replace(config, cpu_activations="exact")
    )
    assert found.divergence is not None and found.divergence < 0.003


@needs_tiles
def test_bfloat16_on_a_cpu_is_products_in_it_and_recorded_steps(tiny_model: TinyModel) -> None:
    config = EngineConfig(model=str(tiny_model()), device="cpu", dtype="bfloat16", num_threads=1)
    parts = load_parts(config)
    names = {row["kernel"] for row in parts.kernels.report() if row["op"] == "linear"}
    assert names == {"c_bf16"}
    core = EngineCore.from_parts(config, parts.model, parts.platform, parts.kernels)
    params = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    core.add_request(EngineRequest(request_id="a", prompt_token_ids=[1, 2, 3], params=params))
    while core.has_work():
        core.step()
    assert core.graphs.num_replays > 0 and core.graphs.refused is None


@needs_tiles
def test_int8_activations_stay_with_bfloat16() -> None:
    config = EngineConfig(model="m", device="cpu", dtype="bfloat16", cpu_activations="int8")
    taken = on_device(config, CpuPlatform().spec)
    assert (taken.dtype, taken.cpu_activations) == ("float32", "int8")
    exact = EngineConfig(model="m", device="cpu", dtype="float16")
    assert on_device(exact, CpuPlatform().spec) is exact


def test_other_values_are_refused() -> None:
    with pytest.raises(ConfigError, match="cpu_activations is 'int4'; it must be one of exact, int8, bf16"):
        EngineConfig(model="m", cpu_activations="int4")
