"""bitsandbytes: nf4 with plain and nested scales, and int8, against their definition."""

from __future__ import annotations

import json

import pytest
import torch
from stored_tensors import StoredTensors
from torch import Tensor
from twofold.errors import CheckpointError
from twofold.quant.canonical import dequantize
from twofold.quant.formats import detect_format

FOUR = {"quant_method": "bitsandbytes", "load_in_4bit": True, "bnb_4bit_quant_type": "nf4"}
EIGHT = {"quant_method": "bitsandbytes", "load_in_8bit": True, "llm_int8_skip_modules": ["lm_head", "o_proj"]}
ROWS, COLUMNS, BLOCK = 6, 48, 32


def state(**more: object) -> Tensor:
    return torch.tensor(
        list(json.dumps({"shape": [ROWS, COLUMNS], "blocksize": BLOCK, **more}).encode()), dtype=torch.uint8
    )


def four_bit(nested: bool) -> tuple[StoredTensors, list[list[float]]]:
    """Stored tensors and the matrix, element by element; blocks run across rows."""
    random = torch.Generator().manual_seed(4)
    codes = torch.randint(0, 16, (ROWS * COLUMNS,), generator=random)
    table, num_blocks = torch.linspace(-1, 1, 16), ROWS * COLUMNS // BLOCK
    absmax = torch.rand(num_blocks, generator=random)
    tensors = {
        "m.weight": (codes[0::2] * 16 + codes[1::2]).to(torch.uint8)[:, None],
        "m.weight.quant_map": table,
        "m.weight.absmax": absmax,
        "m.weight.quant_state.bitsandbytes__nf4": state(),
    }
    if nested:
        indices = torch.randint(0, 256, (num_blocks,), generator=random)
        outer, inner = torch.rand(3, generator=random), torch.linspace(-1, 1, 256)
        tensors |= {
            "m.weight.absmax": indices.to(torch.uint8),
            "m.weight.nested_absmax": outer,
            "m.weight.nested_quant_map": inner,
            "m.weight.quant_state.bitsandbytes__nf4": state(nested_blocksize=4, nested_offset=0.25),
        }
        absmax = torch.stack([inner[indices[b]] * outer[b // 4] + 0.25 for b in range(num_blocks)])
    values = [float(table[codes[i]] * absmax[i // BLOCK]) for i in range(ROWS * COLUMNS)]
    return StoredTensors(tensors), [values[row * COLUMNS : (row + 1) * COLUMNS] for row in range(ROWS)]


@pytest.mark.parametrize("nested", [False, True])
def test_nf4(nested: bool) -> None:
    source, expected = four_bit(nested)
    layout = detect_format(FOUR)
    weight = layout.load(source, "m", torch.float32)
    torch.testing.assert_close(dequantize(weight), torch.tensor(expected), rtol=1e-6, atol=1e-7)
    assert [(name, shape) for name, _, shape in layout.check(source)] == [("m", (ROWS, COLUMNS))]
    assert set(source.taken) == set(source.names) <= set(layout.tensor_names("m"))


def test_int8() -> None:
    codes, scales = torch.randint(-127, 128, (8, 16), dtype=torch.int8), torch.rand(8)
    source = StoredTensors({"m.weight": codes, "m.SCB": scales, "m.weight_format": torch.tensor(0, dtype=torch.uint8)})
    layout = detect_format(EIGHT)
    weight = layout.load(source, "m", torch.float32)
    assert str(weight.scheme) == "w8 channel sym"
    torch.testing.assert_close(dequantize(weight), codes.float() * scales[:, None] / 127, rtol=1e-6, atol=0)
    assert str(layout.scheme("model.layers.0.self_attn.o_proj")) == str(layout.scheme("lm_head")) == "dense"


def test_plain_modules_and_damage() -> None:
    plain = torch.randn(4, 8, dtype=torch.bfloat16)
    assert torch.equal(
        dequantize(detect_format(FOUR).load(StoredTensors({"m.weight": plain}), "m", torch.float32)), plain.float()
    )
    with pytest.raises(CheckpointError, match=r"m\.SCB is missing"):
        detect_format(EIGHT).check(StoredTensors({"m.weight": torch.zeros(4, 8, dtype=torch.int8)}))
    with pytest.raises(CheckpointError, match="bitsandbytes__nf4 is missing"):
        detect_format(FOUR).check(StoredTensors({"m.weight": torch.zeros(16, 1, dtype=torch.uint8)}))
    source, _ = four_bit(False)
    source.tensors["m.weight"] = source.tensors["m.weight"][:-1]
    with pytest.raises(CheckpointError, match="holds 143 bytes"):
        detect_format(FOUR).load(source, "m", torch.float32)
