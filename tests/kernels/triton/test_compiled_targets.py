"""What the dispatcher chooses compiles, for chips that are not here: fp8, shared memory, wave sizes (B099 to B103).

That the check finds tiles which overflow shared memory is shown in test_check.py.
"""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator, Sequence

import pytest

pytest.importorskip("triton", reason="triton is not installed")

import torch
from eight_bit_cases import EIGHT_BIT_SCHEMES
from gpu_specs import gpu_spec
from twofold.errors import UnsupportedError
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.problems import AttentionProblem, LinearProblem
from twofold.kernels.triton import check_compile
from twofold.kernels.triton.cases import attention, cases
from twofold.kernels.triton.cases.case import Case
from twofold.kernels.triton.check_compile import Outcome, check_case
from twofold.kernels.triton.check_pool import run_forked
from twofold.kernels.triton.launch_table import has_wide_waves
from twofold.platforms.arch_table import amd_facts, amd_wave_size
from twofold.platforms.fp8 import fp8_dtype
from twofold.platforms.spec import Fp8Kind
from twofold.quant.scheme import Activation, Element, Fp8, Int8

# Those of the reports, with the limit of shared memory per work-group that the vendors document.
TARGETS = ("gfx90a", "gfx942", "gfx950", "gfx1100", "gfx1201", "sm_80", "sm_90")
LDS_TARGETS = {"gfx942": 65536, "gfx1100": 65536, "gfx1201": 65536, "gfx950": 163840}
TYPE_OF_KIND = {Fp8Kind.NONE: None, Fp8Kind.FNUZ: "fp8e4b8", Fp8Kind.OCP: "fp8e4nv"}
PRODUCTS = ("packed_linear", "scaled_linear", "packed_experts", "dense_experts", "scaled_experts")
# Every gfx target of B103, and whether it belongs to the family with 64 lanes.
WAVES = {
    **dict.fromkeys(("gfx900", "gfx906", "gfx908", "gfx90a", "gfx942", "gfx950"), 64),
    **dict.fromkeys(("gfx1030", "gfx1100", "gfx1200", "gfx1201"), 32),
}
# Triton does not compile for these; the registry refuses them.
NOT_COMPILED = ("gfx900", "gfx906", "gfx1030")


def compile_all(work: list[tuple[str, Case]]) -> dict[tuple[str, str], Outcome]:
    """The outcome of each (architecture, case), in processes of their own; a compiler's error fails the test."""
    outcomes = {}
    for index, outcome, error in run_forked(_compile_one, work, 2, timeout=600.0):
        arch, case = work[index]
        assert error is None, f"{case.name} for {arch}: {error}"
        outcomes[arch, case.name] = outcome
    return outcomes


def _compile_one(item: tuple[str, Case]) -> Outcome:
    return check_case(item[1], item[0])


def fp8_types(case: Case) -> set[str]:
    return {kind.lstrip("*") for kind in case.types.values() if "fp8" in kind}


def fp8_product(arch: str, x: str, weight: str) -> Case:
    """The smallest product of fp8 weights with one scale per channel."""
    return next(c for c in cases(arch) if c.name == f"scaled_linear {x} x {weight} whole 16 rows")


@pytest.mark.parametrize("arch", TARGETS)
def test_b099_no_kernel_is_compiled_for_an_8_bit_float_that_the_chip_lacks(arch: str) -> None:
    own = TYPE_OF_KIND[gpu_spec(arch).fp8]
    for case in cases(arch):
        assert fp8_types(case) <= {own}, case.name


@pytest.mark.parametrize("arch", TARGETS)
def test_b099_the_dispatcher_chooses_what_is_compiled(arch: str) -> None:
    """Codes are multiplied where the chip has their type; elsewhere they are decoded to 16 bits: another case."""
    names, kernels = {case.name for case in cases(arch)}, KernelSet(gpu_spec(arch))
    for scheme in EIGHT_BIT_SCHEMES:
        chosen = kernels.select_candidate("linear", linear_problem(scheme)).name
        own = "i8" if isinstance(scheme, Int8) else TYPE_OF_KIND[gpu_spec(arch).fp8]
        operands = f"{own} x {own}" if chosen == "triton_8bit" else "bf16 x u8"
        assert f"scaled_linear {operands} whole 16 rows" in names, (str(scheme), chosen)
        assert own is not None or chosen in ("triton_fp8_emulated", "triton_fp8_weights")


