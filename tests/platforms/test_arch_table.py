"""The architecture table against the vendors' documents, and the number formats that follow from it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import torch
import twofold
from twofold.errors import ConfigError, UnsupportedError
from twofold.platforms.arch_table import amd_arch, amd_facts, amd_fp8_kind, amd_wave_size, nvidia_facts
from twofold.platforms.fp8 import FP8_MAX, fp8_dtype, fp8_max, fp8_quantize
from twofold.platforms.spec import Fp8Kind

NONE, FNUZ, OCP = Fp8Kind.NONE, Fp8Kind.FNUZ, Fp8Kind.OCP


@pytest.mark.parametrize(
    ("name", "kind", "wave"),
    [
        ("gfx900", NONE, 64),
        ("gfx906", NONE, 64),
        ("gfx908", NONE, 64),
        ("gfx90a:sramecc+:xnack-", NONE, 64),
        ("gfx940", FNUZ, 64),
        ("gfx942:sramecc+", FNUZ, 64),
        ("gfx950", OCP, 64),
        ("gfx1030", NONE, 32),
        ("gfx1100", NONE, 32),
        ("gfx1101", NONE, 32),
        ("gfx1151", NONE, 32),
        ("gfx1200", OCP, 32),
        ("gfx1201", OCP, 32),
    ],
)
def test_b098_fp8_and_wave_of_amd_targets(name, kind, wave):
    assert amd_fp8_kind(name) is kind
    assert amd_wave_size(name) == wave
    facts = amd_facts(name)
    assert (facts.fp8, facts.wave_size, facts.arch) == (kind, wave, name.split(":")[0])
    assert ("fp8" in facts.matrix_dtypes) == (kind is not NONE)
    assert facts.shared_memory == (160 if name == "gfx950" else 64) * 1024


@pytest.mark.parametrize("name", ["", "gfx12", "gfx", "sm_90", None])
def test_b098_an_unknown_amd_name_has_no_fp8_and_no_guessed_wave(name):
    assert amd_arch(name) == ""
    assert amd_fp8_kind(name) is NONE
    with pytest.raises(UnsupportedError, match="unknown AMD architecture"):
        amd_facts(name)


@pytest.mark.parametrize(
    ("capability", "shared_kib", "fp8", "bf16"),
    [
        ((7, 0), 96, NONE, False),
        ((7, 5), 64, NONE, False),
        ((8, 0), 163, NONE, True),
        ((8, 6), 99, NONE, True),
        ((8, 9), 99, OCP, True),
        ((9, 0), 227, OCP, True),
        ((10, 0), 227, OCP, True),
        ((12, 0), 99, OCP, True),
    ],
)
def test_nvidia_capabilities(capability, shared_kib, fp8, bf16):
    facts = nvidia_facts(*capability)
    assert facts.arch == f"sm_{capability[0]}{capability[1]}"
    assert (facts.shared_memory, facts.fp8, facts.wave_size) == (shared_kib * 1024, fp8, 32)
    assert ("bf16" in facts.matrix_dtypes) == bf16


def test_too_old_for_nvidia():
    with pytest.raises(UnsupportedError, match="sm_61 is too old"):
        nvidia_facts(6, 1)


@pytest.mark.parametrize("dtype", list(FP8_MAX))
@pytest.mark.parametrize(
    "values", [[1000.0, -3.0, 0.5], [0.0, 0.0], [1.0, float("inf"), -2.0], [1e-38, -3e-39], [1e38, 1.0], []]
)
def test_b097_dynamic_scaling_stays_in_range(dtype, values):
    x = torch.tensor(values)
    quantized, scale = fp8_quantize(x, dtype)
    assert scale.isfinite() and scale > 0
    wide = quantized.float()
    assert wide.isfinite().all() and (wide.abs() <= fp8_max(dtype)).all()
    finite = x[x.isfinite()]
    if finite.numel() and finite.abs().max() > 1e-30:
        torch.testing.assert_close(scale, finite.abs().max() / fp8_max(dtype))
        step = torch.finfo(dtype).eps
        error = (wide * scale - x)[x.isfinite()].abs()
        assert (error <= finite.abs() * step + scale * torch.finfo(dtype).smallest_normal).all()


def test_b097_limits_stand_in_one_table_only():
    root = Path(twofold.__file__).parent
    folders = ("platforms", "kernels", "quant", "engine", "server", "cli")
    literal = re.compile(r"(?<![\w.])(448|240|57344)(\.0)?(?![\w.])")
    found = {
        path.relative_to(root).as_posix()
        for folder in folders
        for path in (root / folder).rglob("*.py")
        if any(literal.search(line) and "fp8" in line.lower() for line in path.read_text().splitlines())
    }
    assert found <= {"platforms/fp8.py"}


def test_fp8_dtype_of_a_kind():
    assert fp8_dtype(OCP) is torch.float8_e4m3fn
    assert fp8_dtype(FNUZ) is torch.float8_e4m3fnuz
    with pytest.raises(ConfigError, match="ocp or fnuz"):
        fp8_dtype(NONE)
    with pytest.raises(ConfigError, match="no 8-bit float"):
        fp8_max(torch.float16)
