"""The tuner drives the real launchers: a clock that reads the launched settings decides which of them wins."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from twofold.kernels.triton import packed_linear, paged_attention
from twofold.kernels.triton.runtime import assume_device
from twofold.kernels.triton.tune import CROSSOVER_ROWS, Job, Tuner, jobs
from twofold.kernels.triton.tuned import TunedRow
from twofold.kernels.workloads import MODELS, Inputs
from twofold.platforms.arch_spec import spec_of_arch

SPEC = spec_of_arch("sm_90")


class LaunchClock:
    """Runs the call once and makes a time of the constants that its kernel was launched with."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, module: Any, kernel: str, time: Callable[..., float]) -> None:
        self.launched: list[dict[str, Any]] = []
        self.time = time
        original = getattr(module, kernel)

        class Spy:
            def __getitem__(spy, grid: Any) -> Callable[..., None]:
                def launch(*args: Any, **kwargs: Any) -> None:
                    self.launched.append(kwargs)
                    original[grid](*args, **kwargs)

                return launch

        monkeypatch.setattr(module, kernel, Spy())

    def seconds(self, call: Callable[[], Any]) -> float:
        call()
        return self.time(**self.launched[-1])


def job_with(name: str, *settings: dict[str, int]) -> Job:
    job = next(job for job in jobs(SPEC, name) if str(job) == name)
    from dataclasses import replace

    return replace(job, settings=tuple(replace(job.current, **values) for values in settings))


def run(clock: LaunchClock, job: Job, monkeypatch: pytest.MonkeyPatch) -> tuple[list[TunedRow], list[str]]:
    lines: list[str] = []
    inputs = Inputs(torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn)
    with assume_device("sm_90", 4):
        found = Tuner(SPEC, inputs, MODELS["tiny"], clock, lines.append).tune([job])
    return found, lines


def test_the_fastest_setting_of_the_packed_matmul_wins(monkeypatch: pytest.MonkeyPatch) -> None:
    def time(BLOCK_N: int, num_warps: int, **_: Any) -> float:
        return 1e-3 / BLOCK_N + 1e-6 * num_warps

    clock = LaunchClock(monkeypatch, packed_linear, "packed_linear_kernel", time)
    job = job_with("linear few 2", {"block_n": 128}, {"block_n": 64}, {"block_n": 128, "num_warps": 2})
    ((row,), lines) = run(clock, job, monkeypatch)
    assert (row.table, row.key) == ("linear", ("few", 2))
    assert row.row["block_n"] == 128 and row.row["num_warps"] == 2
    assert row.microseconds == pytest.approx(1e3 / 128 + 2) and row.before == pytest.approx(1e3 / 32 + 4)
    assert "3 of 3 tried" in lines[0]


@pytest.mark.parametrize(
    "name",
    ["linear some 2", "scaled few 1", "experts few 2", "scaled cache decode 64 2", "latent plain 2", "latent scaled 2"],
)
def test_workloads_read_the_rows_that_they_stand_for(name: str) -> None:
    class Once:
        def seconds(self, call: Callable[[], Any]) -> float:
            call()
            return 1.0

    lines: list[str] = []
    inputs = Inputs(torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn)
    with assume_device("sm_90", 4):
        assert Tuner(SPEC, inputs, MODELS["tiny"], Once(), lines.append).tune([job_with(name)]) == []
    assert lines == [f"{name}: 1000000.0 -> 1000000.0 us, 0 of 0 tried"]


def test_a_row_that_is_fastest_already_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = LaunchClock(monkeypatch, paged_attention, "paged_attention_kernel", lambda TILE, **_: TILE * 1e-6)
    found, _ = run(clock, job_with("attention decode 64 2", {"tile": 64}), monkeypatch)
    assert found == []


def test_settings_that_fail_are_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def time(TILE: int, **_: Any) -> float:
        if TILE == 16:
            raise RuntimeError("out of resource: shared memory")
        return 1e-6 / TILE

    clock = LaunchClock(monkeypatch, paged_attention, "paged_attention_kernel", time)
    ((row,), _) = run(clock, job_with("attention decode 64 2", {"tile": 16}, {"tile": 64}), monkeypatch)
    assert row.row["tile"] == 64


class CrossoverClock:
    """The other way costs as much as 600 rows of the fused kernel; measured from the most rows down until it loses."""

    def __init__(self) -> None:
        self.rows, self.calls = list(CROSSOVER_ROWS), 0

    def seconds(self, call: Callable[[], Any]) -> float:
        rows, other_way = self.rows[-1 - self.calls // 2], self.calls % 2 == 0
        # After the first loss the next crossover begins.
        self.calls = 0 if rows < 600 and not other_way else self.calls + 1
        return 600.0 if other_way else float(rows)


def test_crossovers_are_where_the_other_way_begins_to_win() -> None:
    inputs = Inputs(torch.device("cpu"), torch.bfloat16)
    tuner = Tuner(SPEC, inputs, MODELS["tiny"], CrossoverClock(), lambda line: None)
    assert tuner.tune_crossovers() == []  # 1024, which is what Hopper's table says
    inputs = Inputs(torch.device("cpu"), torch.bfloat16, torch.float8_e4m3fn)
    tuner = Tuner(SPEC, inputs, MODELS["tiny"], CrossoverClock(), lambda line: None)
    assert [(row.key, row.row) for row in tuner.tune_crossovers()] == [(("scaled",), {"rows": 1024})]
