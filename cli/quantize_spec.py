"""Options of ``twofold quantize`` that say how weights are quantized, each for the methods that know it."""

from __future__ import annotations

import argparse

from ..errors import ConfigError
from ..quant.spec import (
    BITS,
    CLIPS,
    FORMATS,
    GROUP_SIZES,
    GROUPED,
    KV_CACHES,
    METHODS,
    ORDERS,
    TARGETS,
    VARIANTS,
    QuantizeSpec,
)
from .parser import number, whole_number

_DEFAULT = QuantizeSpec()
# Options that only some methods know.
_KNOWN_BY = {
    "bits": GROUPED,
    "group_size": GROUPED,
    "symmetric": (*GROUPED, "auto"),
    "order": ("gptq",),
    "clip": ("rtn",),
    "variant": ("fp8",),
    "target_bits": ("auto",),
}


def add_spec_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options; those left out are absent from the result."""
    parser.add_argument("--method", choices=METHODS, default=_DEFAULT.method, help="how weights are rounded")
    parser.add_argument(
        "--bits", type=whole_number, choices=BITS, help=f"rtn, gptq, awq: bits of one weight (default {_DEFAULT.bits})"
    )
    parser.add_argument(
        "--group-size",
        type=whole_number,
        choices=GROUP_SIZES,
        help=f"rtn, gptq, awq: input features that share a scale; -1 is all of them (default {_DEFAULT.group_size})",
    )
    parser.add_argument(
        "--symmetric",
        action="store_true",
        default=None,
        help="no zero points: less exact, read by every GPTQ tool (checkpoint_format gptq instead of gptq_v2)",
    )
    parser.add_argument(
        "--order", choices=ORDERS, help=f"gptq: the order in which columns are rounded (default {_DEFAULT.order})"
    )
    parser.add_argument(
        "--clip",
        choices=CLIPS,
        help="rtn: search each group's best range, or take its whole one as other tools do (default auto: whole ones "
        "for groups of more than 32 with zero points)",
    )
    parser.add_argument(
        "--variant",
        choices=tuple(VARIANTS),
        help=f"fp8: where scales come from (default {_DEFAULT.variant}); static ones of inputs are calibrated",
    )
    parser.add_argument(
        "--target-bits",
        type=number(*TARGETS),
        metavar="BITS",
        help="auto: what a weight of the linear layers may take on average, scales and zeros counted",
    )
    parser.add_argument(
        "--rotate", action="store_true", help="turn the residual stream first, so that outliers spread; unties the head"
    )
    parser.add_argument("--kv-cache", choices=KV_CACHES, help="also calibrate scales for a KV cache of this type")
    parser.add_argument(
        "--format", choices=FORMATS, help="how the result is stored (default: what most tools read the scheme from)"
    )


def spec_from(args: argparse.Namespace) -> QuantizeSpec:
    """What the options ask for. ConfigError for one that the method does not know."""
    given = {name: getattr(args, name) for name in _KNOWN_BY if getattr(args, name) is not None}
    for name in given:
        if args.method not in _KNOWN_BY[name]:
            option = f"--{name.replace('_', '-')}"
            raise ConfigError(f"{option} is for {', '.join(_KNOWN_BY[name])}, not for --method {args.method}")
    return QuantizeSpec(method=args.method, rotate=args.rotate, kv_cache=args.kv_cache, format=args.format, **given)
