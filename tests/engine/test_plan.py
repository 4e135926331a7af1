"""A plan reads headers only, and its numbers are those of the engine that is then really built."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from gpu_specs import gpu_spec
from held_tensors import held_bytes
from real_checkpoints import CHECKPOINTS
from smollm2 import smollm2_files
from twofold.engine.config import KV_CACHE_DTYPES, QUANTIZATIONS, EngineConfig
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.core.kv_cache import allocate_kv_caches, plan_kv_cache
from twofold.engine.models import load_model
from twofold.engine.plan import AS_STORED, ModelPlan, SchemePlan, make_plan
from twofold.engine.sources import ModelFiles, resolve_model
from twofold.engine.target import Target, find_target
from twofold.engine.weights.checkpoint import Checkpoint
from twofold.errors import CheckpointError, ConfigError
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import Platform, select_platform
from twofold.platforms.interface import MemoryInfo

TinyModel = Callable[..., Path]
FAMILIES = ["llama", "llama-tied", "llama-bias", "mistral", "qwen2", "qwen3"]
FAMILIES += ["gemma2", "gemma3", "phi3", "mixtral", "qwen2-moe", "qwen3-moe", "olmoe"]
REAL = [
    "autoawq-gemm-g128-mixtral",
    "autoawq-gemm-g128-qwen2",
    "autofp8-static-mixtral",
    "autofp8-static-llama-tied",
    "autogptq-w4-g32-actorder-mixtral",
    "autogptq-w4-g32-asym-qwen2",
    "gptqmodel-gptq-gptq-w4-g32-qwen3moe",
    "gptqmodel-gptq-gptq-w4-g32-lmhead-llama-untied",
    "llmcompressor-int8-w8a8-asym-llama-tied",
    "llmcompressor-fp8-static-mixtral",
    "llmcompressor-nvfp4-mistral",
    "llmcompressor-nvfp4-qwen3moe",
    "llmcompressor-mxfp8-llama-tied",
    "llmcompressor0601-w4a16-g32-asym-actorder-group-llama-tied",
    "transformers-fp8block-qwen3",
    "transformers-fp8block-qwen3moe",
]


def plan_of(files: ModelFiles, free: int = 1 << 30, arch: str | None = None, **options: object) -> ModelPlan:
    target = Target(spec=select_platform("cpu").spec, free_bytes=free)
    if arch is not None:
        target = find_target("auto", arch, free)
    return make_plan(files, EngineConfig(model=files.name, **options), target)  # type: ignore[arg-type]


def row_of(plan: ModelPlan, quantization: str = AS_STORED, kv_cache_dtype: str = "auto") -> SchemePlan:
    return next(row for row in plan.plans if (row.quantization, row.kv_cache_dtype) == (quantization, kv_cache_dtype))


def check_against_loading(files: ModelFiles, quantization: str | None = None) -> None:
    row = row_of(plan_of(files), quantization or AS_STORED)
    platform = select_platform("cpu")
    kernels = KernelSet(platform.spec)
    config = EngineConfig(model=files.name, device="cpu", quantization=quantization)
    model = load_model(files, config, platform, kernels)
    assert (row.weight_bytes, row.memory_bytes) == (model.weight_bytes, model.memory_bytes)
    used = {(line["scheme"], f"{line['kernel']} ({line['quality']})") for line in kernels.report() if "layer" in line}
    assert {scheme for scheme, _ in used} == set(row.schemes) and {kernel for _, kernel in used} == set(row.kernels)


@pytest.mark.parametrize("family", FAMILIES)
def test_plain_models(tiny_model: TinyModel, family: str) -> None:
    check_against_loading(resolve_model(str(tiny_model(family))))


@pytest.mark.parametrize("quantization", QUANTIZATIONS)
@pytest.mark.parametrize("family", ["llama-bias", "qwen2", "qwen2-moe"])
def test_quantized_at_load(tiny_model: TinyModel, family: str, quantization: str) -> None:
    check_against_loading(resolve_model(str(tiny_model(family))), quantization)


@pytest.mark.parametrize("name", REAL)
def test_checkpoints_of_other_tools(name: str) -> None:
    if not (CHECKPOINTS / name).is_dir():
        pytest.skip("the shared checkpoints are not here")
    files = resolve_model(str(CHECKPOINTS / name))
    check_against_loading(files)
    rows = [(row.quantization, row.kv_cache_dtype) for row in plan_of(files).plans]
    assert rows == [(AS_STORED, kind) for kind in KV_CACHE_DTYPES]


@pytest.mark.parametrize(
    "name",
    [
        "autoawq-gemm-g128-qwen2",
        "autofp8-static-llama-tied",
        "autogptq-w4-g32-actorder-asym-llama-tied",
        "llmcompressor-int8-w8a8-rtn-llama-tied",
        "llmcompressor-kvonly-llama-tied",  # plain bfloat16
        "llmcompressor-nvfp4-mistral",
    ],
)
def test_planned_memory_is_what_the_tensors_take(name: str) -> None:
    """Judged by the tensors that the model really holds, but for tables of rotary embeddings."""
    if not (CHECKPOINTS / name).is_dir():
        pytest.skip("the shared checkpoints are not here")
    files, platform = resolve_model(str(CHECKPOINTS / name)), select_platform("cpu")
    model = load_model(files, EngineConfig(model=files.name, device="cpu"), platform, KernelSet(platform.spec))
    planned = row_of(plan_of(files)).memory_bytes
    assert planned == pytest.approx(held_bytes(model) - held_bytes(model._ropes), rel=0.01)


def test_smollm2() -> None:
    check_against_loading(smollm2_files())
    plan = plan_of(smollm2_files(), 8 << 30, "gfx942")
    # The file's own blocks: 32 weights of 4 bits with a scale and an offset, of 8 bits with a scale; norms in bfloat16.
    linear, embedding, norms = 106_168_320, 49_152 * 576, 61 * 576
    assert row_of(plan).weight_bytes == linear * (16 + 4) // 32 + embedding * (32 + 2) // 32 + norms * 2
    # 2 x 30 layers x 3 heads x 64 features x 2 bytes; in 8 bits 64 + 4 bytes a head.
    assert row_of(plan).kv_bytes_per_token == 23040
    assert plan.dtype == row_of(plan).kv_dtype == "bfloat16" and plan.max_model_len == 8192
    for kind, dtype in (("int8", "int8"), ("fp8", "float8_e4m3fnuz")):
        row = row_of(plan, kv_cache_dtype=kind)
        assert row.kv_bytes_per_token == 2 * 30 * 3 * 68 and row.kv_dtype == dtype
        # As many bytes in blocks of 16 tokens, the last one of either kind cut off.
        assert abs(row.kv_tokens * 12240 - row_of(plan).kv_tokens * 23040) < 16 * 23040


class _Fixed:
    """A platform of this machine's kind with a given amount of free memory."""

    def __init__(self, platform: Platform, free: int) -> None:
        self.spec, self.device, self._free = platform.spec, platform.device, free

    def memory(self) -> MemoryInfo:
        return MemoryInfo(self._free, self._free)


