"""Drives a model as the engine does, without the engine: paged caches, scattered blocks, mixed batches."""

from __future__ import annotations

import random
from pathlib import Path

import torch
from twofold.engine.config import EngineConfig
from twofold.engine.core.kv_cache import KVPlan, allocate_kv_caches
from twofold.engine.models import Model, load_model
from twofold.engine.sources import resolve_model
from twofold.kernels.attention_batch import AttentionBatch
from twofold.kernels.kernel_set import KernelSet
from twofold.platforms import select_platform


def load(path: Path | str, **options: object) -> Model:
    """The model in float32 on the CPU."""
    platform = select_platform("cpu")
    config = EngineConfig(model=str(path), device="cpu", dtype="float32", **options)
    return load_model(resolve_model(str(path)), config, platform, KernelSet(platform.spec))


class PagedRunner:
    """Sequences by name; block ids are handed out in random order so that no table is contiguous."""

    def __init__(self, model: Model, *, num_blocks: int = 256, block_size: int = 16, seed: int = 0) -> None:
        self.model = model
        self.block_size = block_size
        self._free = random.Random(seed).sample(range(num_blocks), num_blocks)
        self._tables: dict[str, list[int]] = {}
        self._lengths: dict[str, int] = {}
        plan = KVPlan(num_blocks=num_blocks, block_size=block_size, max_model_len=block_size)
        self.caches = allocate_kv_caches(plan, model, torch.device("cpu"))
        for cache in self.caches:  # whatever lies in unwritten slots must not matter
            for part in cache.tensors:
                part.fill_(float("nan") if part.is_floating_point() else 127)

    def step(self, work: dict[str, list[int]]) -> dict[str, torch.Tensor]:
        """Compute the given new tokens of each sequence in one batch; logits float32 [tokens, V] per sequence."""
        positions, slots, lengths = [], [], []
        for name, tokens in work.items():
            start = self._lengths.get(name, 0)
            self._grow(name, start + len(tokens))
            table = self._tables[name]
            span = range(start, start + len(tokens))
            positions += span
            slots += [table[p // self.block_size] * self.block_size + p % self.block_size for p in span]
            lengths.append(start + len(tokens))
        counts = [len(tokens) for tokens in work.values()]
        batch = self._batch(list(work), counts, lengths, slots)
        ids = torch.tensor([token for tokens in work.values() for token in tokens])
        hidden = self.model.forward(ids, torch.tensor(positions), self.caches, batch)
        logits = self.model.compute_logits(hidden)
        return dict(zip(work, logits.split(counts), strict=True))

    def _grow(self, name: str, length: int) -> None:
        table = self._tables.setdefault(name, [])
        while len(table) * self.block_size < length:
            table.append(self._free.pop())
        self._lengths[name] = length

    def _batch(self, names: list[str], counts: list[int], lengths: list[int], slots: list[int]) -> AttentionBatch:
        width = max(len(self._tables[name]) for name in names)
        rows = [self._tables[name] + [0] * (width - len(self._tables[name])) for name in names]
        starts = torch.tensor([0, *counts]).cumsum(0)
        return AttentionBatch(
            query_start_loc=starts.int(),
            seq_lens=torch.tensor(lengths, dtype=torch.int32),
            block_table=torch.tensor(rows, dtype=torch.int32),
            slot_mapping=torch.tensor(slots),
            query_lens_host=tuple(counts),
            seq_lens_host=tuple(lengths),
        )


def logits_of(model: Model, token_ids: list[int]) -> torch.Tensor:
    """float32 [T,V] of one sequence computed at once."""
    return PagedRunner(model).step({"only": token_ids})["only"]


def greedy_together(model: Model, prompts: list[list[int]], num_tokens: int, budget: int = 48) -> list[list[int]]:
    """Greedy continuations of all prompts at once: every step mixes decoding rows with chunks of waiting prompts."""
    runner = PagedRunner(model, num_blocks=2048)
    todo = {str(index): list(prompt) for index, prompt in enumerate(prompts)}
    done: dict[str, list[int]] = {name: [] for name in todo}
    while todo:
        work, left = {}, budget
        for name, tokens in sorted(todo.items(), key=lambda item: len(item[1])):
            if left > 0:
                work[name] = tokens[:left]
                left -= len(work[name])
        for name, logits in runner.step(work).items():
            todo[name] = todo[name][len(work[name]) :]
            if not todo[name]:
                done[name].append(int(logits[-1].argmax()))
                todo[name] = [done[name][-1]]
                if len(done[name]) == num_tokens:
                    del todo[name]
    return [done[str(index)] for index in range(len(prompts))]
