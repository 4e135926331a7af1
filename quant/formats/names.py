"""Module names: what different tools call the same layer."""

from __future__ import annotations

import re

from .base_source import TensorSource

# Mixtral's experts are w1, w3 and w2 in its own checkpoints; llm-compressor on transformers 5 names them by their role.
_EXPERT = re.compile(r"^(.*\bexperts\.\d+)\.(w[123]|gate_proj|up_proj|down_proj)$")
_OTHER_NAME = {"w1": "gate_proj", "w3": "up_proj", "w2": "down_proj"}
_OTHER_NAME |= {role: name for name, role in _OTHER_NAME.items()}

# Matrices that models fuse, and the modules that a config may name instead.
FUSED = {
    "qkv_proj": ("q_proj", "k_proj", "v_proj"),
    "gate_up_proj": ("gate_proj", "up_proj"),
    "gate_up": ("gate_proj", "up_proj"),
}


def stored_module(source: TensorSource, module: str) -> str:
    """The name under which ``module`` is stored: its own, or an expert's other name where only that one is there."""
    match = _EXPERT.match(module)
    if match is None or _is_stored(source, module):
        return module
    other = f"{match[1]}.{_OTHER_NAME[match[2]]}"
    return other if _is_stored(source, other) else module


def same_layer(module: str) -> tuple[str, ...]:
    """The module's name and, of an expert's, the other one."""
    match = _EXPERT.match(module)
    return (module,) if match is None else (module, f"{match[1]}.{_OTHER_NAME[match[2]]}")


def fused_parts(module: str) -> tuple[str, ...]:
    """``q_proj``, ``k_proj`` and ``v_proj`` for a ``qkv_proj``, and so on; nothing for other modules."""
    parent, _, name = module.rpartition(".")
    return tuple(f"{parent}.{part}" if parent else part for part in FUSED.get(name, ()))


def is_head(module: str) -> bool:
    """Whether the module is the output head, which formats leave out unless they name it."""
    return module == "lm_head" or module.endswith(".lm_head")


def is_expert(module: str) -> bool:
    """Whether the module is a matrix of one of several experts."""
    return _EXPERT.match(module) is not None


def is_router(module: str) -> bool:
    """Whether the module weighs experts: a small matrix that stays in 16 or 32 bits."""
    return module.endswith((".gate", ".router", ".shared_expert_gate"))


def _is_stored(source: TensorSource, module: str) -> bool:
    return any(source.has(f"{module}.{part}") for part in ("weight", "qweight", "weight_packed"))
