"""QuantizeSpec: what a user asks for when quantizing, as options or as one word (``rtn:4:32``)."""

from __future__ import annotations

import math
import re
from dataclasses import dataclass

from ..errors import ConfigError
from .scheme import Activation, Element, Fp8, Int8, Scheme, WeightOnly

# Methods with bits and group size, and all.
GROUPED = ("rtn", "gptq", "awq")
METHODS = (*GROUPED, "smoothquant", "fp8", "auto")
# Methods that look at calibration data; fp8 does with static input scales.
CALIBRATED = frozenset({"gptq", "awq", "smoothquant", "auto"})
BITS = (2, 3, 4, 8)
# The sizes that readers of GPTQ files have kernels for; -1 is one group per output feature.
GROUP_SIZES = (-1, 16, 32, 64, 128, 256, 512, 1024)
SYMMETRY = {"asym": False, "sym": True}
ORDERS = ("none", "group", "static", "full")
# Ranges of rtn: the best of some, each group's whole, or what measured better for groups of this kind.
CLIPS = ("auto", "search", "none")
# Up to this size a searched range left less divergence; beyond it, with zero points, whole ranges did. SmolLM2, nats a
# token, searched and whole: 4 bits in groups of 32 0.281 and 0.306, of 64 0.405 and 0.370; 3 bits in groups of 64 1.58
# and 1.31. Symmetric grids gain by the search at 64, too: 0.487 and 0.544.
SEARCHED_GROUP = 32
KV_CACHES = ("fp8", "int8")
# Layouts on disk; ``formats/writers.py`` has what writes them.
FORMATS = ("gptq", "gptq_v2", "awq", "compressed-tensors", "fp8")
# fp8: scales of weights and inputs. Per channel and per token; per channel and one calibrated number; per 128x128 block
# and per 128 input features.
VARIANTS: dict[str, Fp8] = {
    "dynamic": Fp8((1, -1), Activation(Element.FP8)),
    "static": Fp8((1, -1), Activation(Element.FP8, 0, dynamic=False)),
    "block": Fp8((128, 128), Activation(Element.FP8, 128)),
}
# What ``auto`` gives to a group of layers, by bits.
AUTO_GROUP_SIZES = {2: (32,), 3: (32, 64, 128), 4: (32, 64, 128), 8: (128, -1)}
TARGETS = (2.5, 8.25)
# Words for what ``--quantization`` does, often mistaken for a method.
ROUNDED_AT_LOAD = ("int8", "int4")
SHAPE = (
    "METHOD:BITS:GROUP or METHOD:BITS:GROUP:sym with rtn, gptq or awq, such as awq:4:128; fp8, fp8:static or "
    "fp8:block; smoothquant; or auto:BITS, such as auto:4.25"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class QuantizeSpec:
    """A method with its bits and group size.

    Asymmetric is the default: at 4 bits and groups of 32 it brought SmolLM2's divergence from the original down from
    0.31 to 0.24 nats a token, and GPTQ files store a zero per group either way. ``format`` names a `WriteFormat`, None
    the method's own. ``order`` is GPTQ's, the order in which columns are rounded. ``clip`` is rtn's, ``variant`` fp8's.
    ``target_bits`` is what ``auto`` may spend on a weight of the linear layers, everything stored for them counted.
    ``rotate`` turns the residual stream first. ``kv_cache`` names a type that scales are calibrated for.
    """

    method: str = "rtn"
    bits: int = 4
    group_size: int = 32
    symmetric: bool = False
    format: str | None = None
    order: str = "static"
    clip: str = "auto"
    variant: str = "dynamic"
    target_bits: float | None = None
    rotate: bool = False
    kv_cache: str | None = None

    def __post_init__(self) -> None:
        _check("method", self.method, METHODS)
        _check("bits", self.bits, BITS)
        _check("group size", self.group_size, GROUP_SIZES)
        _check("order", self.order, ORDERS)
        _check("clip", self.clip, CLIPS)
        _check("variant of fp8", self.variant, tuple(VARIANTS))
        _check("KV cache", self.kv_cache, (None, *KV_CACHES))
        if self.format is not None:
            _check("format", self.format, FORMATS)
        if (self.target_bits is None) == (self.method == "auto"):
            raise ConfigError(
                "quantize: target bits go with the method auto, and it needs them; write auto:4.25 or "
                "--method auto --target-bits 4.25"
            )
        low, high = TARGETS
        if self.target_bits is not None and not (math.isfinite(self.target_bits) and low <= self.target_bits <= high):
            raise ConfigError(f"quantize: target bits {self.target_bits} are not between {low} and {high}")

    @property
    def scheme(self) -> Scheme:
        """The scheme of every quantized layer; of ``auto``, the first one that a layer may get."""
        return self.schemes[0]

    @property
    def schemes(self) -> tuple[Scheme, ...]:
        """All schemes that a layer may get."""
        if self.method == "fp8":
            return (VARIANTS[self.variant],)
        if self.method == "smoothquant":
            return (Int8((1, -1), Activation(Element.INT8)),)
        if self.method == "auto":
            sizes = ((bits, size) for bits, every in AUTO_GROUP_SIZES.items() for size in every)
            return tuple(WeightOnly(bits, size, self.symmetric) for bits, size in sizes)
        act_order = self.method == "gptq" and self.order == "full" and self.group_size != -1
        return (WeightOnly(self.bits, self.group_size, self.symmetric, act_order),)

    @property
    def clips(self) -> bool:
        """Whether rtn searches each group's best range, clipping its largest weights."""
        if self.clip == "auto":
            return self.symmetric or 0 < self.group_size <= SEARCHED_GROUP
        return self.clip == "search"

    @property
    def is_calibrated(self) -> bool:
        """Whether calibration data is needed."""
        is_static = self.method == "fp8" and self.variant == "static"
        return self.method in CALIBRATED or is_static or self.kv_cache is not None

    @property
    def description(self) -> str:
        """Method and scheme in words."""
        what = f"at most {self.target_bits:g} bits a weight" if self.method == "auto" else str(self.scheme)
        ranges = ", whole ranges" if self.method == "rtn" and not self.clips else ""
        return f"{self.method} {what}{ranges}{', rotated' if self.rotate else ''}"

    def __str__(self) -> str:
        symmetry = ":sym" if self.symmetric else ""
        if self.method == "auto":
            return f"auto:{self.target_bits:g}{symmetry}"
        if self.method == "fp8":
            return "fp8" if self.variant == "dynamic" else f"fp8:{self.variant}"
        return self.method if self.method == "smoothquant" else f"{self.method}:{self.bits}:{self.group_size}{symmetry}"


def parse_quantize_spec(text: str) -> QuantizeSpec:
    """Read ``rtn:4:32:sym``, ``fp8:block``, ``auto:4.25`` ...; ConfigError names the wrong part and the right ones."""
    method, *parts = text.strip().lower().split(":")
    if method in ROUNDED_AT_LOAD:
        raise ConfigError(
            f"quantize is {text!r}, which names no method; write {SHAPE}. To round weights at each load instead, give "
            f"--quantization {method}"
        )
    if method not in METHODS:
        raise ConfigError(f"quantize: method {method!r} is not one of {', '.join(METHODS)}; write {SHAPE}")
    if method == "fp8" and len(parts) <= 1:
        return QuantizeSpec(method=method, variant=parts[0] if parts else "dynamic")
    if method == "smoothquant" and parts in ([], ["8"]):
        return QuantizeSpec(method=method)
    if method == "auto" and len(parts) in (1, 2):
        return QuantizeSpec(method=method, target_bits=_decimal(parts[0], text), symmetric=_symmetry(parts[1:]))
    if method not in GROUPED or len(parts) not in (2, 3):
        raise ConfigError(f"quantize is {text!r}; write {SHAPE}")
    bits, group_size, *rest = parts
    symmetric = _symmetry(rest)
    return QuantizeSpec(
        method=method,
        bits=_number("bits", bits, text),
        group_size=_number("group size", group_size, text),
        symmetric=symmetric,
    )


def _symmetry(words: list[str]) -> bool:
    word = words[0] if words else "asym"
    _check("symmetry", word, tuple(SYMMETRY))
    return SYMMETRY[word]


def _number(what: str, word: str, text: str) -> int:
    if re.fullmatch(r"-?[0-9]{1,9}", word) is None:  # int() takes digits of every script, underscores and spaces
        raise ConfigError(f"quantize is {text!r}: the {what} {word!r} is not a number; write {SHAPE}")
    return int(word)


def _decimal(word: str, text: str) -> float:
    if re.fullmatch(r"[0-9]{1,3}(\.[0-9]{1,6})?", word) is None:
        raise ConfigError(f"quantize is {text!r}: the target bits {word!r} are not a number; write {SHAPE}")
    return float(word)


def _check(what: str, value: object, allowed: tuple[object, ...]) -> None:
    if value not in allowed:
        raise ConfigError(f"quantize: {what} {value!r} is not one of {', '.join(map(str, allowed))}")
