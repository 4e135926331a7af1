"""Filling a model: every parameter once, tied heads (B025), biases (B031), leftovers reported."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from held_tensors import held_bytes
from paged_runner import load, logits_of
from safetensors.torch import load_file, save_file
from twofold.engine.models.survey import survey_model
from twofold.engine.sources import resolve_model
from twofold.errors import CheckpointError
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import select_platform

TOKENS = [5, 80, 255, 7, 7, 31]
TinyModel = Callable[..., Path]


@pytest.fixture
def edit(tiny_model: TinyModel, tmp_path: Path) -> Callable[..., Path]:
    """A copy of a tiny model with its tensors or config changed."""

    def make(family: str, change: Callable[[dict[str, torch.Tensor]], None], **config: object) -> Path:
        target = tmp_path / f"copy-{len(list(tmp_path.iterdir()))}"
        shutil.copytree(tiny_model(family), target)
        tensors = load_file(target / "model.safetensors")
        change(tensors)
        save_file({name: tensor.clone() for name, tensor in tensors.items()}, target / "model.safetensors")
        raw = json.loads((target / "config.json").read_text())
        (target / "config.json").write_text(json.dumps(raw | config))
        return target

    return make


@pytest.fixture
def warnings() -> Iterator[list[str]]:
    """What Twofold logs: its logger does not pass records on to the root logger that caplog reads."""
    messages: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logger = logging.getLogger("twofold")
    logger.addHandler(handler)
    yield messages
    logger.removeHandler(handler)


def test_tied_head_with_and_without_a_copy(edit: Callable[..., Path], tiny_model: TinyModel) -> None:
    def add_copy(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    plain = logits_of(load(tiny_model("llama-tied")), TOKENS)
    assert torch.equal(plain, logits_of(load(edit("llama-tied", add_copy)), TOKENS))


@pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")
def test_tied_matrix_is_in_memory_once(edit: Callable[..., Path]) -> None:
    """And still gives the embedding's rows as they are stored."""
    matrix = torch.randn(256, 64).to(torch.bfloat16)

    def narrow(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.embed_tokens.weight"] = matrix

    model = load(edit("llama-tied", narrow, vocab_size=256))
    assert held_bytes([model._embedding, model._head]) == matrix.nbytes
    assert torch.equal(model._embedding(torch.arange(256)), matrix.float())


def test_stored_head_that_differs_is_used_and_said(edit: Callable[..., Path], warnings: list[str]) -> None:
    def double(tensors: dict[str, torch.Tensor]) -> None:
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] * 2

    tied = logits_of(load(edit("llama-tied", lambda tensors: None)), TOKENS)
    torch.testing.assert_close(logits_of(load(edit("llama-tied", double)), TOKENS), 2 * tied)
    assert any("lm_head" in message for message in warnings)


def test_untied_head_must_be_there(edit: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"lm_head\.weight"):
        load(edit("llama", lambda tensors: tensors.pop("lm_head.weight")))


@pytest.mark.parametrize(
    "name", ["model.embed_tokens.weight", "model.layers.1.mlp.up_proj.weight", "model.layers.0.input_layernorm.weight"]
)
def test_missing_parameter_is_named(edit: Callable[..., Path], name: str) -> None:
    with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
        load(edit("llama", lambda tensors: tensors.pop(name)))


def test_wrong_shape_names_both_shapes(edit: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"q_proj.*\[64, 64\].*\[128, 64\]"):
        load(edit("llama", lambda tensors: None, head_dim=32))


def test_missing_bias_of_a_plain_model_is_named(edit: Callable[..., Path]) -> None:
    with pytest.raises(CheckpointError, match=r"layers\.1\.self_attn\.k_proj\.bias"):
        load(edit("qwen2", lambda tensors: tensors.pop("model.layers.1.self_attn.k_proj.bias")))


