"""Inputs gathered with array arithmetic against a walk over every token."""

from __future__ import annotations

import numpy as np
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from twofold.engine.core.batch import Batch
from twofold.engine.core.request import Sample
from twofold.engine.core.step_plan import StepPlan
from twofold.engine.messages import EngineRequest
from twofold.engine.sampling_params import SamplingParams

SIZE = 4
MAX_LEN = 32


@given(
    lengths=st.lists(st.tuples(st.integers(1, MAX_LEN), st.floats(0, 0.99), st.floats(0, 1)), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
@settings(max_examples=60, deadline=None)
def test_inputs(lengths: list[tuple[int, float, float]], seed: int) -> None:
    rng = np.random.default_rng(seed)
    batch = Batch(num_rows=7, max_model_len=MAX_LEN, block_size=SIZE)
    blocks = rng.permutation(100).tolist()
    plan = StepPlan()
    for order, (length, done, share) in enumerate(lengths):
        tokens = rng.integers(0, 1000, length).tolist()
        request = EngineRequest(request_id=str(order), prompt_token_ids=tokens, params=SamplingParams())
        sample = Sample(
            request=request, index=0, order=order, tokens=tokens, max_num_tokens=MAX_LEN, stop_ids=frozenset()
        )
        sample.blocks = [blocks.pop() for _ in range(-(-length // SIZE))]
        sample.num_computed_tokens = int(done * length)
        batch.add(sample)
        left = length - sample.num_computed_tokens
        plan.add(sample, max(1, int(share * left)))
    inputs = batch.inputs(plan, torch.device("cpu"))

    ids, positions, slots, starts = [], [], [], [0]
    for sample, count in zip(plan.samples, plan.num_tokens.values(), strict=True):
        for position in range(sample.num_computed_tokens, sample.num_computed_tokens + count):
            ids.append(sample.tokens[position])
            positions.append(position)
            slots.append(sample.blocks[position // SIZE] * SIZE + position % SIZE)
        starts.append(len(ids))
    ends = [
        sample.num_computed_tokens + count for sample, count in zip(plan.samples, plan.num_tokens.values(), strict=True)
    ]
    attention = inputs.attention
    assert inputs.input_ids.tolist() == ids and inputs.positions.tolist() == positions
    assert attention.slot_mapping.tolist() == slots and attention.query_start_loc.tolist() == starts
    assert attention.seq_lens.tolist() == ends == list(attention.seq_lens_host)
    assert list(attention.query_lens_host) == list(plan.num_tokens.values())
    assert attention.block_table.shape[1] == -(-max(ends) // SIZE)
    for place, sample in enumerate(plan.samples):
        num_blocks = -(-ends[place] // SIZE)
        assert attention.block_table[place, :num_blocks].tolist() == sample.blocks[:num_blocks]
    assert inputs.drawing.tolist() == [i for i, sample in enumerate(plan.samples) if ends[i] == sample.num_tokens]
    assert [t.dtype for t in (inputs.input_ids, inputs.positions, attention.slot_mapping)] == [torch.int64] * 3
    assert [t.dtype for t in (attention.block_table, attention.seq_lens, attention.query_start_loc)] == [
        torch.int32
    ] * 3
