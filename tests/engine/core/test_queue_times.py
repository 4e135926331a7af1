"""How long samples waited, told with their first output."""

from __future__ import annotations

import time

import pytest
from fake_core import drain, make_core, make_request
from twofold.engine.messages import EngineRequest, TokenOutput
from twofold.engine.sampling_params import SamplingParams


def test_the_time_until_the_first_step() -> None:
    """With one row the second request begins where the first has ended, and the first output of each says when."""
    core = make_core(max_num_seqs=1)
    began = time.monotonic()
    core.add_request(make_request("a", [5, 6], max_tokens=3))
    core.add_request(make_request("b", [7, 8], max_tokens=3))
    time.sleep(0.02)
    outputs: list[TokenOutput] = []
    while core.has_work():
        outputs += core.step()
    waited = time.monotonic() - began
    told: dict[str, list[float | None]] = {"a": [], "b": []}
    for output in outputs:
        told[output.request_id].append(output.queue_seconds)
    assert told["a"][1:] == told["b"][1:] == [None, None]
    first, second = told["a"][0], told["b"][0]
    assert first is not None and second is not None and 0.02 <= first < second <= waited


@pytest.mark.parametrize("pooling", ["last", "mean"])
def test_pooling_requests(pooling: str) -> None:
    core = make_core()
    params = SamplingParams(max_tokens=1, temperature=0.0, seed=0)
    core.add_request(EngineRequest(request_id="a", prompt_token_ids=[5, 6], params=params, pooling=pooling))
    (output,) = drain(core).values()
    assert output.queue_seconds is not None and output.queue_seconds >= 0
