"""Quantizing tiny models: what is written, what it stands for, and what is refused before any work."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from gptq_oracle import decode_linear
from safetensors.torch import load_file, save_file
from twofold.engine.sources import resolve_model
from twofold.engine.tokenizer import load_tokenizer
from twofold.engine.weights.safetensors_dir import SafetensorsCheckpoint
from twofold.errors import CheckpointError, ConfigError, StorageError
from twofold.quant import QuantizeSpec, quantize_model
from twofold.quant.calibration import CalibrationSpec

TinyModel = Callable[..., Path]
PROJECTIONS = 7


def stored(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = {}
    for path in folder.glob("*.safetensors"):
        tensors.update(load_file(path))
    return tensors


def quantization(folder: Path) -> dict[str, Any]:
    config = json.loads((folder / "config.json").read_text())["quantization_config"]
    assert config == json.loads((folder / "quantize_config.json").read_text())
    return config


def linear(tensors: dict[str, torch.Tensor], module: str) -> dict[str, torch.Tensor]:
    return {part: tensors[f"{module}.{part}"] for part in ("qweight", "qzeros", "scales", "g_idx")}


def check_truth(folder: Path, source: Path) -> None:
    """B112: every linear layer of the decoder is quantized, or is plain and named; never both, never neither."""
    tensors, config = stored(folder), quantization(folder)
    listed = [key[3:-1].replace("\\", "") for key in config.get("dynamic", {})]
    for name in stored(source):
        module = name.removesuffix(".weight")
        if ".layers." in name and name.endswith("_proj.weight"):
            assert (f"{module}.qweight" in tensors) != (module in listed), module
            assert (f"{module}.qweight" in tensors) != (name in tensors), module


@pytest.mark.parametrize(
    ("spec", "version"), [("rtn:4:32", 2), ("rtn:4:32:sym", 1), ("rtn:3:-1", 2), ("rtn:8:16:sym", 1)]
)
def test_an_independent_decoder_reads_the_weights(
    tiny_model: TinyModel, tmp_path: Path, spec: str, version: int
) -> None:
    source = tiny_model("llama")
    report = quantize_model(str(source), spec, tmp_path / "out")
    tensors, original = stored(tmp_path / "out"), stored(source)
    bits = report.spec.bits
    assert quantization(tmp_path / "out")["checkpoint_format"] == ("gptq" if version == 1 else "gptq_v2")
    for error in report.errors:
        weight = original[f"{error.module}.weight"].double().numpy()
        decoded = decode_linear(linear(tensors, error.module), bits, version)
        relative = float(((decoded - weight) ** 2).sum() ** 0.5 / (weight**2).sum() ** 0.5)
        assert relative == pytest.approx(error.relative_rms, rel=1e-3)
        assert relative < {3: 0.25, 4: 0.1, 8: 0.01}[bits]
    assert len(report.errors) == 2 * PROJECTIONS and report.num_layers == 2 and not report.plain


@pytest.mark.parametrize("kv_cache", [None, "fp8"])
def test_without_clipping_the_largest_weights_stay(tiny_model: TinyModel, tmp_path: Path, kv_cache: str | None) -> None:
    """A grid over a whole range has levels within half a step of both its ends; with a search some are clipped."""
    source = tiny_model("llama")
    spec = QuantizeSpec(symmetric=True, clip="none", kv_cache=kv_cache, format="compressed-tensors")
    calibration = CalibrationSpec(num_sequences=2, length=32)
    report = quantize_model(str(source), spec, tmp_path / "out", calibration=calibration)
    assert report.spec.description == "rtn w4g32 sym, whole ranges"
    tensors, original = stored(tmp_path / "out"), stored(source)
    for error in report.errors:
        largest = original[f"{error.module}.weight"].float().unflatten(1, (-1, 32)).abs().amax(-1)
        assert torch.allclose(tensors[f"{error.module}.weight_scale"].float(), largest / 7.5, rtol=2**-10)


def test_report_counts_what_is_stored(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("llama")
    report = quantize_model(str(source), "rtn:4:32", tmp_path / "out")
    tensors = stored(tmp_path / "out")
    parts = [tensor for name, tensor in tensors.items() if name.endswith(("qweight", "qzeros", "scales", "g_idx"))]
    weights = sum(stored(source)[f"{error.module}.weight"].numel() for error in report.errors)
    assert report.bits_per_weight == pytest.approx(sum(part.nbytes for part in parts) * 8 / weights)
    assert report.linear_bits == report.bits_per_weight
    every = sum(tensor.numel() for tensor in stored(source).values())
    assert report.model_bits == pytest.approx(sum(tensor.nbytes for tensor in tensors.values()) * 8 / every)
    assert report.bytes_after == (tmp_path / "out" / "model.safetensors").stat().st_size
    assert report.worst.relative_rms == max(error.relative_rms for error in report.errors)


def test_everything_else_is_carried_over(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("qwen2")
    quantize_model(str(source), "rtn:4:32", tmp_path / "out")
    tensors = stored(tmp_path / "out")
    for name, tensor in stored(source).items():
        if name.endswith("_proj.weight"):
            assert name not in tensors
        else:
            assert torch.equal(tensors[name], tensor.half()), name


def test_progress_counts_layers(tiny_model: TinyModel, tmp_path: Path) -> None:
    seen: list[tuple[int, int]] = []
    quantize_model(
        str(tiny_model("llama")), "rtn:4:32", tmp_path / "out", lambda done, total: seen.append((done, total))
    )
    assert seen[0] == (0, 2) and seen[-1] == (2, 2) and seen == sorted(seen)


def test_shards(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = tiny_model("llama")
    quantize_model(str(source), "rtn:4:32", tmp_path / "one")
    quantize_model(str(source), "rtn:4:32", tmp_path / "many", max_shard_bytes=40_000)
    assert len(list((tmp_path / "many").glob("*.safetensors"))) > 2
    one, many = stored(tmp_path / "one"), stored(tmp_path / "many")
    assert one.keys() == many.keys() and all(torch.equal(one[name], many[name]) for name in one)


class TestRaggedGroups:
    """B108: a layer that does not fit stays plain and is listed; if none fits, the sizes that would are named."""

    def test_some_layers_do_not_fit(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        source = tiny_model("llama", intermediate_size=96)
        report = quantize_model(str(source), "rtn:4:64", tmp_path / "out")
        assert [module for module, _ in report.plain] == [f"model.layers.{i}.mlp.down_proj" for i in (0, 1)]
        original, tensors = stored(source), stored(tmp_path / "out")
        linear = {name.removesuffix(".weight") for name in original if name.endswith("_proj.weight")}
        kept = sum(t.nbytes for name, t in tensors.items() if name.rpartition(".")[0] in linear)
        weights = sum(original[f"{module}.weight"].numel() for module in linear)
        assert report.linear_bits == pytest.approx(kept * 8 / weights) and report.linear_bits > report.bits_per_weight
        check_truth(tmp_path / "out", source)

    def test_rows_that_do_not_fill_words(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        source = tiny_model("llama", intermediate_size=36)
        report = quantize_model(str(source), "rtn:4:-1", tmp_path / "out")
        plain = {module.rpartition(".")[2] for module, _ in report.plain}
        assert plain == {"gate_proj", "up_proj", "down_proj"}
        check_truth(tmp_path / "out", source)

    def test_nothing_fits(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        source = tiny_model("llama", intermediate_size=96)
        with pytest.raises(ConfigError, match=r"input features are not divisible.*sizes that fit: -1, 16, 32"):
            quantize_model(str(source), "rtn:4:128", tmp_path / "out")
        assert not list(tmp_path.iterdir())


class TestSideFiles:
    """B109: a quantized checkpoint is a drop-in for the original."""

    EXTRA = {
        "special_tokens_map.json": "{}",
        "added_tokens.json": "{}",
        "modeling_custom.py": "raise RuntimeError\n",
        "README.md": "# model\n",
    }

    def make(self, tiny_model: TinyModel, tmp_path: Path) -> tuple[Path, Path]:
        source, out = tmp_path / "source", tmp_path / "out"
        source.mkdir()
        for path in tiny_model("llama").iterdir():
            (source / path.name).write_bytes(path.read_bytes())
        for name, text in self.EXTRA.items():
            (source / name).write_text(text)
        (source / "generation_config.json").write_text('{"eos_token_id": [256, 257], "temperature": 0.5}')
        (source / "pytorch_model.bin").write_bytes(b"stale")
        quantize_model(str(source), "rtn:4:32", out)
        return source, out

    def test_files(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        source, out = self.make(tiny_model, tmp_path)
        weights = {"model.safetensors", "pytorch_model.bin"}
        for path in source.iterdir():
            if path.name not in weights | {"config.json"}:
                assert (out / path.name).read_bytes() == path.read_bytes(), path.name
        names = {path.name for path in out.iterdir()}
        assert names == {path.name for path in source.iterdir()} - {"pytorch_model.bin"} | {"quantize_config.json"}

    def test_config(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        source, out = self.make(tiny_model, tmp_path)
        before, after = (json.loads((folder / "config.json").read_text()) for folder in (source, out))
        changed = {key for key in before.keys() | after.keys() if before.get(key) != after.get(key)}
        assert changed == {"quantization_config", "dtype"}

    def test_text(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        source, out = self.make(tiny_model, tmp_path)
        before, after = (load_tokenizer(resolve_model(str(folder))) for folder in (source, out))
        texts = [f"line {i} of {i * 37} \N{SNOWMAN}<|im_end|> \n" * (i % 4) for i in range(100)]
        assert [before.encode(text) for text in texts] == [after.encode(text) for text in texts]
        chat = [{"role": "user", "content": "hello"}]
        assert before.render_chat(chat) == after.render_chat(chat)


class TestRefusals:
    """Wrong arguments are found before the first weight is read, and leave nothing behind."""

    @pytest.fixture(autouse=True)
    def no_reading(self, monkeypatch: pytest.MonkeyPatch) -> None:
        def refuse(self: SafetensorsCheckpoint, name: str) -> torch.Tensor:
            raise AssertionError(f"{name} was read")

        monkeypatch.setattr(SafetensorsCheckpoint, "_read", refuse)

    def test_output_not_empty(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        (tmp_path / "notes.txt").write_text("mine")
        with pytest.raises(ConfigError, match="not empty; choose another folder, or --overwrite"):
            quantize_model(str(tiny_model("llama")), "rtn:4:32", tmp_path)
        with pytest.raises(ConfigError, match="holds no model"):
            quantize_model(str(tiny_model("llama")), "rtn:4:32", tmp_path, overwrite=True)
        assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]

    def test_output_is_a_file_or_below_one(self, tiny_model: TinyModel, tmp_path: Path) -> None:
        (tmp_path / "file").touch()
        for output, text in ((tmp_path / "file", "is a file"), (tmp_path / "file" / "x", "below a file")):
            with pytest.raises(ConfigError, match=text):
                quantize_model(str(tiny_model("llama")), "rtn:4:32", output)

    def test_output_holds_the_source(self, tiny_model: TinyModel) -> None:
        source = tiny_model("llama")
        for output in (source, source.parent):
            with pytest.raises(ConfigError, match="is or contains the model itself"):
                quantize_model(str(source), "rtn:4:32", output, overwrite=True)

    def test_no_space(self, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr("shutil.disk_usage", lambda path: type("Usage", (), {"free": 1000})())
        with pytest.raises(StorageError, match="free; free some space, or choose a folder on another disk"):
            quantize_model(str(tiny_model("llama")), "rtn:4:32", tmp_path / "out")


def test_a_quantized_model_is_not_quantized_again(tiny_model: TinyModel, tmp_path: Path) -> None:
    quantize_model(str(tiny_model("llama")), "rtn:4:32", tmp_path / "once")
    with pytest.raises(ConfigError, match="quantized already"):
        quantize_model(str(tmp_path / "once"), "rtn:4:32", tmp_path / "twice")


def test_overwrite_replaces_the_whole_folder(tiny_model: TinyModel, tmp_path: Path) -> None:
    quantize_model(str(tiny_model("llama")), "rtn:4:32", tmp_path / "out", max_shard_bytes=40_000)
    quantize_model(str(tiny_model("llama")), "rtn:8:32", tmp_path / "out", overwrite=True)
    assert [path.name for path in (tmp_path / "out").glob("*.safetensors*")] == ["model.safetensors"]
    assert quantization(tmp_path / "out")["bits"] == 8
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


@pytest.mark.parametrize(
    ("name", "value"), [("model.layers.1.mlp.up_proj.weight", float("nan")), ("model.norm.weight", 1e6)]
)
def test_a_bad_weight_is_named_and_nothing_is_left(
    tiny_model: TinyModel, tmp_path: Path, name: str, value: float
) -> None:
    source = tmp_path / "source"
    source.mkdir()
    for path in tiny_model("llama").iterdir():
        (source / path.name).write_bytes(path.read_bytes())
    tensors = load_file(source / "model.safetensors")
    tensors[name].view(-1)[5] = value
    save_file(tensors, source / "model.safetensors")
    with pytest.raises(CheckpointError, match=name):
        quantize_model(str(source), "rtn:4:32", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["source"]
