"""Experts in one tensor, as transformers holds them in memory and some tools write them, seen one by one.

    experts.gate_up_proj [E, 2 I, K] and experts.down_proj [E, K, I], with or without ".weight"

are E x (gate_proj, up_proj, down_proj) under ``experts.<e>.``. Every part is a run of bytes of the file, so loading
streams expert by expert.
"""

from __future__ import annotations

import re
from dataclasses import replace

from .safetensors_header import TensorEntry

_FUSED = re.compile(r"^(.*\bexperts)\.(gate_up_proj|down_proj)(?:\.weight)?$")


def split_experts(entries: dict[str, TensorEntry]) -> dict[str, TensorEntry]:
    """The entries with fused experts taken apart.

    Tensors that lie otherwise (transposed, or gate and up in turns, as other families have them) stay as they are: only
    shapes that fit each other as above are taken apart.
    """
    fused: dict[str, dict[str, str]] = {}
    for name, entry in entries.items():
        match = _FUSED.match(name)
        if match is not None and len(entry.shape) == 3:
            fused.setdefault(match[1], {})[match[2]] = name
    result = dict(entries)
    for prefix, names in fused.items():
        if set(names) != {"gate_up_proj", "down_proj"}:
            continue
        gate_up, down = entries[names["gate_up_proj"]], entries[names["down_proj"]]
        if not _fit(gate_up, down):
            continue
        for name in names.values():
            del result[name]
        result |= _parts(prefix, ("gate_proj", "up_proj"), gate_up) | _parts(prefix, ("down_proj",), down)
    return result


def _fit(gate_up: TensorEntry, down: TensorEntry) -> bool:
    experts, double, columns = gate_up.shape
    return double % 2 == 0 and down.shape == (experts, columns, double // 2)


def _parts(prefix: str, projections: tuple[str, ...], entry: TensorEntry) -> dict[str, TensorEntry]:
    """One entry per expert and projection; the projections of an expert follow each other."""
    experts, rows, columns = entry.shape
    size = (entry.end - entry.start) // (experts * len(projections))
    parts = {}
    for index in range(experts * len(projections)):
        expert, which = divmod(index, len(projections))
        start = entry.start + index * size
        parts[f"{prefix}.{expert}.{projections[which]}.weight"] = replace(
            entry, shape=(rows // len(projections), columns), start=start, end=start + size
        )
    return parts
