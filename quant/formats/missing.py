"""What to say of a tensor that is not there: where it should be, what lies in its place, and what to do."""

from __future__ import annotations

import difflib

from .base_source import TensorSource

# Last names of tensors by the tools that write them, for a module whose plain weight is missing.
_OTHERS = {"qweight": "GPTQ's or AWQ's", "weight_packed": "compressed-tensors'"}
_KNOWN = {
    "weight", "bias", "qweight", "qzeros", "scales", "g_idx", "weight_packed", "weight_scale", "weight_scale_inv",
    "weight_scale_2", "weight_shape", "weight_zero_point", "weight_g_idx", "weight_global_scale", "input_scale",
    "input_zero_point", "input_global_scale", "output_scale", "k_scale", "v_scale",
}  # fmt: skip


def missing(source: TensorSource, name: str, why: str = "") -> str:
    """The words of an error for ``name``; ``why`` it is needed, if that is not plain."""
    said = f"tensor {name} is missing from {source.location(name)}{why and f': {why}'}"
    module, _, part = name.rpartition(".")
    for other, tool in _OTHERS.items():
        if part == "weight" and source.has(f"{module}.{other}"):
            return (
                f"{said}. {module}.{other} is there: the tensors are {tool}, but the config says nothing of a "
                f"quantization of it. Take the config.json (with its quantization_config) that was saved with these "
                f"weights"
            )
    renamed = _renamed(source, module, name)
    if renamed is not None:
        return f"{said}. {renamed}, which no format knows, may be it: rename it, or fetch the file again"
    return f"{said}. Fetch the checkpoint again, or take the config.json that was saved with these weights"


def _renamed(source: TensorSource, module: str, name: str) -> str | None:
    """The most similar tensor of the same module whose last name no tool writes."""
    prefix = f"{module}."
    strange = [
        other for other in sorted(source.names) if other.startswith(prefix) and other.rpartition(".")[2] not in _KNOWN
    ]
    return next(iter(difflib.get_close_matches(name, strange, 1, 0.5)), None)
