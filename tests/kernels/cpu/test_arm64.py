"""The C kernels for 64-bit ARM, compiled by a cross compiler and run under qemu: `make arm64`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from emulated_library import COMPILER, compile_driver, emulator, open_emulated, unavailable
from int8_cases import eight_bit_weight, integer_weight
from twofold.kernels.cpu import build, library, linear_int8
from twofold.platforms import cpu_threads
from twofold.quant.canonical import CanonicalWeight
from twofold.quant.scheme import Activation, Element, Int8, Offset, WeightOnly

pytestmark = [
    pytest.mark.arm64,
    pytest.mark.timeout(1800),
    pytest.mark.skipif(unavailable() is not None, reason=str(unavailable())),
]
SUPPORT = Path(__file__).parents[2] / "support"
# Without products of four bytes; with them; and with bfloat16, matrix products and scalable vectors.
TARGETS = ("cortex-a72", "neoverse-n1", "neoverse-v1")


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("arm64") / "driver"
    compile_driver(path)
    return path


def build_for(target: str, driver: Path) -> Path:
    """The library as a processor of that name would compile it, once; any warning is an error."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CC", COMPILER)
        patch.setenv("TWOFOLD_CACHE", str(driver.parent))
        return build.library_path(native=False, extra_flags=(f"-mcpu={target}", "-Wall", "-Wextra", "-Werror"))


@pytest.mark.parametrize("target", TARGETS)
def test_every_kernel_against_its_definition(target: str, driver: Path) -> None:
    script, path = SUPPORT / "check_cpu_library.py", build_for(target, driver)
    command = [sys.executable, str(script), str(path), str(driver)]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stdout + result.stderr


@pytest.mark.skipif(library.unavailable() is not None, reason=f"no kernels to compare with: {library.unavailable()}")
@pytest.mark.parametrize("target", TARGETS[:2])
def test_products_of_integers_are_this_machines_to_the_bit(
    target: str, driver: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    schemes = [
        scheme
        for bits in (2, 3, 4, 8)
        for scheme in (WeightOnly(bits, 32), WeightOnly(bits, 16, False), Offset(bits, -1))
    ]
    rounded = [Int8((1, -1), Activation(Element.INT8)), Int8((1, 128), Activation(Element.INT8), False)]
    weights: list[CanonicalWeight] = [eight_bit_weight(scheme, (45, 700)) for scheme in rounded]
    finer: list[CanonicalWeight] = [integer_weight(scheme, (70, 700)) for scheme in schemes]
    x = torch.randn(21, 700, generator=torch.Generator().manual_seed(3)) * torch.logspace(-3, 3, 21)[:, None]

    def products() -> list[torch.Tensor]:
        vars(library.functions).clear()  # else it keeps calling the library that it knows
        prepared = [linear_int8.prepare(weight, torch.float32) for weight in weights + finer]
        prepared += [linear_int8.prepare_two_planes(weight, torch.float32) for weight in finer]
        return [linear_int8.run(x, weight) for weight in prepared]

    expected = products()
    emulated = open_emulated(driver, build_for(target, driver))
    monkeypatch.setattr(library, "load", lambda: emulated)
    try:
        results = products()
    finally:
        vars(library.functions).clear()
        emulated.close()
    assert len(results) == len(expected) == 26
    assert all(map(torch.equal, results, expected))


def test_workers_are_tied_to_their_cpus(driver: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    allowed = sorted(os.sched_getaffinity(0))
    cpus = (allowed[0], allowed[-1], allowed[0])
    emulated = open_emulated(driver, build_for(TARGETS[1], driver))
    x = torch.ones(1 << 18)
    monkeypatch.setattr(cpu_threads, "_team", type(cpu_threads._team)(1, len(cpus), *cpus))
    emulated.twofold_set_team_cpus(cpu_threads.team_address())
    emulated.twofold_scale(x.data_ptr(), x.numel(), 2.0, x.data_ptr())
    tasks = [task for task in Path(f"/proc/{emulated.pid}/task").iterdir() if int(task.name) != emulated.pid]
    lists = [re.search(r"Cpus_allowed_list:\s+(\S+)", (task / "status").read_text()) for task in tasks]
    emulated.close()
    assert (x == 2).all()
    assert {str(cpus[1]), str(cpus[2])} <= {found[1] for found in lists if found}


@pytest.mark.parametrize("flags", [(), ("-DTWOFOLD_NO_FUTEX",)], ids=["futex", "condition"])
def test_the_team_of_threads(flags: tuple[str, ...], tmp_path: Path) -> None:
    program, source = tmp_path / "team", Path(__file__).with_name("team_check.c")
    # The emulator itself fails where a forked child starts threads.
    options = ("-std=gnu11", "-O2", "-pthread", "-DNO_FORK", f"-I{Path(build.__file__).parent}")
    subprocess.run([COMPILER, *options, *flags, str(source), "-o", str(program)], check=True, timeout=60)
    result = subprocess.run([*emulator(), str(program)], capture_output=True, text=True, timeout=600)
    assert (result.returncode, result.stdout) == (0, "ok\n"), result.stderr
