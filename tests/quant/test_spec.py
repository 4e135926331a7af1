"""The one-word form of a quantization."""

from __future__ import annotations

from dataclasses import replace

import pytest
from twofold.errors import ConfigError
from twofold.quant import QuantizeSpec, parse_quantize_spec


@pytest.mark.parametrize(
    "text",
    [
        *("rtn:4:32", "rtn:8:-1", "rtn:3:64:sym", "awq:4:128", "gptq:4:64:sym"),
        *("fp8", "fp8:static", "fp8:block", "smoothquant", "auto:4.25", "auto:5:sym"),
    ],
)
def test_round_trip(text: str) -> None:
    assert str(parse_quantize_spec(text)) == text


def test_fields() -> None:
    assert parse_quantize_spec(" RTN:4:128:asym ") == QuantizeSpec(
        method="rtn", bits=4, group_size=128, symmetric=False
    )
    assert str(parse_quantize_spec("rtn:4:-1:sym").scheme) == "w4 channel sym"
    assert str(parse_quantize_spec("fp8").scheme) == "fp8 channel a-fp8 token"
    assert str(parse_quantize_spec("fp8:static").scheme) == "fp8 channel a-fp8 tensor static"
    assert str(parse_quantize_spec("fp8:block").scheme) == "fp8 128x128 a-fp8 g128"
    assert str(parse_quantize_spec("smoothquant").scheme) == "int8 channel a8 token"
    assert parse_quantize_spec("smoothquant:8") == parse_quantize_spec("smoothquant")
    assert {scheme.bits for scheme in parse_quantize_spec("auto:4.25").schemes} == {2, 3, 4, 8}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("rtn", "METHOD:BITS:GROUP"),
        ("rtn:4:32:sym:x", "METHOD:BITS:GROUP"),
        ("awk:4:32", "'awk' is not one of rtn"),
        ("rtn:5:32", "bits 5 is not one of 2, 3, 4, 8"),
        ("rtn:four:32", "'four' is not a number"),
        ("rtn:\N{ARABIC-INDIC DIGIT FOUR}:32", "is not a number"),
        ("rtn:4:3_2", "'3_2' is not a number"),
        ("rtn:4: 32", "' 32' is not a number"),
        ("rtn:4:33", "group size 33 is not one of -1, 16, 32"),
        ("rtn:4:32:odd", "'odd' is not one of asym, sym"),
        ("fp8:tensor", "variant of fp8 'tensor' is not one of dynamic, static, block"),
        ("fp8:block:8", "fp8, fp8:static or fp8:block"),
        ("smoothquant:4", "write METHOD:BITS:GROUP .* smoothquant"),
        ("auto", "auto:BITS, such as auto:4.25"),
        ("auto:1", "target bits 1.0 are not between 2.5 and 8.25"),
        ("auto:1e1", "'1e1' are not a number"),
        ("auto:4.25:odd", "'odd' is not one of asym, sym"),
    ],
)
def test_wrong_parts_are_named(text: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_quantize_spec(text)


@pytest.mark.parametrize(
    ("text", "clips"),
    [("rtn:4:32", True), ("rtn:4:16", True), ("rtn:4:64", False), ("rtn:3:-1", False), ("rtn:4:64:sym", True)],
)
def test_ranges_of_wide_groups_with_zero_points_are_whole(text: str, clips: bool) -> None:
    spec = parse_quantize_spec(text)
    assert spec.clips is clips
    assert ("whole ranges" in spec.description) is not clips
    assert replace(spec, clip="search").clips and not replace(spec, clip="none").clips
