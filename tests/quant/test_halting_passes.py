"""Passes that halt before groups of modules: order, inputs, weights changed on the way, errors, and leaving early."""

from __future__ import annotations

import functools
import threading

import pytest
import torch
from torch import Tensor, nn
from twofold.quant.calibration.halting_passes import HaltingPasses
from twofold.quant.calibration.stages import InputGroup


class Layer(nn.Module):
    """``down(gate(x) * up(x))``."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name in ("gate", "up", "down"):
            linear = nn.Linear(8, 8, bias=False)
            linear.weight.data = torch.randn(8, 8, generator=generator)
            self.add_module(name, linear)

    def forward(self, x: Tensor) -> Tensor:
        return self.get_submodule("down")(self.get_submodule("gate")(x) * self.get_submodule("up")(x))


# Named in another order than they compute in.
GROUPS = [InputGroup(("down",)), InputGroup(("up", "gate"))]


def batches(count: int = 3) -> list[Tensor]:
    return [torch.randn(4, 8, generator=torch.Generator().manual_seed(seed)) for seed in range(count)]


def passes_of(layer: Layer, inputs: list[Tensor]) -> HaltingPasses:
    return HaltingPasses(layer, GROUPS, [functools.partial(layer, x) for x in inputs])


def live_passes() -> list[str]:
    return [thread.name for thread in threading.enumerate() if thread.name == "calibration pass"]


def test_later_modules_read_what_earlier_ones_became() -> None:
    layer, inputs = Layer(), batches()
    seen: list[tuple[InputGroup, list[Tensor]]] = []
    with torch.no_grad(), passes_of(layer, inputs) as passes:
        for group, values in passes:
            seen.append((group, values))
            for name in group.modules:
                layer.get_parameter(f"{name}.weight").mul_(2.0)
    untouched = Layer()
    assert [group for group, _ in seen] == [GROUPS[1], GROUPS[0]]
    for index, x in enumerate(inputs):
        assert torch.equal(seen[0][1][index], x)
        product = 4 * untouched.get_submodule("gate")(x) * untouched.get_submodule("up")(x)
        assert torch.equal(seen[1][1][index], product)
        assert torch.equal(passes.outputs[index], 2 * untouched.get_submodule("down")(product))
    assert not live_passes()
    layer(inputs[0])  # No hook is left.


def test_a_pass_that_fails_is_an_error_of_its_own_kind() -> None:
    layer = Layer()
    with pytest.raises(RuntimeError, match="shapes cannot be multiplied"), passes_of(layer, [torch.ones(4, 5)]) as all_:
        list(all_)
    assert not live_passes()


def test_leaving_early_ends_all_threads() -> None:
    layer = Layer()
    with pytest.raises(KeyError), passes_of(layer, batches()) as passes:
        for _group in passes:
            raise KeyError("the caller failed")
    assert not live_passes()