@pytest.mark.parametrize("free", [12 << 20, 200 << 20])
@pytest.mark.parametrize("kind", KV_CACHE_DTYPES)
@pytest.mark.parametrize("name", ["llama", "llmcompressor-kvonly-llama-tied"])
def test_cache_is_the_one_that_the_engine_allocates(tiny_model: TinyModel, name: str, kind: str, free: int) -> None:
    if name != "llama" and not (CHECKPOINTS / name).is_dir():
        pytest.skip("the shared checkpoints are not here")
    files = resolve_model(str(CHECKPOINTS / name if name != "llama" else tiny_model(name)))
    platform = select_platform("cpu")
    options = {"max_num_seqs": 8, "max_num_batched_tokens": 64, "block_size": 8, "kv_cache_dtype": kind}
    plan = plan_of(files, free, **options)
    config = EngineConfig(model=files.name, **options)
    model = load_model(files, config, platform, KernelSet(platform.spec))
    pool = plan_kv_cache(config, model, _Fixed(platform, free - model.memory_bytes))  # type: ignore[arg-type]
    row = row_of(plan, kv_cache_dtype=kind)
    assert {row.kv_cache_dtype for row in plan.plans} == ({*KV_CACHE_DTYPES} if kind == "auto" else {kind})
    assert row.num_blocks == pool.num_blocks
    caches = allocate_kv_caches(pool, model, platform.device)
    allocated = sum(tensor.nbytes for cache in caches for tensor in cache.tensors)
    assert allocated == row.kv_bytes_per_token * pool.num_blocks * pool.block_size
    for length, count in row.requests.items():
        assert count == row.kv_tokens // 8 // -(-length // 8)


