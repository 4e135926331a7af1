"""Which platform is chosen, with torch's build, its devices and the device files faked (B104)."""

from __future__ import annotations

import logging
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch
from twofold.errors import ConfigError, UnsupportedError
from twofold.platforms import select
from twofold.platforms.spec import Fp8Kind

GIB = 1 << 30


@pytest.fixture
def machine(monkeypatch, caplog):
    """A function that fakes torch's build and this machine's devices."""
    logging.getLogger("twofold").propagate = True

    def fake(build: str, available: bool | Exception, present: tuple[str, ...] = (), **properties: object) -> None:
        monkeypatch.setattr(torch.version, "hip", "6.4" if build == "rocm" else None)
        monkeypatch.setattr(torch.version, "cuda", "12.6" if build == "cuda" else None)

        def is_available() -> bool:
            if isinstance(available, Exception):
                raise available
            return available

        monkeypatch.setattr(torch.cuda, "is_available", is_available)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: SimpleNamespace(**properties))
        monkeypatch.setattr(torch.cuda, "mem_get_info", lambda device: (3 * GIB, 16 * GIB))
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: GIB)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: GIB // 2)
        monkeypatch.setattr(select, "_device_present", lambda kind: kind in present)

    yield fake
    logging.getLogger("twofold").propagate = False


AMD = {
    "name": "MI300X",
    "gcnArchName": "gfx942:sramecc+:xnack-",
    "multi_processor_count": 304,
    "total_memory": 192 * GIB,
}
NVIDIA = {
    "name": "H100",
    "major": 9,
    "minor": 0,
    "multi_processor_count": 132,
    "total_memory": 80 * GIB,
    "memory_clock_rate": 2_619_000,
    "memory_bus_width": 5120,
}


@pytest.mark.parametrize("library", ["absent", "raising", "no devices"])
def test_b104_rocm_needs_no_monitoring_library(machine, monkeypatch, library):
    modules = {
        "absent": None,
        "raising": SimpleNamespace(amdsmi_init=lambda: 1 / 0),
        "no devices": SimpleNamespace(amdsmi_get_processor_handles=lambda: []),
    }
    monkeypatch.setitem(sys.modules, "amdsmi", modules[library])
    machine("rocm", True, ("rocm",), **AMD)
    for name in ("auto", "rocm"):
        spec = select.select_platform(name).spec
        assert (spec.vendor, spec.arch, spec.wave_size, spec.fp8) == ("amd", "gfx942", 64, Fp8Kind.FNUZ)
    with pytest.raises(UnsupportedError, match="is a ROCm build; install torch's CUDA build"):
        select.select_platform("cuda")


def test_nvidia(machine):
    machine("cuda", True, ("cuda",), **NVIDIA)
    platform = select.select_platform("auto")
    assert (platform.spec.vendor, platform.spec.arch, platform.spec.device_type) == ("nvidia", "sm_90", "cuda")
    assert platform.spec.bandwidth == pytest.approx(3.352e12, rel=1e-3)
    assert platform.memory().free == 3 * GIB + GIB // 2
    assert platform.preferred_dtype(torch.float16) is torch.float16
    assert platform.preferred_dtype(torch.float32) is torch.bfloat16
    machine("cuda", True, ("cuda",), **(NVIDIA | {"major": 7, "minor": 5}))
    assert select.select_platform("auto").preferred_dtype(torch.bfloat16) is torch.float16


@pytest.mark.parametrize("build", ["cuda", "cpu"])
def test_b104_the_wrong_torch_beside_an_amd_device(machine, caplog, build):
    machine(build, False, ("rocm",))
    with caplog.at_level(logging.WARNING, "twofold"):
        assert select.select_platform("auto").spec.vendor == "cpu"
    [warning] = [record.getMessage() for record in caplog.records]
    assert "AMD" in warning and "ROCm build" in warning and "install" in warning
    with pytest.raises(UnsupportedError) as error:
        select.select_platform("rocm")
    assert warning.split(": ", 1)[1] in str(error.value)


@pytest.mark.parametrize("available", [False, RuntimeError("driver says no")])
def test_a_build_without_a_working_device_falls_to_the_cpu(machine, caplog, available):
    machine("rocm", available, ())
    with caplog.at_level(logging.WARNING, "twofold"):
        assert select.select_platform("auto").spec.vendor == "cpu"
    assert not caplog.records
    with pytest.raises(UnsupportedError, match=r"--device rocm: torch (finds no usable|cannot start)"):
        select.select_platform("rocm")


def test_a_cpu_machine_is_silent_and_a_wrong_name_is_answered(machine, caplog):
    machine("cpu", False)
    assert select.select_platform("auto").spec.device_type == "cpu"
    assert select.select_platform("cpu").spec.device_type == "cpu"
    assert not caplog.records
    with pytest.raises(ConfigError, match="'tpu'; it must be one of auto, cpu, cuda, rocm"):
        select.select_platform("tpu")


def test_importing_initializes_no_gpu_and_a_spec_needs_no_torch():
    code = (
        "import sys, twofold.platforms.spec; assert 'torch' not in sys.modules;"
        "import twofold.platforms.select, torch; assert not torch.cuda.is_initialized()"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=120)
