"""The ahead-of-time check itself: it compiles for both vendors without a GPU, and it fails when it should."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest

pytest.importorskip("triton", reason="triton is not installed")

from twofold.kernels.triton import cases as case_list
from twofold.kernels.triton import check, check_isa, check_report
from twofold.kernels.triton.check import TARGETS
from twofold.kernels.triton.check_compile import Outcome
from twofold.kernels.triton.check_pool import run_forked

# Operations whose static cost the guide shows: all that have workloads.
COUNTED = {"paged_attention", "write_kv", "linear", "expert_linear", "moe_route", "rms_norm", "add_rms_norm", "rope"}
COUNTED |= {"silu_and_mul", "quantize_activation", "argmax", "draw_tokens", "lora_shrink", "lora_expand"}
ROOT = Path(check.__file__).parents[2]


def run_check(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "twofold.kernels.triton.check", *arguments]
    return subprocess.run(command, capture_output=True, text=True)


def test_compiles_for_both_vendors_and_finds_matrix_instructions() -> None:
    result = run_check("--targets", "sm_90,gfx942", "--match", "w3g128 sym 16 rows bf16", "--no-cost")
    assert result.returncode == 0, result.stdout + result.stderr
    assert "mma.sync" in result.stdout and "v_mfma_f32_16x16x16_bf16" in result.stdout
    assert "2 passed, 0 refused, 0 failed" in result.stdout


# Tiles far beyond the registers and the shared memory of the target.
WASTEFUL = """
import sys
from twofold.kernels.triton import check, launch_table
from twofold.kernels.triton.launch_table import DEFAULT, AttentionLaunch
launch_table.ATTENTION["prefill", 256, 2] = {DEFAULT: AttentionLaunch(128, 128, 4, 3)}
sys.exit(check.main(["--targets", "sm_89", "--match", "prefill D=256 bf16 window", "--no-cost"]))
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
        check_report.Line("sm_90", "rope", "a", Outcome(registers=20, shared=2048, matrix="mma.sync", seconds=1.5)),
        check_report.Line("sm_90", "rope", "b", Outcome(registers=30, problems=("spills",))),
        check_report.Line("gfx942", "rope", "a", Outcome(refused="no")),
    ]
    document = tmp_path / "kernels.md"
    start, end = check_report.markers(check_report.CHECK_TABLE)
    document.write_text(f"before\n{start}\nold\n{end}\nafter\n")
    check_report.write_markdown(document, check_report.CHECK_TABLE, check_report.markdown(lines))
    text = document.read_text()
    assert text.startswith("before\n") and text.endswith("after\n") and "old" not in text
    assert "| sm_90 | 2 | 0 | 1 | 30 | 2.0 KiB (227) | 2 (1.5) | mma.sync |" in text
    assert "| gfx942 | 0 | 1 | 0 | 0 | 0.0 KiB (64) | 0 (0.0) |  |" in text
    assert "| rope | 2: 30r 2.0K | - |" in text
    assert "| rope | gfx942 | a | no |" in text


def test_outcomes_of_other_targets_are_kept(tmp_path: Path) -> None:
    path = tmp_path / "results.json"
    old, other = (check_report.Line(arch, "rope", "a", Outcome(registers=20)) for arch in ("sm_90", "gfx942"))
    assert check_report.keep_lines(path, [old, other], ["sm_90", "gfx942"]) == [old, other]
    new = check_report.Line("sm_90", "rope", "b", Outcome(problems=("spills",)))
    assert check_report.keep_lines(path, [new], ["sm_90"]) == [other, new]
    assert check_report.keep_lines(path, [], []) == [other, new]


def test_unknown_targets_are_named() -> None:
    result = run_check("--targets", "sm_90,gfx9999")
    assert result.returncode == 2
    assert "'sm_90,gfx9999'" in result.stderr and "gfx942" in result.stderr