def test_a_core_with_that_much_cache_takes_that_many_requests(tiny_model: TinyModel) -> None:
    files = resolve_model(str(tiny_model("llama")))
    plan = plan_of(files, kv_cache_bytes=1 << 20)
    core = EngineCore(EngineConfig(model=files.name, device="cpu", kv_cache_bytes=1 << 20))
    assert core.info().num_blocks == row_of(plan).num_blocks
    assert row_of(plan).requests == {512: row_of(plan).kv_tokens // 512}


def test_a_cache_that_no_memory_holds_is_refused(tiny_model: TinyModel) -> None:
    files = resolve_model(str(tiny_model("llama")))
    refused = row_of(plan_of(files, free=8 << 20, kv_cache_bytes=1 << 40)).refused
    assert "kv_cache_bytes is 1099511627776" in refused and "are free" in refused


def test_no_weight_is_read(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    read = Checkpoint.get

    def refuse(self: Checkpoint, name: str) -> torch.Tensor:
        assert name.endswith(".weight_shape"), f"{name} was read"  # two numbers that some headers do not hold
        return read(self, name)

    monkeypatch.setattr(Checkpoint, "get", refuse)
    names = [str(tiny_model("llama-tied")), *(str(CHECKPOINTS / name) for name in REAL if CHECKPOINTS.is_dir())]
    for name in names:
        for arch in (None, "gfx942", "sm_90"):
            assert row_of(plan_of(resolve_model(name), arch=arch)).weight_bytes


def test_too_little_memory_says_so(tiny_model: TinyModel) -> None:
    plan = plan_of(resolve_model(str(tiny_model("llama"))), 1 << 20)
    assert all(row.weight_bytes and not row.num_blocks and set(row.requests.values()) == {0} for row in plan.plans)
    with pytest.raises(ConfigError, match="--memory"):
        make_plan(resolve_model(plan.model), EngineConfig(model=plan.model), find_target("auto", "gfx942"))


def test_what_cannot_load_is_not_planned(tiny_model: TinyModel, tmp_path: Path) -> None:
    files = resolve_model(str(tiny_model("llama")))
    for file in files.path.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    config = (tmp_path / "config.json").read_text().replace('"hidden_size": 64', '"hidden_size": 128')
    (tmp_path / "config.json").write_text(config)
    with pytest.raises(CheckpointError, match=r"embed_tokens.*\[320, 64\].*\[320, 128\]"):
        plan_of(resolve_model(str(tmp_path)))


@pytest.mark.parametrize(
    "arch", ["sm_70", "sm_75", "sm_80", "sm_90", "gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201"]
)
def test_targets_are_what_selection_would_see(arch: str) -> None:
    target = find_target("auto", arch, 1 << 30)
    assert dataclasses.replace(target.spec, vendor="", name="", num_cores=0) == dataclasses.replace(
        gpu_spec(arch, memory_bytes=1 << 30), vendor="", name="", num_cores=0
    )
    has_bf16 = "bf16" in target.spec.matrix_dtypes
    assert target.compute_dtype("auto", "bfloat16") is (torch.bfloat16 if has_bf16 else torch.float16)
    assert target.compute_dtype("float32", "bfloat16") is torch.float32


def test_wrong_targets() -> None:
    with pytest.raises(ConfigError, match="gfx942"):
        find_target("auto", "h100", 1)
    with pytest.raises(ConfigError, match="exclude"):
        find_target("cpu", "gfx942", 1)
    platform = select_platform("cpu")
    assert find_target("cpu").compute_dtype("auto", "bfloat16") is platform.preferred_dtype(torch.bfloat16)
