"""Launch rows of attention beyond the plain table: scaled caches, and multi-head latent attention.

Latent attention has heads of 576 whose first 512 features are the values. A tile of keys is as large as five of the
widest other heads, so that few query rows fit beside it; a row serves decoding and prompts alike. The figures come from
compilations, not from a clock.
"""

from __future__ import annotations

from . import launch_table
from .launch_table import DEFAULT, AttentionLaunch, Refused, find_row

LATENT_SIZES = (576, 512)

_Row = AttentionLaunch | Refused

_SPILLS = Refused("no launch row of latent attention is known not to spill on this architecture")

# (cache: plain or scaled, bytes per element of the query) -> family -> row
LATENT: dict[tuple[str, int], dict[str, _Row]] = {
    ("plain", 2): {
        DEFAULT: AttentionLaunch(32, 32, 8, 1),
        "cdna2": AttentionLaunch(64, 16, 8, 1),
        "cdna3": AttentionLaunch(64, 16, 8, 1),
        "cdna4": AttentionLaunch(64, 16, 8, 1),
        "rdna3": _SPILLS,
        "rdna4": _SPILLS,
    },
    ("scaled", 2): {
        DEFAULT: AttentionLaunch(32, 32, 8, 1),
        "cdna2": AttentionLaunch(32, 16, 4, 1),
        "cdna3": AttentionLaunch(32, 16, 4, 1),
        "cdna4": AttentionLaunch(32, 16, 4, 1),
        "rdna3": _SPILLS,
        "rdna4": _SPILLS,
    },
}
_LATENT_FLOAT32 = Refused("latent attention has checked launch rows for 16-bit queries alone")

_FLOAT32_CODES = Refused(
    "float32 heads of more than 64 over an 8-bit cache spill: a lane of this architecture has 256 registers; "
    "bfloat16 and float16 run"
)

# Where casting codes needs other settings than the same problem with an unscaled cache.
_CASTING: dict[tuple[str, int, int], dict[str, _Row]] = {
    ("decode", 64, 2): {
        DEFAULT: AttentionLaunch(16, 32, 4, 2),
        "hopper": AttentionLaunch(16, 32, 4, 2),
        "blackwell": AttentionLaunch(16, 32, 4, 2),
    },
    ("prefill", 64, 2): {
        DEFAULT: AttentionLaunch(64, 32, 8, 2),
        "blackwell": AttentionLaunch(128, 64, 8, 2),
        "rdna3": AttentionLaunch(64, 16, 8, 1),
    },
    ("prefill", 128, 2): {
        DEFAULT: AttentionLaunch(64, 32, 8, 2),
        "ampere": AttentionLaunch(128, 32, 8, 1),
        "hopper": AttentionLaunch(128, 32, 8, 3),
        "rdna3": AttentionLaunch(32, 16, 4, 1),
        "rdna4": AttentionLaunch(64, 16, 8, 1),
    },
    ("decode", 128, 4): {"rdna3": _FLOAT32_CODES, "rdna4": _FLOAT32_CODES},
    ("prefill", 128, 4): {"rdna3": _FLOAT32_CODES, "rdna4": _FLOAT32_CODES},
}
# (phase, head class, bytes per element of the query) -> family -> row for int8 and fp8 caches
SCALED_CACHE: dict[tuple[str, int, int], dict[str, _Row]] = {
    key: {**rows, **_CASTING.get(key, {})} for key, rows in launch_table.ATTENTION.items()
}


def attention_row(arch: str, phase: str, head_size: int, element_size: int, *, scaled: bool = False) -> _Row:
    """The row for a phase: ``decode`` while the query rows of a request fit one matrix tile, else ``prefill``.

    ``head_size`` is the larger of keys and values; ``scaled``: the cache is int8 or fp8.
    """
    if head_size > 256:
        latent = "scaled" if scaled else "plain", element_size
        return find_row("latent", LATENT[latent], arch, latent) if latent in LATENT else _LATENT_FLOAT32
    if not scaled:
        return launch_table.attention_row(arch, phase, head_size, element_size)
    key = phase, launch_table.head_class(head_size), element_size
    return find_row("scaled cache", SCALED_CACHE[key], arch, key)


def attention_launch(
    arch: str, phase: str, head_size: int, element_size: int, *, scaled: bool = False
) -> AttentionLaunch:
    """``attention_row`` of a problem that the registry did not refuse."""
    row = attention_row(arch, phase, head_size, element_size, scaled=scaled)
    assert isinstance(row, AttentionLaunch), row.reason
    return row
