"""What a GGUF file's header says of its tensors, checked before any of their data is touched."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from pathlib import Path

from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, ReaderField

from ...errors import CheckpointError, UnsupportedError


def check_tensors(path: Path, size: int, start: int, alignment: int, fields: Sequence[ReaderField]) -> None:
    """CheckpointError for tensors that lie where they cannot, UnsupportedError for an unknown type.

    ``start`` is where data begins in a file of ``size`` bytes; each field is a tensor as the reader found it.
    """
    places: dict[str, tuple[int, int]] = {}
    for field in fields:
        _, raw_name, _, dims, raw_type, raw_offset = field.parts
        name, offset = bytes(raw_name).decode("utf-8", "replace"), int(raw_offset[0])
        if name in places:
            raise CheckpointError(f"tensor {name} is twice in the header of {path}: a damaged file, fetch it again")
        if offset % alignment:
            raise CheckpointError(
                f"tensor {name} in {path} is said to be at byte {offset} of the data, which is no multiple of the "
                f"alignment {alignment}: a damaged file, fetch it again"
            )
        places[name] = (start + offset, start + offset + _num_bytes(path, name, dims.tolist(), int(raw_type[0])))
    _check_size(path, size, places)
    _check_order(path, alignment, places)


def _num_bytes(path: Path, name: str, dims: list[int], raw_type: int) -> int:
    """The bytes of a tensor of blocks along its first, fastest dimension."""
    try:
        kind = GGMLQuantizationType(raw_type)
    except ValueError:
        raise UnsupportedError(
            f"tensor {name} in {path} has the unknown type number {raw_type}: the file is damaged, or made for a newer "
            f"llama.cpp; fetch it again, or take one of a known type, such as Q4_K_M or Q8_0"
        ) from None
    block, width = GGML_QUANT_SIZES[kind]
    if dims and dims[0] % block:
        raise CheckpointError(
            f"tensor {name} in {path} is {dims[::-1]} in {kind.name}, whose blocks of {block} do not fill its rows: a "
            f"damaged file, fetch it again"
        )
    return math.prod(dims) // block * width


def _check_size(path: Path, size: int, places: dict[str, tuple[int, int]]) -> None:
    cut = [name for name, (_, end) in places.items() if end > size]
    if cut:
        more = f" and {len(cut) - 1} more" if len(cut) > 1 else ""
        raise CheckpointError(
            f"{path} is cut off at {size} of {max(end for _, end in places.values())} bytes by its header; tensor "
            f"{cut[0]}{more} cannot be read: fetch the file again"
        )


def _check_order(path: Path, alignment: int, places: dict[str, tuple[int, int]]) -> None:
    """Each tensor begins where the one before it ends, rounded up: llama.cpp reads no other files."""
    ordered = sorted(places.items(), key=lambda item: item[1])
    for (name, (first, end)), (other, (start, _)) in itertools.pairwise(ordered):
        if start < end or start - end >= alignment:
            what = "share bytes" if start < end else f"leave {start - end} bytes between them"
            raise CheckpointError(
                f"tensors {name} (bytes {first} to {end}) and {other} (from {start}) in {path} {what}: the type, shape "
                f"or place of one is wrong. A damaged file, fetch it again"
            )