def compile_chosen_fp8(archs: Sequence[str]) -> None:
    work = []
    for arch in archs:
        own = TYPE_OF_KIND[gpu_spec(arch).fp8]
        work.append((arch, fp8_product(arch, own or "bf16", own or "u8")))
    for (arch, name), outcome in compile_all(work).items():
        assert outcome.problems == () and outcome.matrix, (arch, name, outcome)


def test_b099_the_chosen_fp8_product_compiles() -> None:
    """One chip of each kind; ``make check-kernels`` compiles everything for all of them."""
    compile_chosen_fp8(["gfx90a", "gfx942", "gfx1201"])


@pytest.mark.slow
def test_b099_the_chosen_fp8_product_compiles_everywhere() -> None:
    compile_chosen_fp8(TARGETS)


def test_b099_a_type_that_the_chip_lacks_would_be_found() -> None:
    """The control: codes of another chip's type either do not compile here or are multiplied by software."""
    foreign = fp8_product("gfx950", "fp8e4nv", "fp8e4nv")
    [(_, outcome, error)] = run_forked(_compile_one, [("gfx90a", foreign)], 1, timeout=180.0)
    assert error is not None or any("emulated" in problem for problem in outcome.problems)


@pytest.mark.parametrize("arch", ["gfx90a", "gfx1030", "gfx1100", "sm_80"])
def test_b099_the_refusal_names_the_chip_before_anything_runs(arch: str) -> None:
    scheme = Fp8((1, -1), Activation(Element.FP8))
    kernels = KernelSet(gpu_spec(arch))
    kernels.select_candidate("linear", linear_problem(scheme))
    assert f"{arch} has no fp8 matrix instructions" in kernels.report()[0]["refused"]
    with pytest.raises(UnsupportedError, match=arch) as refused:
        KernelSet(gpu_spec(arch), strict=True).check("linear", linear_problem(scheme))
    assert "=1" not in str(refused.value), "an environment variable is no reason"


def linear_problem(scheme: Fp8 | Int8) -> LinearProblem:
    return LinearProblem(scheme=scheme, in_features=4096, out_features=4096, dtype=torch.bfloat16)


def _size(case: Case) -> int:
    """Elements of the operands' tiles in all stages: roughly what shared memory holds."""
    constants = case.constants
    tile = (constants.get("BLOCK_M", 1) + constants.get("BLOCK_N", 1)) * constants.get("BLOCK_K", 1)
    return tile * case.options.get("num_stages", 1) * (4 if "fp32" in case.variant else 2)


def products(arch: str) -> Iterator[Case]:
    """Every product that the launch table does not refuse: dense, 2 to 8 bits, int8, fp8; linear and experts."""
    return (case for case in cases(arch) if case.op in PRODUCTS and case.refused is None)


def assert_fits(outcomes: dict[tuple[str, str], Outcome]) -> None:
    for (arch, name), outcome in outcomes.items():
        assert outcome.shared <= LDS_TARGETS[arch], f"{name} needs {outcome.shared} bytes on {arch}"


def test_b100_the_largest_tiles_of_products_fit_the_work_group() -> None:
    chosen = (("gfx942", "packed_linear"), ("gfx942", "dense_experts"), ("gfx1201", "scaled_linear"))
    work = [(arch, max((case for case in products(arch) if case.op == op), key=_size)) for arch, op in chosen]
    assert_fits(compile_all(work))


@pytest.mark.slow
@pytest.mark.parametrize("arch", LDS_TARGETS)
def test_b100_every_product_fits_the_work_group(arch: str) -> None:
    kinds = {case.op for case in products(arch)}
    assert kinds == set(PRODUCTS), f"{arch} lacks {set(PRODUCTS) - kinds}"
    assert_fits(compile_all([(arch, case) for case in products(arch)]))


HEAD_SIZES = (64, 80, 96, 128, 192, 256, 512)


