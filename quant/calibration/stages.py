"""The linear modules of a decoder layer in the order they compute, those that read the same input together."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

STAGES = (
    ("q_proj", "k_proj", "v_proj", "qkv_proj"),
    ("o_proj",),
    ("gate_proj", "up_proj", "gate_up_proj", "w1", "w3"),
    ("down_proj", "w2"),
)


@dataclass(frozen=True, slots=True)
class InputGroup:
    """Modules of one parent that read one input; ``modules`` are names within the layer (``self_attn.q_proj``)."""

    modules: tuple[str, ...]

    @property
    def first(self) -> str:
        return self.modules[0]

    @property
    def is_routed(self) -> bool:
        """Whether only some tokens come here, which ones depends on the router."""
        return ".experts." in self.first


def stages(modules: Iterable[str]) -> list[list[InputGroup]]:
    """``modules`` of one layer, stage by stage; a module of no known kind is a stage of its own, at the end."""
    names = list(modules)
    known = {name for stage in STAGES for name in stage}
    result = [_groups([name for name in names if _last(name) in stage]) for stage in STAGES]
    result += [[InputGroup((name,))] for name in names if _last(name) not in known]
    return [groups for groups in result if groups]


def _groups(names: list[str]) -> list[InputGroup]:
    parents: dict[str, list[str]] = {}
    for name in names:
        parents.setdefault(name.rpartition(".")[0], []).append(name)
    return [InputGroup(tuple(group)) for group in parents.values()]


def _last(name: str) -> str:
    return name.rpartition(".")[2]