PTX = """
\tld.global.v4.b32 \t{ %r1, %r2, %r3, %r4 }, [ %rd1 + 0 ];
\t@%p1 ld.global.L1::evict_first.v2.b64 { %rd5, %rd6 }, [ %rd4 ];
\tld.global.u8 %r7, [ %rd1 ];
\tcp.async.cg.shared.global [ %r43 + 0 ], [ %rd7 + 0 ], 0x10, %r44;
\tcp.async.ca.shared.global [ %r43 + 0 ], [ %rd7 + 0 ], 0x4;
\tmma.sync.aligned.m16n8k32.row.col.f32.e4m3.e4m3.f32 { %r1 }, { %r2 }, { %r3 }, { %r4 };
"""
GCN = """
\tglobal_load_dwordx4 v[4:7], v[0:1], off
\tbuffer_load_dword v2, v3, s[4:7], 0 offen
\tglobal_load_d16_b16 v1, v[2:3], off
\tglobal_load_ubyte v1, v[2:3], off
\tv_mfma_f32_16x16x16_bf16 a[0:3], v[2:3], v[4:5], a[0:3]
"""
FP8_DOT = "%8 = tt.dot %1, %2, %3, inputPrecision = tf32 : tensor<64x128xf8E4M3FN> * tensor<128x64xf8E4M3FN> -> x"
INT8_DOT = "%8 = tt.dot %1, %2, %3 : tensor<16x32xi8> * tensor<32x16xi8> -> tensor<16x16xi32>"


def test_loads_are_counted_by_their_width() -> None:
    assert check_isa.global_loads(PTX) == "3x16 1x4 1x1"
    assert check_isa.global_loads(GCN) == "1x16 1x4 1x2 1x1"


def test_8_bit_products_need_8_bit_matrix_instructions() -> None:
    assert check_isa.matrix_instructions(PTX) == ["mma.sync"]
    assert check_isa.matrix_instructions(GCN) == ["v_mfma_f32_16x16x16_bf16"]
    assert check_isa.emulated_products(FP8_DOT, PTX) == []
    assert check_isa.emulated_products(FP8_DOT, GCN) == ["fp8"]
    assert check_isa.emulated_products(INT8_DOT, PTX) == ["int8"]
    assert check_isa.emulated_products(INT8_DOT, "v_mfma_i32_16x16x32_i8 a[0:3], v[2:3]") == []
    assert check_isa.emulated_products("", GCN) == []


def tables(name: str) -> list[list[list[str]]]:
    """The cells of each table between a name's markers in the guide, without their heads."""
    start, end = check_report.markers(name)
    text = (ROOT / "docs/kernels.md").read_text().split(start)[1].split(end)[0]
    return [
        [[cell.strip() for cell in line.strip("|").split("|")] for line in part.splitlines()[2:]]
        for part in text.strip().split("\n\n")
    ]


def test_the_guide_has_every_case_on_every_architecture() -> None:
    """A stale table: ``make kernel-tables``."""
    by_arch, by_operation, refusals = tables(check_report.CHECK_TABLE)
    archs = [row[0] for row in by_arch]
    assert archs == list(TARGETS)
    expected = {arch: list(case_list.cases(arch)) for arch in archs}
    counts = {row[0]: (int(row[1]), int(row[2])) for row in by_arch}
    refused = {arch: sum(case.refused is not None for case in cases) for arch, cases in expected.items()}
    assert counts == {arch: (len(cases) - refused[arch], refused[arch]) for arch, cases in expected.items()}
    assert {row[3] for row in by_arch} == {"0"}
    for index, arch in enumerate(archs, 1):
        compiled = Counter(case.op for case in expected[arch] if case.refused is None)
        assert {row[0]: int(row[index].split(":")[0]) for row in by_operation if row[index] != "-"} == compiled
    assert {row[0] for row in refusals} == {
        case.op for cases in expected.values() for case in cases if case.refused is not None
    }


def test_the_guide_has_the_static_cost_of_every_family() -> None:
    (rows,) = tables(check_report.COST_TABLE)
    assert {row[0] for row in rows} >= COUNTED
    assert "sm_90" in {arch for row in rows for arch in row[3].split(", ")}
    assert {row[-1] for row in rows} == {"ok"}
