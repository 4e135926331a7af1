"""The C functions' arguments: what ctypes is told, and the calls of a recorded step that are compiled from it."""

from __future__ import annotations

import ctypes

_P, _N, _I, _F = ctypes.c_void_p, ctypes.c_ssize_t, ctypes.c_int, ctypes.c_float
_U = ctypes.c_uint32

SIGNATURES: dict[str, list[type]] = {
    "twofold_set_threads_cell": [_P],
    "twofold_set_team_cpus": [_P],
    "twofold_advise_large_pages": [_P, _N],
    "twofold_spread_pages": [_P, _N, _P, _N],
    "twofold_panel_width": [],
    "twofold_pack_rows": [_P, _I, _N, _N, _N, _N, _U, _P, _P, _P, _N, _P],
    "twofold_pack_groups": [_P, _N, _N, _N, _N, _N, _N, _P],
    "twofold_split_words": [_P, _N, _P],
    "twofold_interleaved_stream": [_P, _N, _N, _P],
    "twofold_gather_codes": [_P, _N, _P, _N, _I, _P],
    "twofold_gptq_round": [_P, _N, _P, _N, _N, _P, _P, _P, _F, _P, _P],
    "twofold_gptq_move": [_P, _P, _N, _P, _P, _N, _N, _P, _P, _P, _F, _P, _P],
    "twofold_search_grids": [_P, _N, _N, _P, _N, _F, _N, _I, _P, _P],
    "twofold_linear_dense": [_P, _N, _N, _N, _N, _P, _P, _P, _N, _I],
    "twofold_linear_low_bit": [_P, _N, _N, _N, _N, _P, _P, _P, _P, _I, _N, _N, _N, _I, _P, _P, _N, _I],
    "twofold_round_rows": [_P, _N, _N, _N, _P, _F, _F, _P],
    "twofold_linear_int8": [_P, _N, _N, _P, _P, _F, _P, _P, _P, _I],
    "twofold_bf16_tiles": [],
    "twofold_pack_bf16_steps": [_P, _N, _N, _I, _U, _N, _N, _P],
    "twofold_linear_bf16": [_P, _N, _N, _P, _P, _P, _P, _P],
    "twofold_linear_bf16_rounded": [_P, _N, _N, _P, _P, _P, _P],
    "twofold_gated_bf16": [_P, _N, _N, _P, _P, _P, _P, _N],
    "twofold_expert_linear": [_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P],
    "twofold_paged_attention": [_P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _F, _F],
    "twofold_draw_tokens": [_P, _N, _N, _N, _P, _P, _P, _P, _P, _P],
    "twofold_edit_logits": [_P, _N, _N, _P, _P, _P, _P, _P, _P, _P],
    "twofold_rms_norm": [_P, _N, _N, _N, _N, _N, _P, _P, _F, _F, _P, _P],
    "twofold_rms_norm_rounded": [_P, _N, _N, _N, _N, _N, _P, _P, _F, _F, _P, _N, _P],
    "twofold_rope": [_P, _P, _N, _N, _N, _N, _N, _N, _N, _P, _N, _P, _I],
    "twofold_silu_and_mul": [_P, _N, _N, _N, _P],
    "twofold_gelu_and_mul": [_P, _N, _N, _N, _I, _P],
    "twofold_soft_cap": [_P, _N, _F],
    "twofold_sigmoid_gate": [_P, _P, _N, _N],
    "twofold_moe_route": [_P, _N, _N, _N, _N, _I, _P, _P],
    "twofold_embed": [_P, _N, _P, _P, _P, _P, _P],
    "twofold_embed_panels": [_P, _N, _P, _P, _P, _P, _P],
    "twofold_rope_write_attend": [_P, _N, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _P, _N, _N, _P, _F, _F],
    "twofold_write_kv": [_P, _P, _P, _P, _P, _P, _P, _P, _P],
    "twofold_copy": [_P, _N, _N, _N, _N, _N, _P, _N, _N],
    "twofold_gather_rows": [_P, _N, _P, _N, _N, _P],
    "twofold_gather_columns": [_P, _N, _P, _N, _N, _P],
    "twofold_scale": [_P, _N, _F, _P],
    "twofold_add": [_P, _P, _N, _P],
    "twofold_tape_run": [_P, _N, _P],
}

RETURNING = ("twofold_panel_width", "twofold_bf16_tiles", "twofold_expert_linear", "twofold_tape_run")

# Calls that no recorded step makes; all others can be recorded.
_NOT_RECORDED = (
    "twofold_set_threads_cell",
    "twofold_set_team_cpus",
    "twofold_advise_large_pages",
    "twofold_spread_pages",
    "twofold_panel_width",
    "twofold_bf16_tiles",
    "twofold_pack_bf16_steps",
    "twofold_split_words",
    "twofold_interleaved_stream",
    "twofold_gather_codes",
    "twofold_gptq_round",
    "twofold_gptq_move",
    "twofold_search_grids",
    "twofold_tape_run",
)

RECORDED = tuple(name for name in SIGNATURES if name not in _NOT_RECORDED)

# Argument type -> its type in C, and the member of ``union tape_value`` (tape.h) that holds it.
_IN_C: dict[type, tuple[str, str]] = {
    _P: ("void *", "p"),
    _N: ("ptrdiff_t ", "n"),
    _I: ("int ", "i"),
    _F: ("float ", "f"),
    _U: ("uint32_t ", "u"),
}


def tape_calls_source() -> str:
    """C source: ``tape_calls``, a function for each of ``RECORDED`` that takes its arguments as an array."""
    lines = ['#include "tape.h"', ""]
    for name in RECORDED:
        kinds = [_IN_C[kind] for kind in SIGNATURES[name]]
        returns = name in RETURNING
        values = ", ".join(f"a[{place}].{member}" for place, (_, member) in enumerate(kinds))
        parameters = ", ".join(kind.strip() for kind, _ in kinds)
        body = f"return {name}({values});" if returns else f"{name}({values}); return 0;"
        lines.append(f"{'int' if returns else 'void'} {name}({parameters});")
        lines.append(f"static int call_{name}(const union tape_value *a) {{ {body} }}")
    table = ", ".join(f"call_{name}" for name in RECORDED)
    lines.append(f"const tape_call tape_calls[] = {{{table}}};")
    lines.append(f"const ptrdiff_t num_tape_calls = {len(RECORDED)};")
    return "\n".join(lines) + "\n"
