"""Tuned launch rows: which file counts, what a look-up gives, and what would be measured."""

from __future__ import annotations

import logging
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
from twofold import cli
from twofold.kernels.triton import launch_attention, launch_table, tune, tuned
from twofold.kernels.triton.launch_scaled import vendor_rows
from twofold.kernels.triton.launch_table import AttentionLaunch, attention_row, crossover_rows, linear_row
from twofold.kernels.triton.tuned import TunedRow, overriding, user_file, write_rows
from twofold.platforms.arch_spec import spec_of_arch

FAST = AttentionLaunch(16, 64, 2, 4)
KEY = ("decode", 128, 2)


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path))
    tuned.forget()
    yield tmp_path
    tuned.forget()


def fields(launch: AttentionLaunch) -> dict[str, object]:
    return {name: getattr(launch, name) for name in launch.__dataclass_fields__}


def write(arch: str, *rows: TunedRow) -> None:
    write_rows(user_file(arch), "a GPU", {"torch": "2"}, list(rows))


def test_the_users_row_comes_first_for_its_own_architecture() -> None:
    before = attention_row("sm_90", *KEY)
    assert before != FAST
    write("sm_90", TunedRow("attention", KEY, fields(FAST), 1.0, 2.0))
    assert attention_row("sm_90", *KEY) == FAST
    assert attention_row("sm_90", "prefill", 128, 2) == launch_table.ATTENTION["prefill", 128, 2]["hopper"]
    assert attention_row("sm_100", *KEY) == attention_row("", *KEY) == before


def test_the_crossover_can_be_tuned() -> None:
    write("gfx942", TunedRow("crossover", ("linear",), {"rows": 77}, 0.0, 0.0))
    assert (crossover_rows("gfx942"), crossover_rows("gfx950")) == (77, 1024)
    write("sm_90", TunedRow("crossover", ("scaled",), {"rows": 55}, 0.0, 0.0))
    assert (vendor_rows("sm_90"), vendor_rows("sm_100"), vendor_rows("sm_80")) == (55, 256, None)


def test_rows_of_scaled_caches_and_of_latent_attention_can_be_tuned() -> None:
    wide = replace(FAST, block_m=64)
    write("sm_90", TunedRow("scaled cache", KEY, fields(FAST), 1.0, 2.0))
    write("sm_90", TunedRow("latent", ("scaled", 2), fields(wide), 1.0, 2.0))
    assert launch_attention.attention_row("sm_90", *KEY, scaled=True) == FAST != attention_row("sm_90", *KEY)
    assert launch_attention.attention_row("sm_90", "decode", 576, 2, scaled=True) == wide
    assert launch_attention.attention_row("sm_90", "decode", 576, 2) == launch_attention.LATENT["plain", 2]["default"]


def test_rows_of_an_older_file_are_kept_until_measured_again() -> None:
    linear = launch_table.LinearLaunch(16, 64, 64, 2, 2)
    write("sm_90", TunedRow("attention", KEY, fields(FAST), 1.0, 2.0))
    write("sm_90", TunedRow("linear", ("few", 2), {name: getattr(linear, name) for name in linear.__slots__}, 1.0, 2.0))
    assert attention_row("sm_90", *KEY) == FAST and linear_row("sm_90", 1, 2) == linear
    write("sm_90", TunedRow("attention", KEY, fields(replace(FAST, tile=16)), 1.0, 2.0))
    assert attention_row("sm_90", *KEY) == replace(FAST, tile=16) and linear_row("sm_90", 1, 2) == linear


def test_a_refusal_is_not_overruled() -> None:
    write("gfx1100", TunedRow("attention", ("decode", 256, 2), fields(FAST), 1.0, 2.0))
    assert isinstance(attention_row("gfx1100", "decode", 256, 2), launch_table.Refused)


@pytest.mark.parametrize("text", ["", "{", "[]", '{"rows": [{"table": "attention"}]}', '{"rows": [{"key": 3}]}'])
def test_a_broken_file_is_named_and_left_aside(text: str, caplog: pytest.LogCaptureFixture) -> None:
    expected = attention_row("sm_90", *KEY)
    path = user_file("sm_90")
    path.parent.mkdir(parents=True)
    path.write_text(text)
    tuned.forget()
    logging.getLogger("twofold").propagate = True
    with caplog.at_level(logging.WARNING):
        assert attention_row("sm_90", *KEY) == expected
    assert str(path) in caplog.text and "twofold tune" in caplog.text


def test_a_row_of_other_fields_is_left_aside() -> None:
    expected = attention_row("sm_90", *KEY)
    write("sm_90", TunedRow("attention", KEY, {"blocks": 3}, 1.0, 2.0))
    assert attention_row("sm_90", *KEY) == expected


def test_an_override_holds_only_inside_and_counts_its_uses() -> None:
    before = attention_row("sm_90", *KEY)
    with overriding("attention", KEY, FAST) as override:
        assert attention_row("sm_90", *KEY) == FAST
        assert attention_row("sm_90", "prefill", 128, 2) != FAST
    assert override.uses == 1 and attention_row("sm_90", *KEY) == before


def test_a_look_up_reads_no_file_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    write("sm_90", TunedRow("attention", KEY, fields(FAST), 1.0, 2.0))
    attention_row("sm_90", *KEY)
    monkeypatch.setattr(Path, "read_text", lambda *_: pytest.fail("read again"))
    monkeypatch.setattr(Path, "is_file", lambda *_: pytest.fail("looked again"))
    assert attention_row("sm_90", *KEY) == FAST


@pytest.mark.parametrize("arch", ["sm_80", "sm_89", "gfx942", "gfx1100"])
def test_every_row_has_settings_and_all_fit(arch: str) -> None:
    spec = spec_of_arch(arch)
    jobs = list(tune.jobs(spec))
    assert len({str(job) for job in jobs}) == len(jobs)
    assert {job.table.name for job in jobs} >= {"attention", "scaled cache", "linear", "scaled", "experts"}
    for job in jobs:
        assert job.current not in job.settings
        assert len(job.settings) > 20 or job.key[-1] == 4 or job.table.name in ("attention", "scaled cache", "latent")
        assert job.settings or job.key[-1] == 4
        for row in job.settings:
            assert row.num_warps * spec.wave_size <= 1024
            if job.table.name == "linear":
                step = row.num_stages * (row.block_m + row.block_n) * row.block_k * job.key[-1]
                assert step <= spec.shared_memory_per_block
    decode = next(job for job in jobs if str(job) == "attention decode 128 2")
    assert {row.block_m for row in decode.settings} == {16} and len(decode.settings) > 10


def test_dry_run_lists_the_rows(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["tune", "--dry-run", "--arch", "gfx942", "--match", "linear few 2"]) == 0
    first, last = capsys.readouterr().out.splitlines()
    assert first.startswith("linear few 2:") and "block_n=32" in first
    assert "for gfx942" in last


@pytest.mark.parametrize(
    ("words", "code", "message"),
    [([], 1, "no GPU here"), (["--arch", "sm_90"], 2, "only --dry-run"), (["--dry-run"], 2, "name an architecture")],
)
def test_without_a_gpu(words: list[str], code: int, message: str, capsys: pytest.CaptureFixture) -> None:
    import torch

    if torch.cuda.is_available():
        pytest.skip("there is a GPU")
    assert cli.main(["tune", *words]) == code
    assert message in capsys.readouterr().err


def test_listing_imports_no_triton() -> None:
    code = "import sys; from twofold import cli; cli.main(['tune', '--dry-run', '--arch', 'sm_90']); "
    code += "sys.exit('triton' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True).returncode == 0
