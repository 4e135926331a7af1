"""What the linear modules of a layer read while calibration windows pass through it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from .stages import InputGroup

# Called with the group and its input [..., K].
Observer = Callable[[InputGroup, Tensor], None]


class _AllSeen(Exception):
    """Every observed module has been called: the rest of the layer need not run."""


@contextmanager
def observed(layer: nn.Module, groups: Sequence[InputGroup], observe: Observer) -> Iterator[None]:
    """Inside, ``observe`` is called with the input of each group whenever its first module computes."""
    hooks = []
    for group in groups:

        def hook(module: nn.Module, arguments: tuple[Any, ...], group: InputGroup = group) -> None:
            observe(group, arguments[0])

        hooks.append(layer.get_submodule(group.first).register_forward_pre_hook(hook))
    try:
        yield
    finally:
        for handle in hooks:
            handle.remove()


def run_until(layer: nn.Module, groups: Sequence[InputGroup], observe: Observer, run: Callable[[], Tensor]) -> None:
    """``run`` the layer as far as needed to observe every group once; routed groups may stay unseen."""
    missing = {group.first for group in groups if not group.is_routed}
    stops = len(missing) == len(groups)

    def note(group: InputGroup, x: Tensor) -> None:
        observe(group, x)
        missing.discard(group.first)
        if stops and not missing:
            raise _AllSeen

    try:
        with torch.inference_mode(), observed(layer, groups, note):
            run()
    except _AllSeen:
        pass