def test_stored_bias_that_the_config_does_not_know_is_used(edit: Callable[..., Path]) -> None:
    """A Llama with biases on q, k and v only equals the same weights under a config that declares all biases."""
    bias = torch.linspace(-1, 1, 32)

    def only_k(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.0.self_attn.k_proj.bias"] = bias

    def declared(tensors: dict[str, torch.Tensor]) -> None:
        sizes = {"q_proj": 64, "k_proj": 32, "v_proj": 32, "o_proj": 64}
        for layer in range(2):
            for module, size in sizes.items():
                tensors[f"model.layers.{layer}.self_attn.{module}.bias"] = torch.zeros(size)
        only_k(tensors)

    silent = logits_of(load(edit("llama", only_k)), TOKENS)
    assert torch.equal(silent, logits_of(load(edit("llama", declared, attention_bias=True)), TOKENS))
    assert not torch.allclose(silent, logits_of(load(edit("llama", lambda tensors: None)), TOKENS), atol=1e-3)


def test_harmless_leftovers_are_reported_by_name(edit: Callable[..., Path], warnings: list[str]) -> None:
    def extra(tensors: dict[str, torch.Tensor]) -> None:
        tensors["model.layers.7.mlp.up_proj.weight"] = torch.zeros(2, 2)  # of a layer that only predicts ahead
        tensors["model.layers.7.eh_proj.weight"] = torch.zeros(2, 4)
        tensors["mtp.norm.weight"] = torch.zeros(2)
        tensors["model.layers.0.self_attn.q_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.zeros(8)

    load(edit("llama", extra))
    reported = [message for message in warnings if "not used" in message]
    assert len(reported) == 1
    assert "model.layers.7.mlp.up_proj.weight" in reported[0] and "inv_freq" not in reported[0]
    assert "mtp.norm.weight" in reported[0] and "self_attn.q_scale" in reported[0]


def test_more_layers_than_the_config_says(edit: Callable[..., Path]) -> None:
    folder = edit("llama", lambda tensors: None, num_hidden_layers=1)
    words = r"model\.layers\.1\..* in .*safetensors belongs to one of 1 layers beyond the 1 .*num_hidden_layers"
    with pytest.raises(CheckpointError, match=words):
        load(folder)
    with pytest.raises(CheckpointError, match=words):  # and before a weight is read
        survey_model(resolve_model(str(folder)), KernelSet(select_platform("cpu").spec), torch.float32, block_size=16)


def test_missing_bias_of_a_quantized_model_is_named(edit: Callable[..., Path]) -> None:
    def quantize(tensors: dict[str, torch.Tensor]) -> None:
        for name in [name for name in tensors if name.endswith("_proj.weight")]:
            tensors[name.replace(".weight", ".weight_scale")] = torch.ones(1)
            tensors[name] = tensors[name].to(torch.float8_e4m3fn)
        tensors.pop("model.layers.1.self_attn.k_proj.bias")

    folder = edit("qwen2", quantize, quantization_config={"quant_method": "fp8", "activation_scheme": "dynamic"})
    words = r"tensor model\.layers\.1\.self_attn\.k_proj\.bias is missing from .*fetch"
    with pytest.raises(CheckpointError, match=words):
        load(folder)
    with pytest.raises(CheckpointError, match=words):
        survey_model(resolve_model(str(folder)), KernelSet(select_platform("cpu").spec), torch.float32, block_size=16)


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.mlp.up_proj.weight_scale",
        "model.layers.0.self_attn.q_proj.lora_A.weight",
        "model.layers.1.self_attn.q_norm.weight",
        "vision_tower.patch_embed.weight",
        "model.layers.1.self_attn.unknown_k_scale",  # B028: a scale under a name that nobody knows
    ],
)
def test_a_tensor_that_nothing_asked_for_is_an_error(edit: Callable[..., Path], name: str) -> None:
    def extra(tensors: dict[str, torch.Tensor]) -> None:
        tensors[name] = torch.ones(1)

    folder, words = edit("llama", extra), rf"{re.escape(name)} in .*model\.safetensors belongs to no layer"
    with pytest.raises(CheckpointError, match=words):
        load(folder)
    kernels = KernelSet(select_platform("cpu").spec)
    with pytest.raises(CheckpointError, match=words):  # and before a weight is read
        survey_model(resolve_model(str(folder)), kernels, torch.float32, block_size=16)


def test_a_file_of_which_nothing_is_used_is_not_part_of_the_model(
    edit: Callable[..., Path], tmp_path: Path, warnings: list[str]
) -> None:
    folder = edit("llama", lambda tensors: None)
    (folder / "model.safetensors").rename(folder / "gptq_model-4bit-32g.safetensors")
    save_file({"logits": torch.zeros(3)}, folder / "reference.safetensors")
    load(folder)
    assert any("not used" in message and "logits" in message for message in warnings)


def test_weight_bytes_counts_parameters_once(tiny_model: TinyModel) -> None:
    tensors = load_file(tiny_model("llama-tied") / "model.safetensors")
    assert load(tiny_model("llama-tied")).weight_bytes == sum(tensor.nbytes for tensor in tensors.values())


def test_progress_counts_layers(tiny_model: TinyModel) -> None:
    from twofold.engine.config import EngineConfig
    from twofold.engine.models import load_model
    from twofold.engine.sources import resolve_model
    from twofold.kernels.kernel_set import KernelSet
    from twofold.platforms import select_platform

    seen: list[tuple[int, int]] = []
    platform, path = select_platform("cpu"), str(tiny_model("llama"))
    load_model(
        resolve_model(path), EngineConfig(model=path), platform, KernelSet(platform.spec), lambda *at: seen.append(at)
    )
    assert seen == [(1, 2), (2, 2)]
