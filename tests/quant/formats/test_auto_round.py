"""AutoRound: GPTQ's and AWQ's packing under its own name, read as those formats are."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from real_checkpoints import engine_logits, reference, relative_error
from stored_tensors import SHARED
from twofold.errors import UnsupportedError
from twofold.quant.formats import detect_format

BASE = {"quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": False, "data_type": "int"}


def renamed(source: str, target: Path, packing: str) -> Path:
    """A real checkpoint as AutoRound would have described it."""
    shutil.copytree(
        SHARED / "checkpoints" / source, target, ignore=shutil.ignore_patterns("*config.json", "reference*")
    )
    config = json.loads((SHARED / "checkpoints" / source / "config.json").read_text())
    config["quantization_config"] = BASE | {"packing_format": packing}
    (target / "config.json").write_text(json.dumps(config))
    return target


@pytest.mark.skipif(not (SHARED / "checkpoints").is_dir(), reason="no ../shared/checkpoints beside the repository")
@pytest.mark.parametrize(
    ("source", "packing"),
    [
        ("autogptq-w4-g32-asym-llama-tied", "auto_round:auto_gptq"),
        ("autoawq-gemm-g32-gemma2", "auto_round:auto_awq"),
    ],
)
def test_packing_of_the_real_tools(source: str, packing: str, tmp_path: Path) -> None:
    stored = reference(SHARED / "checkpoints" / source)
    logits = engine_logits(renamed(source, tmp_path / "model", packing), stored["input_ids"])
    assert relative_error(logits, stored["logits_weights_fp32"]) < 1e-4


def test_layers_that_differ() -> None:
    extra = {
        "model.layers.0.mlp.up_proj": {"bits": 16},
        "model.layers.1.mlp.up_proj": {"bits": 8, "group_size": 128, "sym": True},
        "lm_head": {"bits": 4},
    }
    layout = detect_format(BASE | {"extra_config": extra, "packing_format": "auto_round:auto_gptq"})
    schemes = {name: str(layout.scheme(name)) for name in (*extra, "model.layers.2.mlp.up_proj")}
    assert list(schemes.values()) == ["dense", "w8g128 sym", "w4g32 asym", "w4g32 asym"]
    awq = detect_format(BASE | {"extra_config": extra, "packing_format": "auto_round:auto_awq"})
    assert [str(awq.scheme(name)) for name in schemes] == ["dense", "w4g32 asym", "dense", "w4g32 asym"]


@pytest.mark.parametrize("change", [{"packing_format": "auto_round:fp8"}, {"data_type": "mx_fp"}])
def test_other_packings_are_named(change: dict[str, str]) -> None:
    with pytest.raises(UnsupportedError, match=r"AutoRound packing_format .* is not served"):
        detect_format(BASE | change)


def test_both_names_of_the_method() -> None:
    assert detect_format(BASE | {"quant_method": "intel/auto-round"}).name == "gptq"


@pytest.mark.parametrize(("method", "remedy"), [("hqq", "quantize the original"), ("eetq", "--quantization int8")])
def test_methods_with_a_remedy(method: str, remedy: str) -> None:
    with pytest.raises(UnsupportedError, match=f"'{method}' is not served: .*{remedy}"):
        detect_format({"quant_method": method})
