"""Draws, argmax and edits of logits."""

from __future__ import annotations

from collections.abc import Iterator

from .. import sampling
from ..launch_sampling import sampling_row
from .case import Case

_VOCABULARIES = (1000, 151936)
_ROW = {"logits_ptr": "*fp32", "maxima_ptr": "*fp32", "masses_ptr": "*i64"}
_OPTIONS = {f"{name}_ptr": "*fp32" for name in ("temperature", "top_p", "min_p")}


def cases(arch: str) -> Iterator[Case]:
    """Every launch of a draw, for a vocabulary of one chunk and a large one; logits are float32."""
    for num_columns in _VOCABULARIES:
        yield from _draw_cases(arch, num_columns)
    yield Case(
        op="edit_logits",
        variant="fp32",
        kernel=sampling.edit_logits_kernel,
        types={
            **{f"{name}_ptr": "*fp32" for name in ("logits", "bias", "repetition", "presence", "frequency")},
            **{f"{name}_ptr": "*i32" for name in ("rows", "tokens", "counts")},
        },
        constants={"BLOCK": sampling.EDIT_BLOCK},
        options={"num_warps": 4},
        ones=("num_edits",),
        in_subset=True,
    )


def _draw_cases(arch: str, num_columns: int) -> Iterator[Case]:
    launch, values = sampling_row(arch), sampling.constants(num_columns)
    large = num_columns == _VOCABULARIES[-1]
    name = f"V={num_columns} fp32"
    yield Case(
        op="row_maxima",
        variant=name,
        kernel=sampling.row_maxima_kernel,
        types=_ROW,
        constants={"CHUNK": sampling.CHUNK},
        options={"num_warps": launch.chunk_warps},
        ones=("num_chunks",),
        in_subset=large,
    )
    yield Case(
        op="chunk_masses",
        variant=name,
        kernel=sampling.chunk_masses_kernel,
        types={**_ROW, "temperature_ptr": "*fp32"},
        constants=values,
        options={"num_warps": launch.chunk_warps},
        ones=("num_chunks",),
        in_subset=large,
    )
    for kind, random, filtered in (("argmax", False, False), ("plain", True, False), ("filtered", True, True)):
        yield Case(
            op="draw_tokens",
            variant=f"{kind} {name}",
            kernel=sampling.draw_tokens_kernel,
            types={**_ROW, **_OPTIONS, "uniform_ptr": "*fp64", "top_k_ptr": "*i32", "tokens_ptr": "*i64"},
            constants={**values, "RANDOM": random, "FILTERED": filtered},
            options={"num_warps": launch.row_warps},
            ones=("num_chunks",),
            in_subset=large and filtered,
        )
