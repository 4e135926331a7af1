"""bench kernels: figures follow from a clock's seconds and the workloads' own sizes; wrong use is named."""

import json
from pathlib import Path

import pytest
import torch
from twofold import cli
from twofold.kernels import benchmark
from twofold.kernels.benchmark import Bounds, inputs_of, markdown, measure
from twofold.kernels.cpu import linear_bf16
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kernel_set import default_registry
from twofold.kernels.timing import HostClock
from twofold.kernels.workloads import FAMILIES, MODELS, SMALL_STEPS, Step, workloads
from twofold.platforms import select_platform

CPU = select_platform("cpu")


class FixedClock:
    """Every call takes a millisecond; calls run once, so that a broken one is seen."""

    def seconds(self, call: object) -> float:
        call()  # type: ignore[operator]
        return 1e-3


@pytest.mark.parametrize("step", [*SMALL_STEPS, Step("decode 1", (1,), (20,))], ids=lambda step: step.name)
def test_every_candidate_runs_every_workload_or_says_why_not(step: Step) -> None:
    with torch.inference_mode():
        chosen = list(workloads(inputs_of(CPU), MODELS["tiny"], step))
        rows = list(measure(CPU, default_registry(CPU.spec), chosen, FixedClock(), Bounds(1e9, 1e9)))
    assert [row.note for row in rows if row.failed] == []
    timed = {(row.op, row.label) for row in rows if row.seconds}
    here = [workload for workload in chosen if default_registry(CPU.spec).candidates(workload.op)]
    assert timed == {(workload.op, workload.label) for workload in here}


def test_every_operation_of_the_registry_has_a_workload() -> None:
    found = {workload.op for workload in workloads(inputs_of(CPU), MODELS["tiny"], SMALL_STEPS[0])}
    assert {"linear", "paged_attention", "write_kv", "rms_norm", "add_rms_norm", "rope", "silu_and_mul"} <= found
    assert {"expert_linear", "moe_route", "argmax", "draw_tokens", "quantize_activation"} <= found
    assert len(FAMILIES) >= 3


def test_figures_by_hand() -> None:
    """4 tokens through dense float32 [1024,256]: 2 x 4 x 256 x 1024 operations on 4 (1024 x 256 + 4 x 1280) bytes."""
    workload = next(w for w in workloads(inputs_of(CPU), MODELS["tiny"], SMALL_STEPS[0]) if w.op == "linear")
    row = next(iter(measure(CPU, default_registry(CPU.spec), [workload], FixedClock(), Bounds(1e9, 8e9))))
    assert row.operations_per_second == 2 * 4 * 256 * 1024 / 1e-3
    assert row.bytes_per_second == 4 * (1024 * 256 + 4 * 1280) / 1e-3
    assert row.bound == pytest.approx(4 * (1024 * 256 + 4 * 1280) / 1e9 / 1e-3)
    assert row.peer == 1.0
    assert "| 2.10 |" not in markdown([row.cells()]) and "107 %" in markdown([row.cells()])


def test_attention_bounds_by_hand() -> None:
    """One request: 2 new of 5 tokens, 4 query and 2 KV heads of 64: the first sees 4 tokens, the second 5."""
    step = Step("", (2,), (5,))
    workload = next(w for w in workloads(inputs_of(CPU), MODELS["tiny"], step) if w.op == "paged_attention")
    assert workload.operations == 4 * (4 + 5) * 4 * 64
    assert workload.num_bytes == 5 * 2 * 2 * 64 * 4 + 2 * (2 * 4 * 64) * 4


def test_nothing_is_begun_after_the_deadline() -> None:
    made = []
    chosen = (
        made.append(workload) or workload for workload in workloads(inputs_of(CPU), MODELS["tiny"], SMALL_STEPS[0])
    )
    assert list(measure(CPU, default_registry(CPU.spec), chosen, FixedClock(), Bounds(1e9, 1e9), deadline=0.0)) == []
    assert len(made) == 1


def test_selected_kernels_are_the_engines() -> None:
    chosen = list(workloads(inputs_of(CPU), MODELS["tiny"], SMALL_STEPS[0]))
    registry = default_registry(CPU.spec)
    rows = list(measure(CPU, registry, chosen, FixedClock(), Bounds(1e9, 1e9), selected=True))
    here = [workload for workload in chosen if registry.candidates(workload.op)]
    expected = [registry.select(workload.op, CPU.spec, workload.problem).candidate.name for workload in here]
    assert [row.kernel for row in rows] == expected


def test_the_host_clock_measures() -> None:
    total = torch.zeros(())
    assert HostClock(CPU, 0.003).seconds(lambda: total.add_(1)) > 0
    assert total > 4


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(benchmark, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(benchmark, "PRODUCT_SIDE", {"cpu": 32})
    target = tmp_path / "figures.json"
    words = ["bench", "kernels", "--device", "cpu", "--models", "tiny", "--match", "silu", "--milliseconds", "1"]
    assert cli.main([*words, "--json", str(target)]) == 0
    figures = json.loads(target.read_text())
    assert figures["copy"] > 0 and {row["op"] for row in figures["rows"]} == {"silu_and_mul"}
    assert "| silu_and_mul | 4x512 |" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--models", "9b"], "--models is '9b'"),
        (["--targets", "sm_90"], "--targets goes with --compile-only"),
        (["--compile-only", "--json", "-"], "--json goes with measurements"),
    ],
)
def test_wrong_use_is_named(words: list[str], message: str, capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["bench", "kernels", "--device", "cpu", *words]) == 2
    assert message in capsys.readouterr().err


def test_a_missing_triton_is_named(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert cli.main(["bench", "kernels", "--compile-only"]) == 1
    assert "triton is not installed" in capsys.readouterr().err


@pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")
def test_kernels_of_rounded_inputs_have_workloads() -> None:
    chosen = list(workloads(inputs_of(CPU), MODELS["tiny"], SMALL_STEPS[0]))
    modes = {"int8": {"c_int8_activations", "c_int16_activations"}}
    if linear_bf16.missing() is None:
        modes["bf16"] = {"c_bf16"}
    for how, kernels in modes.items():
        registry = default_registry(CPU.spec, how)
        rows = list(measure(CPU, registry, chosen, FixedClock(), Bounds(1e9, 1e9), selected=True))
        assert kernels <= {row.kernel for row in rows if row.op == "linear" and row.seconds}
    caches = [workload.problem.kv_dtype for workload in chosen if workload.op == "paged_attention"]
    assert torch.bfloat16 in caches
