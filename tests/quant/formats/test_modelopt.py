"""ModelOpt's NVFP4 against its definition, and against compressed-tensors' of the same weights."""

from __future__ import annotations

import pytest
import torch
from stored_tensors import SHARED, StoredTensors
from torch import Tensor
from twofold.errors import CheckpointError, UnsupportedError
from twofold.quant.canonical import MicroScaledWeight, dequantize
from twofold.quant.formats import detect_format, read_quantization

CONFIG = {"quant_method": "modelopt", "quant_algo": "NVFP4", "ignore": ["lm_head", "model.layers.0.mlp*"]}
E2M1 = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
REAL = SHARED / "checkpoints" / "llmcompressor-nvfp4-mistral"


def stored(rows: int = 5, columns: int = 48) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        "m.weight": torch.randint(0, 256, (rows, columns // 2), dtype=torch.uint8, generator=generator),
        "m.weight_scale": torch.rand(rows, columns // 16, generator=generator).to(torch.float8_e4m3fn),
        "m.weight_scale_2": torch.tensor(0.0371),
        "m.input_scale": torch.tensor(0.25),
    }


@pytest.mark.parametrize("algorithm", ["NVFP4", "W4A16_NVFP4", "NVFP4_AWQ"])
def test_definition(algorithm: str) -> None:
    tensors = stored()
    weight = detect_format(CONFIG | {"quant_algo": algorithm}).load(StoredTensors(tensors), "m", torch.float32)
    assert isinstance(weight, MicroScaledWeight)
    found = dequantize(weight)
    for row in range(5):
        for column in range(48):
            byte = int(tensors["m.weight"][row, column // 2])
            code = byte & 15 if column % 2 == 0 else byte >> 4
            value = E2M1[code & 7] * (-1 if code & 8 else 1)
            value *= float(tensors["m.weight_scale"][row, column // 16]) * 0.0371
            assert found[row, column].item() == pytest.approx(value, rel=1e-6)
    assert (weight.scheme.activation is None) == (algorithm == "W4A16_NVFP4")
    if weight.input_scale is not None:
        assert weight.input_scale.item() == 4.0


@pytest.mark.skipif(not REAL.is_dir(), reason="no ../shared/checkpoints beside the repository")
def test_the_same_weights_as_compressed_tensors() -> None:
    """Scheme, weights and input scale of a real checkpoint do not change with the names it is stored under."""
    import json

    source = StoredTensors.from_folder(REAL)
    layout = detect_format(read_quantization(REAL, json.loads((REAL / "config.json").read_text())))
    module = "model.layers.0.self_attn.q_proj"
    ours = {"weight": "weight_packed", "weight_scale": "weight_scale"}
    tensors = {f"{module}.{name}": source.get(f"{module}.{theirs}") for name, theirs in ours.items()}
    divisors = {"weight_scale_2": "weight_global_scale", "input_scale": "input_global_scale"}
    tensors |= {f"{module}.{name}": 1 / source.get(f"{module}.{theirs}")[0] for name, theirs in divisors.items()}
    expected = layout.load(source, module, torch.float32)
    found = detect_format(CONFIG).load(StoredTensors(tensors), module, torch.float32)
    assert found.scheme == expected.scheme
    torch.testing.assert_close(dequantize(found), dequantize(expected), rtol=1e-6, atol=0)
    assert isinstance(found, MicroScaledWeight) and isinstance(expected, MicroScaledWeight)
    torch.testing.assert_close(found.input_scale, expected.input_scale)


def test_what_stays_dense() -> None:
    layout = detect_format(CONFIG)
    names = ("lm_head", "model.layers.0.mlp.up_proj", "model.layers.1.mlp.up_proj")
    assert [str(layout.scheme(name)) for name in names[:2]] == ["dense", "dense"]
    assert str(layout.scheme(names[2])).startswith("nvfp4 g16")
    plain = StoredTensors({"m.weight": torch.randn(3, 4).bfloat16()})
    assert str(layout.load(plain, "m", torch.float32).scheme) == "dense"


@pytest.mark.parametrize("missing", ["m.weight_scale", "m.weight_scale_2", "m.input_scale"])
def test_missing_scales_are_named(missing: str) -> None:
    tensors = stored()
    del tensors[missing]
    with pytest.raises(CheckpointError, match=missing):
        detect_format(CONFIG).stored_scheme(StoredTensors(tensors), "m")


def test_wrong_shapes_and_algorithms_are_named() -> None:
    with pytest.raises(CheckpointError, match=r"m\.weight .*do not fit nvfp4 g16"):
        detect_format(CONFIG).stored_scheme(
            StoredTensors(stored() | {"m.weight_scale": stored(5, 64)["m.weight_scale"]}), "m"
        )
    with pytest.raises(UnsupportedError, match=r"'MIXED_PRECISION'.*NVFP4"):
        detect_format(CONFIG | {"quant_algo": "MIXED_PRECISION"})