def attention_cases(arch: str, sizes: tuple[int, ...], blocks: tuple[int, ...]) -> Iterator[Case]:
    """fp16, bf16 and the chip's fp8 cache, or its int8 one; every head size is compiled or refused with a reason."""
    kind = gpu_spec(arch).fp8
    cache = torch.int8 if kind is Fp8Kind.NONE else fp8_dtype(kind)
    kernels = KernelSet(gpu_spec(arch))
    for size, (dtype, kv_dtype) in itertools.product(
        sizes, ((torch.float16, None), (torch.bfloat16, None), (torch.bfloat16, cache))
    ):
        problem = AttentionProblem(
            head_size=size, num_heads=8, num_kv_heads=2, block_size=16, dtype=dtype, kv_dtype=kv_dtype or dtype
        )
        if kernels.select_candidate("paged_attention", problem).name != "triton":
            assert str(size) in kernels.report()[-1]["refused"] or "128" in kernels.report()[-1]["refused"]
            continue
        for phase, block in itertools.product(("decode", "prefill"), blocks):
            shape = attention._Shape(phase, size, size)
            case = attention._case(arch, dtype, shape, kv_dtype=kv_dtype)
            assert case.refused is None, case.name
            case.constants["BLOCK_SIZE"] = block
            yield case


def compile_attention(arch: str, sizes: tuple[int, ...], blocks: tuple[int, ...]) -> None:
    for block in blocks:
        assert_fits(compile_all([(arch, case) for case in attention_cases(arch, sizes, (block,))]))


def test_b101_the_widest_heads_fit_with_their_scratch() -> None:
    """The head size of the report; 512 is refused, and says so, before anything is compiled."""
    assert list(attention_cases("gfx942", (512,), (16,))) == []
    wide = [case for case in attention_cases("gfx942", (256,), (32,)) if "fp16" not in case.variant]
    assert_fits(compile_all([("gfx942", case) for case in wide if "prefill" in case.variant]))


@pytest.mark.slow
@pytest.mark.parametrize("arch", LDS_TARGETS)
def test_b101_every_head_size_fits_with_its_scratch(arch: str) -> None:
    compile_attention(arch, HEAD_SIZES, (16, 32))


@pytest.mark.parametrize(("arch", "wave"), WAVES.items())
def test_b103_waves_by_family(arch: str, wave: int) -> None:
    assert amd_wave_size(arch) == amd_facts(arch).wave_size == gpu_spec(arch).wave_size == wave
    assert has_wide_waves(arch) == (wave == 64), "launch rows halve their warps for wide waves"


def test_b103_the_compiler_gets_the_wave() -> None:
    """Machine code of a kernel without products says how many lanes a wave has."""
    found = {}
    work = [
        (arch, next(c for c in cases("gfx942") if c.op == "add_splits")) for arch in WAVES if arch not in NOT_COMPILED
    ]
    for index, wave, error in run_forked(_wave_of_code, work, 2, timeout=180.0):
        assert error is None, f"{work[index][0]}: {error}"
        found[work[index][0]] = wave
    assert found == {arch: wave for arch, wave in WAVES.items() if arch not in NOT_COMPILED}


@pytest.mark.parametrize("arch", NOT_COMPILED)
def test_b103_chips_without_matrix_instructions_are_refused_by_name(arch: str) -> None:
    kernels = KernelSet(gpu_spec(arch))
    chosen = kernels.select_candidate("linear", linear_problem(Fp8((1, -1))))
    assert not chosen.name.startswith("triton") and f"{arch} has no" in kernels.report()[0]["refused"]


def _wave_of_code(item: tuple[str, Case]) -> int:
    arch, case = item
    assembly = check_compile._compile(case, amd_facts(arch)).asm["amdgcn"]
    match = re.search(r"\.wavefront_size:\s+(\d+)", assembly)
    assert match is not None and f"-{arch}" in assembly
    return int(match[1])


@pytest.mark.parametrize("arch", ["gfx12", "gfx9", "gfx90", "gfx99999", "mi300"])
def test_b103_an_unknown_chip_is_an_error_and_no_default(arch: str) -> None:
    with pytest.raises(UnsupportedError, match=f"unknown AMD architecture '{arch}'"):
        check_compile.arch_facts(arch)
