"""On a machine with a GPU: clocks, workloads and the tuner do what they do elsewhere by injected clocks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch finds no GPU"),
]


class Once:
    """Runs a call and waits for it."""

    def seconds(self, call: Callable[[], Any]) -> float:
        call()
        torch.cuda.synchronize()
        return 1.0


def test_the_graph_clock_is_plausible_and_takes_what_cannot_be_captured() -> None:
    from twofold.kernels.timing import GraphClock, make_clock
    from twofold.platforms import select_platform

    clock = make_clock(select_platform("auto"), 0.05)
    assert isinstance(clock, GraphClock)
    source = torch.ones(1 << 28, dtype=torch.uint8, device="cuda")
    target = torch.empty_like(source)
    assert 1e10 < 2 * source.numel() / clock.seconds(lambda: target.copy_(source)) < 2e13
    assert clock.seconds(lambda: source[0].item()) > 0


def test_every_kernel_runs_every_small_workload() -> None:
    from twofold.kernels.benchmark import Bounds, all_workloads, inputs_of, measure
    from twofold.kernels.kernel_set import default_registry
    from twofold.platforms import select_platform

    platform = select_platform("auto")
    chosen = all_workloads(inputs_of(platform), ["tiny"])
    with torch.inference_mode():
        rows = list(measure(platform, default_registry(platform.spec), chosen, Once(), Bounds(1.0, 1.0)))
    assert rows and [row for row in rows if row.failed] == []


@pytest.mark.parametrize("name", ["attention decode 128 2", "linear few 2", "scaled few 1", "experts few 2"])
def test_rows_can_be_tuned(name: str) -> None:
    from twofold.kernels.benchmark import inputs_of
    from twofold.kernels.timing import make_clock
    from twofold.kernels.triton.tune import Tuner, jobs
    from twofold.kernels.workloads import MODELS
    from twofold.platforms import select_platform

    platform = select_platform("auto")
    lines: list[str] = []
    (job,) = [job for job in jobs(platform.spec, name) if str(job) == name]
    tuner = Tuner(platform.spec, inputs_of(platform), MODELS["tiny"], make_clock(platform, 0.01), lines.append)
    with torch.inference_mode():
        tuner.tune([replace(job, settings=job.settings[:2])])
    assert "2 of 2 tried" in lines[0]
