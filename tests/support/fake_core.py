"""A fake model for tests of the engine core: exact arithmetic on tokens that it can only know from the paged KV cache.

Keys hold the token ids and values the positions. A query reads its whole context back through the block table, checks
that every position is where it belongs, and hashes the tokens; the hash picks a row of a fixed random table as logits.
A wrong block, slot, length or position therefore gives a failed assertion or other tokens than `expected_greedy`,
which works from the token ids alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from twofold.engine.config import EngineConfig
from twofold.engine.core import prefix_cache
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.layers.output_rows import OutputRows
from twofold.engine.messages import EngineRequest, TokenOutput
from twofold.engine.model_config import ModelConfig, RopeConfig
from twofold.engine.sampling_params import SamplingParams
from twofold.kernels import reference
from twofold.kernels.attention_batch import AttentionBatch
from twofold.kernels.kv_layout import KVCache
from twofold.platforms.cpu import CpuPlatform
from twofold.quant.kv_scales import KVScales

NUM_STATES = 997
VOCAB_SIZE = 64
EOS = 1
_MULTIPLIER = 31


class FakeModel:
    """Satisfies ``Model``. ``head_rows`` above ``VOCAB_SIZE`` adds padding rows with the largest logits of all."""

    def __init__(self, *, max_position_embeddings: int = 512, head_rows: int = VOCAB_SIZE, scale: float = 2.0) -> None:
        self.config = ModelConfig(
            architecture="Fake",
            vocab_size=head_rows,
            hidden_size=1,
            intermediate_size=1,
            num_layers=1,
            num_heads=1,
            num_kv_heads=1,
            head_size=1,
            norm_eps=1e-5,
            rope=RopeConfig(rotary_size=1),
            max_position_embeddings=max_position_embeddings,
            layer_windows=(None,),
            eos_token_ids=frozenset({EOS}),
        )
        self.dtype = self.kv_dtype = torch.float32
        self.kv_scales: dict[int, KVScales] = {}
        self.num_layers = self.kv_heads = self.head_size = 1
        self.weight_bytes = 0
        generator = torch.Generator().manual_seed(1)
        self.table = torch.randn(NUM_STATES, head_rows, generator=generator) * scale
        self.table[:, VOCAB_SIZE:] += 100.0
        self.num_computed = 0

    def forward(
        self,
        input_ids: Tensor,
        positions: Tensor,
        kv_caches: list[KVCache],
        batch: AttentionBatch,
        outputs: OutputRows | None = None,
    ) -> Tensor:
        """Hidden states [T,1], or those of ``outputs``: the state reached by each query's context."""
        keys, values = kv_caches[0].key, kv_caches[0].value
        size = keys.shape[1]
        slots = batch.slot_mapping
        assert len(set(slots.tolist())) == len(slots), "two tokens were given the same slot"
        keys[slots // size, slots % size, 0, 0] = input_ids.float()
        values[slots // size, slots % size, 0, 0] = positions.float()
        self.num_computed += len(input_ids)
        hidden = []
        starts = batch.query_start_loc.tolist()
        for b in range(batch.num_requests):
            length = int(batch.seq_lens[b])
            count = starts[b + 1] - starts[b]
            assert (length, count) == (batch.seq_lens_host[b], batch.query_lens_host[b])
            where = torch.arange(length)
            blocks = batch.block_table[b].long()[where // size]
            assert torch.equal(values[blocks, where % size, 0, 0], where.float()), "a position is not where it belongs"
            assert torch.equal(positions[starts[b] : starts[b + 1]], where[length - count :])
            states = _states(keys[blocks, where % size, 0, 0].long().tolist())
            hidden += states[length - count :]
        states = torch.tensor(hidden, dtype=torch.float32)[:, None]
        return states if outputs is None else states[outputs.index]

    def reserve(self, seq_len: int) -> int:
        """0: its steps follow their inputs in Python, so that none can be recorded."""
        return 0

    def compute_logits(self, hidden: Tensor) -> Tensor:
        """float32 [R, head rows]."""
        return self.table[hidden[:, 0].long()]


class FakeKernels:
    """Satisfies the core's ``Kernels``."""

    def select(self, op: str, problem: Any) -> Any:
        """The reference's definition."""
        return getattr(reference, op)

    def report(self) -> list[dict[str, str]]:
        """No choices."""
        return []

    def step_memory(self) -> AbstractContextManager[None]:
        """torch's."""
        return nullcontext()

    def give_back_pages(self) -> None:
        """There is nothing to give."""


def _states(tokens: Iterable[int]) -> list[int]:
    """The state after each token."""
    state, states = 7, []
    for token in tokens:
        state = (state * _MULTIPLIER + token + 1) % NUM_STATES
        states.append(state)
    return states


def expected_logits(model: FakeModel, tokens: list[int]) -> Tensor:
    """float32 [T, head rows], from the tokens alone."""
    return model.table[torch.tensor(_states(tokens))]


def expected_greedy(model: FakeModel, prompt: list[int], num_tokens: int, *, stop: Iterable[int] = ()) -> list[int]:
    """The greedy continuation, from the tokens alone; ends with the first of ``stop``."""
    tokens = list(prompt)
    while len(tokens) < len(prompt) + num_tokens:
        tokens.append(int(expected_logits(model, tokens)[-1, :VOCAB_SIZE].argmax()))
        if tokens[-1] in stop:
            break
    return tokens[len(prompt) :]


def make_core(
    model: FakeModel | None = None, *, num_blocks: int = 64, vocab_size: int = VOCAB_SIZE, **options: Any
) -> EngineCore:
    """A core around a fake model whose pool has ``num_blocks`` blocks."""
    block_size = options.setdefault("block_size", 4)
    options.setdefault("max_step_stretch", math.inf)  # plans that do not follow the clock
    config = EngineConfig(model="fake", kv_cache_bytes=num_blocks * block_size * 8, **options)
    return EngineCore.from_parts(config, model or FakeModel(), CpuPlatform(), FakeKernels(), vocab_size=vocab_size)


def make_request(request_id: str, prompt: list[int], **params: Any) -> EngineRequest:
    """A request with greedy sampling, seed 0 and no end of text unless told otherwise."""
    params = {"temperature": 0.0, "seed": 0, "ignore_eos": True, **params}
    extras = {key: params.pop(key) for key in ("cache_salt", "adapter") if key in params}
    return EngineRequest(request_id=request_id, prompt_token_ids=prompt, params=SamplingParams(**params), **extras)


def run(core: EngineCore, *requests: EngineRequest, max_steps: int = 100_000) -> dict[tuple[str, int], TokenOutput]:
    """Add requests, step until nothing is left, and join each sample's outputs into one."""
    for request in requests:
        core.add_request(request)
    return drain(core, max_steps=max_steps)


def drain(core: EngineCore, *, max_steps: int = 100_000) -> dict[tuple[str, int], TokenOutput]:
    """Step until nothing is left; each sample's outputs joined into one."""
    joined: dict[tuple[str, int], TokenOutput] = {}
    for _ in range(max_steps):
        if not core.has_work():
            return joined
        for output in core.step():
            join(joined, output)
    raise AssertionError(f"still not done after {max_steps} steps")


def join(joined: dict[tuple[str, int], TokenOutput], output: TokenOutput) -> None:
    """Add one step's output of a sample to what came before."""
    whole = joined.setdefault((output.request_id, output.index), output)
    if whole is output:
        return
    assert whole.finish_reason is None, "output after the end"
    assert output.prompt_logprobs is None, "prompt logprobs come once"
    whole.token_ids += output.token_ids
    if output.logprobs is not None:
        assert whole.logprobs is not None
        whole.logprobs += output.logprobs
    whole.finish_reason, whole.stop_token, whole.error = output.finish_reason, output.stop_token, output.error


def check_blocks(core: EngineCore) -> None:
    """Blocks are conserved: the free list, the reference counts, the tables of running samples and the keys agree."""
    pool, scheduler = core._pool, core._scheduler
    free = []
    node = pool._next[pool.num_blocks]
    while node != pool.num_blocks:
        assert pool._previous[pool._next[node]] == node
        free.append(node)
        node = pool._next[node]
    assert len(free) == len(set(free)) == pool.num_free
    held = [block for sample in scheduler.running for block in sample.blocks]
    assert [held.count(block) for block in range(pool.num_blocks)] == [
        pool.references(b) for b in range(pool.num_blocks)
    ]
    assert all((pool.references(block) == 0) == (block in set(free)) for block in range(pool.num_blocks))
    assert {block for block, key in enumerate(pool._keys) if key} == set(pool._cached.values())
    assert all(pool._keys[block] == key for key, block in pool._cached.items())
    assert all(not sample.blocks and sample.row == -1 for sample in scheduler.waiting)
    rows = [sample.row for sample in scheduler.running]
    batch = core._runner._batch
    assert sorted(rows + batch._free_rows) == list(range(len(batch.num_tokens)))
    for sample in scheduler.running:
        assert batch._block_table[sample.row, : len(sample.blocks)].tolist() == sample.blocks
        assert batch.token_ids[sample.row, : batch.num_tokens[sample.row]].tolist() == sample.tokens
    queued = [sample.order for sample in scheduler.waiting]
    assert queued == sorted(queued) and [s.order for s in scheduler.running] == sorted(
        s.order for s in scheduler.running
    )


def check_idle(core: EngineCore) -> None:
    """Nothing is left: no request, no live block, every row free."""
    check_blocks(core)
    stats = core.stats()
    assert not core.has_work() and stats.num_running == stats.num_waiting == stats.num_live_blocks == 0
    assert core._pool.num_free == core._pool.num_blocks


class KeyRecorder:
    """Remembers what every block key stands for, to check that the cache's blocks really hold that."""

    def __init__(self, monkeypatch: Any) -> None:
        self._chains: dict[bytes, list[int]] = {}
        original = prefix_cache.block_key

        def record(parent: bytes, tokens: list[int]) -> bytes:
            key = original(parent, tokens)
            self._chains[key] = self._chains.get(parent, []) + list(tokens)
            return key

        monkeypatch.setattr(prefix_cache, "block_key", record)

    def check(self, core: EngineCore) -> None:
        """Every cached block holds the tokens and the positions that its key was made of."""
        keys, values = core._caches[0].key, core._caches[0].value
        size = keys.shape[1]
        for key, block in core._pool._cached.items():
            chain = self._chains[key]
            assert keys[block, :, 0, 0].long().tolist() == chain[-size:]
            assert values[block, :, 0, 0].long().tolist() == list(range(len(chain) - size, len(chain)))
