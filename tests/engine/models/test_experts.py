"""Mixtures of experts as checkpoints hold them: one tensor per expert, or all in one; what is refused, and where."""

from __future__ import annotations

import json
import re
import shutil
import weakref
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from paged_runner import load, logits_of
from real_checkpoints import CHECKPOINTS
from safetensors.torch import load_file, save_file
from tiny_models import judge, judge_logits
from torch import Tensor
from twofold.engine.config import EngineConfig
from twofold.engine.models import load_model
from twofold.engine.sources import resolve_model
from twofold.errors import CheckpointError, UnsupportedError
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import select_platform
from twofold.quant.canonical import CanonicalWeight, DenseWeight
from twofold.quant.formats import DenseFormat, TensorSource

TinyModel = Callable[..., Path]
TOKENS = [5, 80, 255, 7, 7, 31, 200, 4]
EXPERTS = 5
FP8 = "transformers-fp8block-qwen3moe"
NAMES = {
    "mixtral": ("block_sparse_moe", ("w1", "w3", "w2")),
    "qwen3-moe": ("mlp", ("gate_proj", "up_proj", "down_proj")),
}


def copy_of(source: Path, target: Path, tensors: dict[str, Tensor]) -> Path:
    """The model with other tensors."""
    shutil.copytree(source, target)
    save_file({name: tensor.contiguous() for name, tensor in tensors.items()}, target / "model.safetensors")
    return target


def fused(tensors: dict[str, Tensor], family: str, suffix: str) -> dict[str, Tensor]:
    """All experts of a layer in two tensors, as transformers holds them, under the names that it uses."""
    block, (gate, up, down) = NAMES[family]
    result = {name.replace(f".{block}.", ".mlp."): t for name, t in tensors.items() if ".experts." not in name}
    prefixes = {name.partition(".experts.")[0] for name in tensors if ".experts." in name}
    for prefix in prefixes:
        rows = {
            part: torch.stack([tensors[f"{prefix}.experts.{e}.{part}.weight"] for e in range(EXPERTS)])
            for part in (gate, up, down)
        }
        target = prefix.replace(f".{block}", ".mlp") + ".experts"
        result[f"{target}.gate_up_proj{suffix}"] = torch.cat([rows[gate], rows[up]], dim=1)
        result[f"{target}.down_proj{suffix}"] = rows[down]
    return result


@pytest.mark.parametrize("suffix", ["", ".weight"])
@pytest.mark.parametrize("family", NAMES)
def test_experts_in_one_tensor(tmp_path: Path, tiny_model: TinyModel, family: str, suffix: str) -> None:
    source = tiny_model(family)
    tensors = fused(load_file(source / "model.safetensors"), family, suffix)
    assert any(tensor.dim() == 3 for tensor in tensors.values())
    folder = copy_of(source, tmp_path / "fused", tensors)
    assert torch.equal(logits_of(load(folder), TOKENS), logits_of(load(source), TOKENS))


@pytest.mark.skipif(not (CHECKPOINTS / FP8).is_dir(), reason="the shared checkpoints are not here")
def test_fp8_experts_in_one_tensor_with_their_scales_beside_it(tmp_path: Path) -> None:
    source = CHECKPOINTS / FP8
    tensors = load_file(source / "model.safetensors")
    packed = {name: tensor for name, tensor in tensors.items() if not re.search(r"\.experts\.\d", name)}
    for layer in range(2):
        prefix = f"model.layers.{layer}.mlp.experts"

        def stacked(*parts: str, prefix: str = prefix) -> Tensor:
            codes = [[tensors[f"{prefix}.{e}.{part}.weight"].view(torch.uint8) for part in parts] for e in range(4)]
            return torch.stack([torch.cat(expert) for expert in codes]).view(torch.float8_e4m3fn)

        packed[f"{prefix}.gate_up_proj"] = stacked("gate_proj", "up_proj")
        packed[f"{prefix}.down_proj"] = stacked("down_proj")
    folder = copy_of(source, tmp_path / "fp8", packed)
    assert torch.equal(logits_of(load(folder), TOKENS), logits_of(load(source), TOKENS))


def test_roles_as_names_of_mixtrals_experts(tmp_path: Path, tiny_model: TinyModel) -> None:
    """llm-compressor on transformers 5 writes gate_proj, up_proj and down_proj where Mixtral has w1, w3 and w2."""
    source = tiny_model("mixtral")
    roles = {".w1.": ".gate_proj.", ".w3.": ".up_proj.", ".w2.": ".down_proj."}
    tensors = {}
    for name, tensor in load_file(source / "model.safetensors").items():
        for old, new in roles.items():
            name = name.replace(old, new)
        tensors[name] = tensor
    folder = copy_of(source, tmp_path / "roles", tensors)
    assert torch.equal(logits_of(load(folder), TOKENS), logits_of(load(source), TOKENS))


