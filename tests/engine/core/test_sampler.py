"""The sampler over rows of a batch: edits of logits, penalties, greedy and random rows together, logprobs."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from twofold.engine.core.batch import Batch
from twofold.engine.core.logit_edits import gather_edits
from twofold.engine.core.logprobs import token_logprobs
from twofold.engine.core.request import Sample
from twofold.engine.core.sampler import DrawnTokens, Sampler
from twofold.engine.messages import EngineRequest
from twofold.engine.sampling_params import SamplingParams
from twofold.kernels.kernel_set import KernelSet
from twofold.kernels.reference import edit_logits
from twofold.platforms.cpu import CpuPlatform

VOCAB = 50


def make_batch(*rows: dict[str, Any]) -> tuple[Batch, np.ndarray]:
    """A batch whose rows have the given params, ``prompt``, ``output``, ``stop_ids`` and ``index``."""
    batch = Batch(num_rows=len(rows) + 2, max_model_len=64, block_size=4)
    samples = []
    for order, row in enumerate(rows):
        params = dict(row)
        prompt = params.pop("prompt", [1, 2, 3])
        tokens = prompt + params.pop("output", [])
        stop_ids, index = frozenset(params.pop("stop_ids", ())), params.pop("index", 0)
        request = EngineRequest(
            request_id=str(order),
            prompt_token_ids=prompt,
            params=SamplingParams(**{"temperature": 0.0, "seed": 0, **params}),
        )
        sample = Sample(request=request, index=index, order=order, tokens=tokens, max_num_tokens=64, stop_ids=stop_ids)
        batch.add(sample)
        samples.append(sample)
    return batch, np.array([sample.row for sample in samples])


def sample(logits: torch.Tensor, *rows: dict[str, Any], vocab_size: int = VOCAB) -> DrawnTokens:
    batch, places = make_batch(*rows)
    return Sampler(batch, vocab_size, KernelSet(CpuPlatform().spec)).sample(logits.clone(), places)


def edited(logits: torch.Tensor, *rows: dict[str, Any]) -> torch.Tensor:
    batch, places = make_batch(*rows)
    result = logits.clone()
    edits = gather_edits(batch, places)
    if edits is not None:
        edit_logits(result, edits)
    return result


def penalized(logits: torch.Tensor, row: dict[str, Any]) -> torch.Tensor:
    """The definition, token by token, in float64."""
    result = logits.double().clone()
    prompt, output = row.get("prompt", [1, 2, 3]), row.get("output", [])
    for token in set(prompt + output):
        penalty = row.get("repetition_penalty", 1.0)
        result[token] = result[token] / penalty if result[token] > 0 else result[token] * penalty
    for token in set(output):
        result[token] -= row.get("presence_penalty", 0.0) + row.get("frequency_penalty", 0.0) * output.count(token)
    return result


PENALTY_ROWS: list[dict[str, Any]] = [
    {"repetition_penalty": 2.0, "prompt": [1, 5, 5, 9], "output": [0]},
    {"seed": 99, "top_k": 1, "temperature": 1.0},
    {"frequency_penalty": 0.7, "output": [4, 4, 4, 8, 0, 4]},
    {"presence_penalty": -1.5, "prompt": list(range(20)), "output": [30, 30]},
    {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.25, "output": [7, 1, 7]},
    {"frequency_penalty": 1.0},
]


@pytest.mark.parametrize("order", [list(range(6)), list(reversed(range(6))), [2, 0, 5, 1, 4, 3]])
def test_penalties_row_by_row(order: list[int]) -> None:  # B052
    logits = torch.randn(6, VOCAB, generator=torch.Generator().manual_seed(0)) * 2
    result = edited(logits[order], *(PENALTY_ROWS[i] for i in order))
    for place, index in enumerate(order):
        assert (result[place].double() - penalized(logits[index], PENALTY_ROWS[index])).abs().max() < 1e-5
        alone = edited(logits[index : index + 1], PENALTY_ROWS[index])
        assert torch.equal(alone[0], result[place])
    assert torch.equal(result[order.index(1)], logits[1])  # no penalty: not a bit changes


def test_bias_forces_and_bans() -> None:  # B048
    logits = torch.randn(3, VOCAB)
    best = int(logits[1].argmax())
    drawn = sample(
        logits, {"logit_bias": {0: 100.0}}, {"logit_bias": {best: -100.0}}, {"logit_bias": {VOCAB - 1: 100.0}}
    )
    assert drawn.tokens[0] == 0 and drawn.tokens[2] == VOCAB - 1
    assert drawn.tokens[1] == int(logits[1].argsort(descending=True)[1])


def test_bias_comes_before_penalties() -> None:
    result = edited(torch.zeros(1, VOCAB), {"logit_bias": {1: 10.0}, "repetition_penalty": 2.0, "prompt": [1]})
    assert result[0, 1] == 5.0


def test_stop_ids_wait_for_min_tokens() -> None:  # B057
    logits = torch.zeros(3, VOCAB)
    row = {"min_tokens": 4, "max_tokens": 9, "stop_ids": (2, 7), "logit_bias": {2: 100.0}}
    result = edited(logits, {**row, "output": [5, 5, 5]}, {**row, "output": [5] * 4}, {"stop_ids": (2, 7)})
    assert result[0, 2] == result[0, 7] == -math.inf and (result[0].isfinite().sum() == VOCAB - 2)
    assert result[1, 2] == 100.0 and result[1, 7] == 0.0
    assert torch.equal(result[2], logits[2])


def test_plain_rows_are_left_alone() -> None:
    batch, places = make_batch({}, {"temperature": 1.0})
    assert gather_edits(batch, places) is None


def test_a_removed_row_leaves_nothing_behind() -> None:
    batch, places = make_batch({"logit_bias": {1: 5.0}, "min_tokens": 1, "stop_ids": (2,), "repetition_penalty": 2.0})
    request = EngineRequest(request_id="x", prompt_token_ids=[1], params=SamplingParams())
    sample_ = Sample(request=request, index=0, order=9, tokens=[1], max_num_tokens=9, stop_ids=frozenset())
    sample_.row = int(places[0])
    batch.remove(sample_)
    assert gather_edits(batch, places) is None


@pytest.mark.parametrize("top_k", [-1, 0, 1, 5, VOCAB - 1, VOCAB, VOCAB + 1, 10**7, 2**40])
def test_top_k_of_any_size_beside_other_rows(top_k: int) -> None:  # B045
    logits = torch.randn(3, VOCAB, generator=torch.Generator().manual_seed(2))
    rows = [{}, {"temperature": 1.0, "seed": 3, "top_k": 5}, {"temperature": 1.0, "seed": 5, "top_k": top_k}]
    tokens = sample(logits, *rows).tokens.tolist()
    assert tokens == [int(sample(logits[i : i + 1], rows[i]).tokens[0]) for i in range(3)]
    unlimited = int(sample(logits[2:], {"temperature": 1.0, "seed": 5}).tokens[0])
    if top_k == 1:
        assert tokens[2] == int(logits[2].argmax())
    elif not 0 < top_k < VOCAB:
        assert tokens[2] == unlimited


def test_padding_rows_of_the_head() -> None:  # B058
    logits = torch.randn(3, VOCAB + 14)
    logits[:, VOCAB:] += 50.0
    drawn = sample(logits, {"logprobs": 5}, {"temperature": 1.0, "logprobs": 5}, {"temperature": 1.0, "top_p": 0.5})
    assert (drawn.tokens < VOCAB).all() and drawn.tokens[0] == int(logits[0, :VOCAB].argmax())
    for place in (0, 1):
        entry = drawn.logprobs[place]
        assert entry.token_id == drawn.tokens[place] and all(token < VOCAB for token, _ in entry.top)


def test_a_row_with_nothing_to_draw_does_not_hurt_others() -> None:  # B058
    logits = torch.randn(4, VOCAB)
    logits[2, 5] = math.nan
    logits[3, 6] = math.nan
    ban = {"logit_bias": {token: -100.0 for token in range(VOCAB)}}
    drawn = sample(logits, {}, ban, {"temperature": 1.0}, {})
    assert drawn.is_valid.tolist() == [True, False, False, False]
    assert sample(logits[1:2], {**ban, "temperature": 1.0}).is_valid.tolist() == [False]
    assert drawn.tokens[0] == int(logits[0].argmax())


@pytest.mark.parametrize("num_columns", [VOCAB, 5000])
def test_logprobs_are_of_the_raw_distribution(num_columns: int) -> None:
    logits = torch.randn(4, num_columns, generator=torch.Generator().manual_seed(4))
    rows = [
        {"logprobs": 3, "temperature": 0.5, "top_k": 1},
        {},
        {"logprobs": 0, "logit_bias": {9: 100.0}},
        {"logprobs": 20, "temperature": 2.0, "repetition_penalty": 1.7},
    ]
    drawn = sample(logits, *rows, vocab_size=num_columns)
    expected = logits.double().log_softmax(-1)
    assert sorted(drawn.logprobs) == [0, 2, 3]
    for place, entry in drawn.logprobs.items():
        assert entry.token_id == drawn.tokens[place]
        assert entry.logprob == pytest.approx(expected[place, entry.token_id].item(), abs=1e-5)
        assert entry.rank == 1 + int((logits[place] > logits[place, entry.token_id]).sum())
        best = expected[place].topk(rows[place]["logprobs"])
        assert [token for token, _ in entry.top] == best.indices.tolist()
        assert [value for _, value in entry.top] == pytest.approx(best.values.tolist(), abs=1e-5)


def test_impossible_candidates_have_a_finite_floor() -> None:  # B054
    logits = torch.full((1, VOCAB), -math.inf)
    logits[0, 3] = 1.0
    (entry,) = token_logprobs(logits, torch.tensor([3]), [5])
    assert entry.logprob == 0.0 and entry.rank == 1 and [value for _, value in entry.top] == [0.0] + [-9999.0] * 4
    drawn = sample(torch.randn(1, VOCAB), {"logprobs": 5, "temperature": 1.0, "top_p": 0.1, "logit_bias": {0: -100.0}})
    assert all(math.isfinite(value) for _, value in drawn.logprobs[0].top)


@pytest.mark.parametrize("seed", [0, 42, 2**63 - 1])
def test_a_seed_is_the_same_in_any_company(seed: int) -> None:  # B050
    logits = torch.randn(8, VOCAB, generator=torch.Generator().manual_seed(6))
    row = {"seed": seed, "temperature": 0.8, "output": [1, 2]}
    alone = int(sample(logits[:1], row).tokens[0])
    for place in range(8):
        rows = [{"seed": 100 + i, "temperature": 1.0, "output": [3] * i} for i in range(8)]
        rows[place] = row
        mixed = logits.clone()
        mixed[place] = logits[0]
        assert sample(mixed, *rows).tokens[place] == alone


def test_seed_step_and_index_each_change_the_draw() -> None:
    logits = torch.zeros(1, VOCAB)
    base = {"temperature": 1.0, "seed": 0}

    def draws(rows: list[dict[str, Any]]) -> int:
        return len({int(sample(logits, row).tokens[0]) for row in rows})

    assert draws([{**base, "seed": seed} for seed in range(30)]) > 15
    assert draws([{**base, "index": index} for index in range(30)]) > 15
    assert draws([{**base, "output": [1] * step} for step in range(30)]) > 15
