"""The ahead-of-time check itself: it compiles for both vendors without a GPU, and it fails when it should."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from twofold.kernels.triton import cases as case_list
from twofold.kernels.triton import check_report
from twofold.kernels.triton.check import TARGETS
from twofold.kernels.triton.check_compile import Outcome
from twofold.kernels.triton.check_pool import run_forked


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "twofold.kernels.triton.check", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_compiles_for_both_vendors_and_finds_matrix_instructions() -> None:
    result = run_check("--targets", "sm_90,gfx942", "--match", "w3g128 sym 16 rows bf16")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "mma.sync" in result.stdout and "v_mfma_f32_16x16x16_bf16" in result.stdout
    assert "2 passed, 0 refused, 0 failed" in result.stdout


# Tiles far beyond the registers and the shared memory of the target.
WASTEFUL = """
import sys
from twofold.kernels.triton import check, launch_table
from twofold.kernels.triton.launch_table import DEFAULT, AttentionLaunch
launch_table.ATTENTION["prefill", 256, 2] = {DEFAULT: AttentionLaunch(128, 128, 4, 3)}
sys.exit(check.main(["--targets", "sm_89", "--match", "prefill D=256 bf16 window"]))
"""


def test_fails_on_spills_and_on_too_much_shared_memory() -> None:
    result = subprocess.run([sys.executable, "-c", WASTEFUL], capture_output=True, text=True)
    assert result.returncode == 1, result.stdout + result.stderr
    assert "bytes of shared memory, sm_89 has 101376" in result.stdout
    assert "spills" in result.stdout


@pytest.mark.parametrize("arch", TARGETS)
def test_every_kernel_dtype_and_row_has_a_case(arch: str) -> None:
    cases = list(case_list.cases(arch))
    assert len({case.name for case in cases}) == len(cases)
    for dtype in ("bf16", "fp16", "fp32"):
        names = {case.name for case in cases if dtype in case.name}
        for phase in ("decode", "prefill"):
            assert {f"paged_attention {phase} D={size} {dtype}" for size in (64, 128, 256)} <= names
        for rows in (16, 64, 256):
            widths = (2, 3, 4, 8) if dtype == "bf16" else (4,)
            assert {f"packed_linear w{bits}g128 sym {rows} rows {dtype}" for bits in widths} <= names
    ops = {"rms_norm", "add_rms_norm", "rope", "act_and_mul", "write_kv", "reduce_splits", "add_splits", "dequantize"}
    assert ops <= {case.op for case in cases}
    assert {case.op for case in cases if case.in_subset} == {case.op for case in cases}


def _double_or_worse(number: int) -> int:
    if number == 1:
        raise ValueError("one is wrong")
    if number == 2:
        import os

        os._exit(7)
    if number == 3:
        import time

        time.sleep(60)
    return 2 * number


def test_a_crash_or_a_hang_costs_only_its_own_case() -> None:
    results = {
        index: (result, error) for index, result, error in run_forked(_double_or_worse, range(6), 3, timeout=3.0)
    }
    assert results[1] == (None, "ValueError: one is wrong")
    assert results[2] == (None, "the compiler ended with exit code 7")
    assert results[3] == (None, "timed out")
    assert [results[index][0] for index in (0, 4, 5)] == [0, 8, 10]


def test_the_table_goes_between_the_markers(tmp_path: Path) -> None:
    lines = [
        check_report.Line("sm_90", "rope", "a", Outcome(registers=20, shared=2048, matrix="mma.sync")),
        check_report.Line("sm_90", "rope", "b", Outcome(registers=30, problems=("spills",))),
        check_report.Line("gfx942", "rope", "a", Outcome(refused="no")),
    ]
    document = tmp_path / "kernels.md"
    document.write_text(f"before\n{check_report.START}\nold\n{check_report.END}\nafter\n")
    check_report.write_markdown(document, check_report.markdown(lines))
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| rope | sm_90 | 2 | 30 | 2.0 KiB (227) | mma.sync | 0 | 1 |" in text
    assert "| rope | gfx942 | 0 | 0 | 0.0 KiB (64) |  | 1 | 0 |" in text