def test_other_layouts_in_one_tensor_are_not_guessed(tmp_path: Path, tiny_model: TinyModel) -> None:
    source = tiny_model("qwen3-moe")
    tensors = fused(load_file(source / "model.safetensors"), "qwen3-moe", "")
    transposed = {name: t.transpose(1, 2) if t.dim() == 3 else t for name, t in tensors.items()}
    with pytest.raises(CheckpointError, match=r"experts\.0\.gate_proj\.weight is missing"):
        load(copy_of(source, tmp_path / "transposed", transposed))


def test_missing_expert(tmp_path: Path, tiny_model: TinyModel) -> None:
    source = tiny_model("qwen3-moe")
    tensors = load_file(source / "model.safetensors")
    del tensors["model.layers.1.mlp.experts.4.up_proj.weight"]
    folder = copy_of(source, tmp_path / "missing", tensors)
    with pytest.raises(CheckpointError, match=r"experts\.4\.up_proj\.weight is missing from .*missing"):
        load(folder)


def test_wrong_shape_of_one_expert(tmp_path: Path, tiny_model: TinyModel) -> None:
    source = tiny_model("qwen3-moe")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.down_proj.weight"] = torch.zeros(64, 31)
    folder = copy_of(source, tmp_path / "shape", tensors)
    with pytest.raises(CheckpointError, match=r"experts\.2\.down_proj.* is \[64, 31\]; the config asks for \[64, 32\]"):
        load(folder)


def test_biases_of_experts_are_refused(tmp_path: Path, tiny_model: TinyModel) -> None:
    source = tiny_model("qwen3-moe")
    tensors = load_file(source / "model.safetensors")
    tensors["model.layers.1.mlp.experts.2.down_proj.bias"] = torch.ones(64)
    folder = copy_of(source, tmp_path / "bias", tensors)
    with pytest.raises(UnsupportedError, match=r"experts\.2\.down_proj .*has a bias"):
        load(folder)


def test_experts_of_different_widths_are_refused_with_both(tmp_path: Path, tiny_model: TinyModel) -> None:
    """GPTQModel's ``dynamic`` can give one expert another width, which no kernel takes beside the others."""
    source = tiny_model("qwen3-moe")
    tensors = load_file(source / "model.safetensors")
    for expert in range(EXPERTS):
        for part in ("gate_proj", "up_proj", "down_proj"):
            module = f"model.layers.1.mlp.experts.{expert}.{part}"
            bits = 8 if (expert, part) == (3, "down_proj") else 4
            rows, columns = tensors.pop(f"{module}.weight").shape
            tensors[f"{module}.qweight"] = torch.zeros(columns * bits // 32, rows, dtype=torch.int32)
            tensors[f"{module}.qzeros"] = torch.zeros(columns // 32, rows * bits // 32, dtype=torch.int32)
            tensors[f"{module}.scales"] = torch.ones(columns // 32, rows)
    folder = copy_of(source, tmp_path / "mixed", tensors)
    config = json.loads((folder / "config.json").read_text())
    rules = {r".*\.experts\.3\.down_proj": {"bits": 8}}
    config["quantization_config"] = {"quant_method": "gptq", "bits": 4, "group_size": 32, "dynamic": rules}
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(UnsupportedError, match=r"experts\.\*\.down_proj: some experts are w4.* and some w8"):
        load(folder)


def test_loading_holds_few_experts_at_once(tiny_model: TinyModel, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each is prepared as it comes; the last two modules that were read, and one expert before them, may be alive."""
    alive: list[int] = []
    matrices: list[weakref.ref[Tensor]] = []
    read = DenseFormat.load

    def watched(self: DenseFormat, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        weight = read(self, source, module, dtype)
        if ".experts." in module:
            alive.append(sum(matrix() is not None for matrix in matrices))
            assert isinstance(weight, DenseWeight)
            matrices.append(weakref.ref(weight.weight))
        return weight

    monkeypatch.setattr(DenseFormat, "load", watched)
    load(tiny_model("qwen3-moe", num_experts=24))
    assert len(alive) == 24 * 3 and max(alive) <= 3


def test_report_has_a_row_for_the_experts(tiny_model: TinyModel) -> None:
    platform, folder = select_platform("cpu"), tiny_model("mixtral")
    kernels = KernelSet(platform.spec)
    load_model(resolve_model(str(folder)), EngineConfig(model=str(folder), dtype="float32"), platform, kernels)
    rows = {row["layer"]: row for row in kernels.report() if row["op"] == "expert_linear"}
    assert set(rows) == {"block_sparse_moe.experts.w1+w3", "block_sparse_moe.experts.w2"}
    row = rows["block_sparse_moe.experts.w2"]
    assert row["count"] == "2" and "2 of 5 experts, 64x96" in row["problem"]
    assert int(row["bytes"]) >= 2 * EXPERTS * 64 * 96 * 4


def test_a_token_alone_and_in_a_batch(tiny_model: TinyModel) -> None:
    """Which tokens share a step does not change what a token's experts compute."""
    folder = tiny_model("qwen2-moe")
    model, reference = load(folder), judge(folder)
    for length in (1, 2, 33):
        ids = (TOKENS * 5)[:length]
        torch.testing.assert_close(logits_of(model, ids), judge_logits(reference, ids), atol=1e-4, rtol=0)
