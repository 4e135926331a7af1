"""Checkpoints that real tools wrote (``../shared/checkpoints``), with logits computed outside this project."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch
from safetensors.torch import load_file, save_file
from stored_tensors import SHARED, StoredTensors
from torch import Tensor
from transformers import AutoModelForCausalLM
from twofold import LLM
from twofold.engine.hf_config import FAMILIES
from twofold.quant.canonical import dequantize
from twofold.quant.formats import Format, detect_format, read_quantization

CHECKPOINTS = SHARED / "checkpoints"


def folders(*patterns: str) -> list[Path]:
    return sorted(path for pattern in patterns for path in CHECKPOINTS.glob(pattern))


def with_logits(paths: list[Path]) -> list[Path]:
    return [path for path in paths if (path / "reference.safetensors").is_file()]


def config_of(folder: Path) -> dict[str, object]:
    return json.loads((folder / "config.json").read_text())


def is_served(folder: Path) -> bool:
    """Whether the engine has the folder's model family."""
    return config_of(folder)["architectures"][0] in FAMILIES  # type: ignore[index]


def reference(folder: Path) -> dict[str, Tensor]:
    return load_file(folder / "reference.safetensors")


def layout_of(folder: Path) -> Format:
    return detect_format(read_quantization(folder, config_of(folder)))


def engine_logits(folder: Path, ids: Tensor) -> Tensor:
    with LLM(str(folder), device="cpu", dtype="float32") as llm:
        return torch.stack([llm.logits(row) for row in ids.tolist()])


def relative_error(actual: Tensor, expected: Tensor) -> float:
    return ((actual - expected).norm() / expected.norm()).item()


def row_errors(actual: Tensor, expected: Tensor) -> Tensor:
    """Relative RMS error of each row."""
    return ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).flatten()


def linear_modules(folder: Path) -> list[str]:
    """The linear layers of a checkpoint's decoder, by the names that the model gives them."""
    found = set()
    for name in StoredTensors.from_folder(folder).names:
        module, _, part = name.rpartition(".")
        if part in ("weight", "qweight", "weight_packed") and (module.endswith("_proj") or ".experts." in module):
            found.add(module)
    if config_of(folder)["model_type"] != "mixtral":
        return sorted(found)
    roles = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    return sorted(re.sub(r"(experts\.\d+\.)(\w+)$", lambda m: m[1] + roles.get(m[2], m[2]), name) for name in found)


def dense_tensors(folder: Path, modules: list[str]) -> dict[str, Tensor]:
    """The checkpoint's float tensors, with the named modules read by our format and made dense."""
    source, layout = StoredTensors.from_folder(folder), layout_of(folder)
    tensors: dict[str, Tensor] = {}
    for module in modules:
        weight = layout.load(source, module, torch.float32)
        tensors[f"{module}.weight"] = dequantize(weight)
        bias = layout.load_bias(source, module, torch.float32)
        if bias is not None:
            tensors[f"{module}.bias"] = bias
    rest = set(source.names) - set(source.taken)
    tensors.update({name: source.tensors[name] for name in rest if name.endswith((".weight", ".bias"))})
    return tensors


def transformers_logits(folder: Path, modules: list[str], work: Path, ids: Tensor) -> Tensor:
    """Logits of the float32 transformers model with the modules' weights as our format reads them."""
    config = config_of(folder)
    del config["quantization_config"]
    tensors = dense_tensors(folder, modules)
    if config.get("tie_word_embeddings"):
        tensors.pop("lm_head.weight", None)
    (work / "config.json").write_text(json.dumps(config))
    save_file({name: tensor.float().contiguous() for name, tensor in tensors.items()}, work / "model.safetensors")
    model, report = AutoModelForCausalLM.from_pretrained(
        work, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
    )
    assert not report["missing_keys"] and not report["mismatched_keys"], report
    with torch.inference_mode():
        return model(input_ids=ids).logits
