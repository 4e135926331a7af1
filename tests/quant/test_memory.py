"""Memory while quantizing: a few layers, however many the model has; what layers hand on may lie on disk."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file
from twofold.quant import QuantizeSpec, quantize_model
from twofold.quant.calibration import CalibrationSpec
from twofold.quant.calibration import activation_store as store_module

TinyModel = Callable[..., Path]
SIZES = {
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
    "initializer_range": 0.02,
}
SCRIPT = """
import sys
from pathlib import Path
from twofold.quant import quantize_model
from twofold.quant.calibration import CalibrationSpec
few = CalibrationSpec(num_sequences=2, length=32)
reports = [quantize_model(model, "fp8:static", Path(model + "-out"), calibration=few) for model in sys.argv[1:]]
print(*(report.peak_memory for report in reports))
"""


def with_layers(one_layer: Path, folder: Path, count: int) -> Path:
    """A model of ``count`` equal layers in bfloat16, a file for each."""
    folder.mkdir()
    for path in one_layer.iterdir():
        if path.suffix != ".safetensors":
            (folder / path.name).write_bytes(path.read_bytes())
    config = json.loads((one_layer / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "num_hidden_layers": count, "dtype": "bfloat16"}))
    tensors = {name: tensor.bfloat16() for name, tensor in load_file(one_layer / "model.safetensors").items()}
    places: dict[str, str] = {}
    for number in range(count):
        part = {name.replace(".0.", f".{number}."): tensor for name, tensor in tensors.items() if ".0." in name}
        if number == 0:
            part |= {name: tensor for name, tensor in tensors.items() if ".0." not in name}
        save_file(part, folder / f"model-{number}.safetensors")
        places |= dict.fromkeys(part, f"model-{number}.safetensors")
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": places}))
    return folder


@pytest.mark.slow
def test_peak_does_not_grow_with_layers(tiny_model: TinyModel, tmp_path: Path) -> None:
    """In one process: the peak after a model of 3 layers, and after one of 18."""
    one = tiny_model("llama", num_hidden_layers=1, **SIZES)
    models = [str(with_layers(one, tmp_path / str(count), count)) for count in (3, 18)]
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, *models], capture_output=True, text=True, timeout=200, cwd=tmp_path
    )
    assert result.returncode == 0, result.stderr
    few, many = map(int, result.stdout.split())
    layer = (4 * 512 * 512 + 3 * 512 * 1024) * 2
    assert many - few < 4 * layer, f"{(many - few) / layer:.1f} layers more for 15 more layers"


def test_activations_on_disk(tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same result to the last bit, with no memory for activations at all."""
    places: list[bool] = []
    original = store_module.ActivationStore.__init__

    def noted(self: store_module.ActivationStore, *args: object, **options: object) -> None:
        original(self, *args, **options)  # type: ignore[arg-type]
        places.append(self.is_on_disk)

    monkeypatch.setattr(store_module.ActivationStore, "__init__", noted)
    source = str(tiny_model("llama"))
    spec = QuantizeSpec(method="gptq", group_size=32)
    for name, memory in (("memory", 1 << 30), ("disk", 0)):
        places.clear()
        calibration = CalibrationSpec(num_sequences=4, length=32, memory=memory)
        quantize_model(source, spec, tmp_path / name, calibration=calibration)
        assert places and all(place == (name == "disk") for place in places)
    memory_tensors, disk_tensors = (load_file(tmp_path / name / "model.safetensors") for name in ("memory", "disk"))
    assert all(torch.equal(memory_tensors[name], disk_tensors[name]) for name in memory_tensors)


@pytest.mark.parametrize("limit", [0, 1 << 20])
def test_stored_activations(tmp_path: Path, limit: int) -> None:
    """16 bits: float16 where it holds the values, bfloat16 where they are too large for it."""
    store = store_module.ActivationStore((3, 4, 8), limit, tmp_path)
    assert store.is_on_disk == (limit == 0)
    values = torch.randn(3, 4, 8, generator=torch.Generator().manual_seed(0))
    values[1] *= 1e6
    store.put(0, values)
    expected = torch.stack([values[0].half().float(), values[1].bfloat16().float(), values[2].half().float()])
    assert torch.equal(store.get(0, 3), expected)
    store.update(2, lambda part: part * 2)
    assert torch.equal(store.get(0, 3)[0], (expected[0] * 2).half().float())
    assert not list(tmp_path.iterdir())
