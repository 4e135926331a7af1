"""How many prompt tokens a step takes along while requests wait, by times that the test makes up."""

from __future__ import annotations

import math

import pytest
from fake_core import FakeModel, expected_greedy, make_core, make_request, run
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.core.step_plan import StepPlan
from twofold.errors import ConfigError

# Seconds of a made-up machine: of a step, and more for each of its tokens.
STEP, TOKEN = 0.004, 0.001


def prompt_of(length: int, salt: int) -> list[int]:
    """A prompt that shares no block with one of another salt."""
    return [2 + (i * 7 + salt * 13 + (i * salt) % 5) % 60 for i in range(length)]


def on_made_up_time(core: EngineCore, monkeypatch: pytest.MonkeyPatch, slow: float = 1.0) -> list[StepPlan]:
    """Plans from now on; the pace sees the made-up machine's times, `slow` times as long, and no clock."""
    plans: list[StepPlan] = []
    observe = core._pace.observe

    def observing(plan: StepPlan, seconds: float) -> None:
        plans.append(plan)
        observe(plan, slow * (STEP + TOKEN * sum(plan.num_tokens.values())))

    monkeypatch.setattr(core._pace, "observe", observing)
    return plans


def long_steps(stretch: float, monkeypatch: pytest.MonkeyPatch, slow: float = 1.0) -> list[dict[str, int]]:
    """Tokens by request of the steps in which two requests wait while a prompt of 200 tokens is computed."""
    model = FakeModel()
    core = make_core(model, num_blocks=200, max_num_batched_tokens=128, max_step_stretch=stretch)
    plans = on_made_up_time(core, monkeypatch, slow)
    for name in ("first", "second"):
        core.add_request(make_request(name, prompt_of(40, len(name)), max_tokens=60))
    for _ in range(6):
        core.step()
    del plans[:]
    out = run(core, make_request("long", prompt_of(200, 3), max_tokens=2))
    assert out["long", 0].token_ids == expected_greedy(model, prompt_of(200, 3), 2)
    counts = [{name: count for (name, _), count in plan.num_tokens.items()} for plan in plans]
    return [each for each in counts if each.get("long", 0) > 1]


@pytest.mark.parametrize("slow", [1.0, 50.0])
def test_a_step_with_a_prompt_lasts_as_many_times_as_long(slow: float, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two rows alone take 6 ms, so five times that is 30: 24 tokens of the prompt, on a slow machine, too."""
    steps = long_steps(5.0, monkeypatch, slow)
    assert sum(step["long"] for step in steps) in (200, 199)  # a last token alone is no chunk
    assert all(step["first"] == step["second"] == 1 for step in steps)
    # The time of a token is measured with what a step costs besides, so that the bound is kept rather than met.
    assert all(16 <= step["long"] <= 24 for step in steps[:-1])
    assert all(STEP + TOKEN * sum(step.values()) <= 5 * (STEP + 2 * TOKEN) + 1e-9 for step in steps)


def test_without_a_bound_steps_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    assert [step["long"] for step in long_steps(math.inf, monkeypatch)] == [126, 74]


def test_steps_for_which_nobody_waits_are_filled(monkeypatch: pytest.MonkeyPatch) -> None:
    core = make_core(num_blocks=200, max_num_batched_tokens=128, max_step_stretch=1.0)
    plans = on_made_up_time(core, monkeypatch)
    run(core, make_request("short", prompt_of(40, 1), max_tokens=8))
    run(core, make_request("long", prompt_of(200, 2), max_tokens=1))
    assert [plan.num_tokens for plan in plans if ("long", 0) in plan.num_tokens][-1] == {("long", 0): 72}


def test_prompts_get_on_at_the_least_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {step["long"] for step in long_steps(1.0, monkeypatch)} <= {16, 8}


@pytest.mark.parametrize("stretch", [0.5, -1.0, math.nan])
def test_less_than_once_as_long_is_refused(stretch: float) -> None:
    with pytest.raises(ConfigError, match=r"max_step_stretch is .*; it must be at least 1, or inf"):
        make_core(max_step_stretch=stretch)
