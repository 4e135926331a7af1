"""Options of ``twofold quantize``: what they ask for, and what does not go together is refused at once."""

from __future__ import annotations

import argparse

import pytest
from twofold.cli.quantize_spec import add_spec_arguments, spec_from
from twofold.errors import ConfigError
from twofold.quant.spec import QuantizeSpec


def spec(*words: str) -> QuantizeSpec:
    parser = argparse.ArgumentParser()
    add_spec_arguments(parser)
    return spec_from(parser.parse_args(words))


@pytest.mark.parametrize(
    ("words", "fields"),
    [
        ("", {}),
        ("--method awq --group-size 128", {"method": "awq", "group_size": 128}),
        ("--method gptq --order full --symmetric", {"method": "gptq", "order": "full", "symmetric": True}),
        ("--bits 3 --clip none", {"bits": 3, "clip": "none"}),
        ("--method fp8 --variant static --kv-cache fp8", {"method": "fp8", "variant": "static", "kv_cache": "fp8"}),
        ("--method auto --target-bits 4.25 --rotate", {"method": "auto", "target_bits": 4.25, "rotate": True}),
    ],
)
def test_what_options_ask_for(words: str, fields: dict[str, object]) -> None:
    assert spec(*words.split()) == QuantizeSpec(**fields)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--method fp8 --bits 4", "--bits is for rtn, gptq, awq, not for --method fp8"),
        ("--method smoothquant --group-size 32", "--group-size is for rtn, gptq, awq, not"),
        ("--method awq --order full", "--order is for gptq, not for --method awq"),
        ("--method gptq --clip none", "--clip is for rtn, not for --method gptq"),
        ("--variant block", "--variant is for fp8, not for --method rtn"),
        ("--target-bits 4", "--target-bits is for auto, not for --method rtn"),
        ("--method auto", "target bits go with the method auto"),
    ],
)
def test_what_does_not_go_together(words: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        spec(*words.split())
