"""Messages for tensors that are not there: the tensor that the scheme needs, what lies instead, and the remedy."""

from __future__ import annotations

import pytest
import torch
from stored_tensors import StoredTensors
from twofold.errors import CheckpointError
from twofold.quant.formats import detect_format
from twofold.quant.formats.missing import missing


def source(*names: str) -> StoredTensors:
    return StoredTensors({name: torch.zeros(4, 4) for name in names})


def test_a_renamed_tensor_is_shown() -> None:
    stored = source("a.q.qweight_x", "a.q.scales", "b.q.qweight")
    said = missing(stored, "a.q.qweight")
    assert "tensor a.q.qweight is missing from" in said
    assert "a.q.qweight_x, which no format knows, may be it: rename it, or fetch" in said
    assert "may be it" not in missing(stored, "a.q.qzeros".replace("a.", "b."))


@pytest.mark.parametrize(("part", "tool"), [("qweight", "GPTQ's or AWQ's"), ("weight_packed", "compressed-tensors'")])
def test_quantized_tensors_without_a_config(part: str, tool: str) -> None:
    said = missing(source(f"a.q.{part}"), "a.q.weight")
    assert f"the tensors are {tool}, but the config says nothing of a quantization" in said
    assert "Take the config.json (with its quantization_config)" in said


NVFP4 = {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16}


@pytest.mark.parametrize(
    ("weights", "left", "name"),
    [
        ({"num_bits": 4, "type": "int", "strategy": "group", "group_size": 32}, "weight_scale", "weight_packed"),
        (
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "weight_scale",
            "weight_packed",
        ),
        (
            {"num_bits": 4, "type": "float", "strategy": "tensor_group", "group_size": 16},
            "weight_packed",
            "weight_scale",
        ),
    ],
)
def test_the_tensor_that_the_scheme_needs_is_named(weights: dict[str, object], left: str, name: str) -> None:
    config = {"quant_method": "compressed-tensors", "config_groups": {"g": {"targets": ["Linear"], "weights": weights}}}
    dtype = torch.uint8 if left == "weight_packed" else torch.float32
    stored = StoredTensors({f"m.{left}": torch.zeros(4, 4, dtype=dtype)})
    with pytest.raises(CheckpointError, match=rf"tensor m\.{name} is missing from .*[Ff]etch"):
        detect_format(config).check(stored)
