"""How many bytes of tensors an object of the package really holds, found by following its attributes."""

from __future__ import annotations

import torch


def held_bytes(root: object) -> int:
    """Of every tensor that can be reached, each address counted once, with its longest tensor."""
    found: dict[int, int] = {}
    seen: dict[int, object] = {}
    todo = [root]
    while todo:
        item = todo.pop()
        if id(item) in seen:
            continue
        seen[id(item)] = item
        if isinstance(item, torch.Tensor):
            found[item.data_ptr()] = max(found.get(item.data_ptr(), 0), item.nbytes)
        elif isinstance(item, list | tuple):
            todo += item
        elif isinstance(item, dict):
            todo += item.values()
        elif type(item).__module__.startswith("twofold.") and not isinstance(item, type):
            slots = {name for kind in type(item).__mro__ for name in getattr(kind, "__slots__", ())}
            todo += [
                getattr(item, name)
                for name in slots | set(vars(item) if hasattr(item, "__dict__") else ())
                if hasattr(item, name)
            ]
    return sum(found.values())
