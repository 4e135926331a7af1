"""``auto``: what is predicted against what happens, and how bits are spent."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from quantized_models import FEW, divergence, first_layer
from tiny_models import judge
from torch import Tensor
from twofold.errors import ConfigError
from twofold.quant import quantize_model
from twofold.quant.methods.allocation import Choice, spend
from twofold.quant.methods.sensitivity import layer_sensitivities
from twofold.quant.scheme import WeightOnly

TinyModel = Callable[..., Path]


def choice(bits: int, cost: float) -> Choice:
    return Choice(WeightOnly(bits, 32), bits, cost)


def test_spending_is_the_best_there_is_on_convex_choices() -> None:
    """Against all combinations; convex curves of equal steps, where greedy steps are optimal."""
    draw = random.Random(0)
    for _ in range(20):
        units = []
        for _ in range(4):
            gains = sorted((draw.random() for _ in range(3)), reverse=True)
            costs = [5.0 - sum(gains[:count]) for count in range(4)]
            units.append(tuple(choice(bits, cost) for bits, cost in zip((2, 3, 4, 5), costs, strict=True)))
        budget = draw.randint(8, 20)
        spent = spend(units, budget)
        assert sum(one.bits for one in spent) <= budget
        best = min(
            sum(one.cost for one in every)
            for every in itertools.product(*units)
            if sum(one.bits for one in every) <= budget
        )
        assert sum(one.cost for one in spent) == pytest.approx(best)


def test_choices_that_cost_more_and_help_less_are_never_taken() -> None:
    units = [(choice(2, 1.0), choice(3, 1.5), choice(4, 0.9), choice(8, 0.0))]
    assert [spend(units, budget)[0].bits for budget in (2, 3, 4, 7, 8, 9)] == [2, 2, 2, 2, 8, 8]


def test_information_is_the_divergence_of_small_errors(tiny_model: TinyModel) -> None:
    """Noise at one module's output: the divergence that transformers' own model shows is as predicted."""
    source = tiny_model("llama", initializer_range=0.05)
    model, _ = first_layer(source)
    windows = torch.randint(0, 250, (24, 48), generator=torch.Generator().manual_seed(0))
    names = ["self_attn.v_proj", "mlp.up_proj", "mlp.down_proj"]
    found = {one.index: one.information for one in layer_sensitivities(model, windows, {0: names, 1: names})}
    original = judge(source)
    with torch.inference_mode():
        expected = original(windows).logits.log_softmax(-1)
        for index, name in itertools.product((0, 1), names):
            module = original.get_submodule(f"model.layers.{index}.{name}")
            generator = torch.Generator().manual_seed(1)

            def disturb(module: object, args: object, output: Tensor, generator: torch.Generator = generator) -> Tensor:
                return output + 0.02 * torch.randn(output.shape, generator=generator)

            handle = module.register_forward_hook(disturb)
            measured = float((expected.exp() * (expected - original(windows).logits.log_softmax(-1))).sum(-1).mean())
            handle.remove()
            predicted = 0.5 * 0.02**2 * float(found[index][name].sum())
            assert predicted == pytest.approx(measured, rel=0.25), (index, name)


@pytest.mark.parametrize("family", ["llama", "qwen2-moe"])
def test_fewer_bits_and_a_smaller_divergence(tiny_model: TinyModel, tmp_path: Path, family: str) -> None:
    source = tiny_model(family)
    even = quantize_model(str(source), "gptq:4:16", tmp_path / "even", calibration=FEW)
    report = quantize_model(str(source), f"auto:{even.linear_bits:.3f}", tmp_path / "auto", calibration=FEW)
    assert report.linear_bits <= even.linear_bits + 1e-3
    assert divergence(tmp_path / "auto", source) < divergence(tmp_path / "even", source)
    config = json.loads((tmp_path / "auto" / "config.json").read_text())["quantization_config"]
    rules = [rule for key, rule in config["dynamic"].items() if key.startswith("+:")]
    assert rules and {rule["bits"] for rule in rules} | {config["bits"]} <= {2, 3, 4, 8}


def test_an_interrupted_work_keeps_its_choice(
    tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stop(BaseException):
        """As Ctrl-C does."""

    def stop(done: int, total: int) -> None:
        if done == 3:  # two layers measured, one quantized
            raise Stop

    source = str(tiny_model("llama"))
    with pytest.raises(Stop):
        quantize_model(source, "auto:5", tmp_path / "out", stop, calibration=FEW)
    monkeypatch.setattr("twofold.quant.pipeline.choose_schemes", None)
    assert quantize_model(source, "auto:5", tmp_path / "out", calibration=FEW).linear_bits <= 5


def test_targets_that_cannot_be_met(tiny_model: TinyModel, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"target bits 2.5: .* at least 3\.\d+ bits a weight.*ask for more"):
        quantize_model(str(tiny_model("llama")), "auto:2.5", tmp_path / "out")
    assert not list(tmp_path.iterdir())
