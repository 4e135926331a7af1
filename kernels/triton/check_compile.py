"""Compile one case for one architecture, without a GPU or a driver, and read what the machine code needs."""

from __future__ import annotations

import re
import subprocess
import tempfile
import time
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import triton
import triton.compiler.code_generator  # imported now, so that each forked compilation need not
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from triton.runtime.cache import get_cache_manager

from ...platforms.arch_table import ArchFacts, amd_facts, nvidia_facts
from .cases import Case
from .check_isa import emulated_products, global_loads, matrix_instructions

# Run-time integers that the launchers' callers make multiples of 16, so that the JIT would specialize them.
_DIVISIBLE = re.compile(r"(_ptr|_stride|^N|^K|^size|^columns)$")


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """What one compilation needs: ``spill_bytes`` per lane, ``matrix`` instructions, ``loads`` from global memory as
    "count x bytes per lane"; ``problems`` fail the check."""

    registers: int = 0
    spill_bytes: int = 0
    shared: int = 0
    matrix: str = ""
    loads: str = ""
    seconds: float = 0.0
    problems: tuple[str, ...] = ()
    refused: str = ""


def arch_facts(arch: str) -> ArchFacts:
    """Facts of ``sm_90`` or ``gfx942``."""
    if arch.startswith("sm_"):
        return nvidia_facts(int(arch[3:]) // 10, int(arch[3:]) % 10)
    return amd_facts(arch)


def warm_up(cases: Iterable[Case]) -> None:
    """Compute what every compilation needs and a process keeps: hashes of triton itself and of the kernels.

    Forked processes inherit it; without it each would spend about two seconds on it.
    """
    compiler: Any = triton.compiler.compiler
    key = getattr(triton.runtime.cache, "triton_key", None) or compiler.triton_key
    key()
    for kernel in {id(case.kernel): case.kernel for case in cases if case.kernel is not None}.values():
        assert kernel.cache_key


def check_case(case: Case, arch: str) -> Outcome:
    """Compile a case and judge it; ``seconds`` are those of the compilation, also where triton's cache had it."""
    if case.refused is not None:
        return Outcome(refused=case.refused)
    facts = arch_facts(arch)
    started = time.perf_counter()
    compiled = _compile(case, facts)
    seconds = _first_seconds(compiled, time.perf_counter() - started)
    nvidia = arch.startswith("sm_")
    registers, spilled = _nvidia_resources(compiled.asm["cubin"]) if nvidia else _amd_resources(compiled.asm["amdgcn"])
    text = compiled.asm["ptx" if nvidia else "amdgcn"]
    matrix = matrix_instructions(text)
    problems = [f"{kind} product is emulated" for kind in emulated_products(compiled.asm["ttir"], text)]
    if spilled:
        problems.append(f"spills {spilled} bytes per lane")
    if compiled.metadata.shared > facts.shared_memory:
        problems.append(f"needs {compiled.metadata.shared} bytes of shared memory, {arch} has {facts.shared_memory}")
    if case.needs_matrix and not matrix:
        problems.append("uses no matrix instruction")
    return Outcome(
        registers=registers,
        spill_bytes=spilled,
        shared=compiled.metadata.shared,
        matrix=", ".join(matrix),
        loads=global_loads(text),
        seconds=seconds,
        problems=tuple(problems),
    )


def _compile(case: Case, facts: ArchFacts) -> Any:
    kernel = case.kernel
    constexprs = {kernel.arg_names[index] for index in kernel.constexprs}
    pointers = {name for name in kernel.arg_names if name.endswith("_ptr")}
    missing = (constexprs - set(case.constants)) | (pointers - set(case.types))
    assert not missing, f"{case.name} leaves {sorted(missing)} open"
    signature = {}
    for name in kernel.arg_names:
        signature[name] = "constexpr" if name in case.constants else case.types.get(name, "i32")
    attributes = {
        (index,): [["tt.divisibility", 16]]
        for index, name in enumerate(kernel.arg_names)
        if signature[name] != "constexpr" and _DIVISIBLE.search(name)
    }
    nvidia = facts.arch.startswith("sm_")
    target = GPUTarget("cuda", int(facts.arch[3:]), 32) if nvidia else GPUTarget("hip", facts.arch, facts.wave_size)
    source = ASTSource(kernel, signature=signature, constexprs=case.constants, attrs=attributes)
    return triton.compile(source, target=target, options=dict(case.options))


def _first_seconds(compiled: Any, seconds: float) -> float:
    """What the compilation took when it was done: kept in triton's cache beside its result."""
    manager = get_cache_manager(compiled.metadata.hash)
    if (path := manager.get_file("twofold-seconds.txt")) is not None:
        return float(Path(path).read_text())
    manager.put(f"{seconds:.3f}", "twofold-seconds.txt", binary=False)
    return seconds


def _nvidia_resources(cubin: bytes) -> tuple[int, int]:
    """(registers, stack bytes) of a cubin: these kernels have no local arrays, so a stack means spilled registers."""
    tool = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        text = subprocess.run(
            [tool, "--dump-resource-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
    return _number(r"REG:(\d+)", text), _number(r"STACK:(\d+)", text)


def _amd_resources(assembly: str) -> tuple[int, int]:
    """(vector registers including accumulators, scratch bytes) from the kernel's metadata."""
    scratch = _number(r"\.private_segment_fixed_size: (\d+)", assembly)
    spilled = 4 * _number(r"\.vgpr_spill_count: (\d+)", assembly)
    return _number(r"\.vgpr_count:\s+(\d+)", assembly), max(scratch, spilled)


def _number(pattern: str, text: str) -> int:
    match = re.search(pattern, text)
    assert match is not None, f"no {pattern} in the compiler's output"
    return int(match[1])
