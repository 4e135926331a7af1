"""Scheduler: hands each step's token budget to samples, and KV blocks to those that need them.

A sample has ``num_computed_tokens`` and the tokens it wants computed; a step gives it some of the difference. There is
no prefill and no decode phase, so chunked prompts, prefix-cache hits and resumed samples are one case. Running samples
come first, in order of arrival; waiting ones are admitted in the same order where blocks, rows and budget are left
over. When blocks run out the sample that arrived last gives its own back and later computes them again, so the oldest
one always gets on and nobody starves. While samples wait for their next token, ``StepPace`` bounds how many tokens of
prompts a step takes along.
"""

from __future__ import annotations

import bisect
import time

from .batch import Batch
from .block_pool import BlockPool
from .prefix_cache import PrefixCache
from .request import Sample, Status
from .step_pace import StepPace
from .step_plan import StepBudget, StepPlan


class Scheduler:
    """Owns the queues. ``waiting`` and ``running`` are always sorted by ``Sample.order``."""

    def __init__(
        self,
        *,
        pool: BlockPool,
        cache: PrefixCache,
        batch: Batch,
        block_size: int,
        max_num_tokens: int,
        pace: StepPace,
    ) -> None:
        self.waiting: list[Sample] = []
        self.running: list[Sample] = []
        self.num_preemptions = 0
        self._pool = pool
        self._cache = cache
        self._batch = batch
        self._block_size = block_size
        self._max_num_tokens = max_num_tokens
        self._pace = pace

    def add(self, sample: Sample) -> None:
        """Queue a sample."""
        sample.status = Status.WAITING
        bisect.insort(self.waiting, sample, key=_order)

    def finish(self, sample: Sample) -> None:
        """Take a sample out, wherever it is, and give its blocks and row back."""
        if sample.status is Status.FINISHED:
            return
        _take_out(self.running if sample.status is Status.RUNNING else self.waiting, sample)
        self._release(sample)
        sample.status = Status.FINISHED

    def schedule(self) -> StepPlan:
        """Decide the next step. Blocks are taken here; ``commit`` must follow once the step has been computed."""
        plan = StepPlan()
        budget = self._step_budget()
        self._schedule_running(plan, budget)
        if not plan.num_preempted:
            self._schedule_waiting(plan, budget)
        self.num_preemptions += plan.num_preempted
        return plan

    def commit(self, plan: StepPlan) -> None:
        """Count a computed step's tokens and offer the blocks that it filled to the prefix cache."""
        for sample, count in zip(plan.samples, plan.num_tokens.values(), strict=True):
            sample.num_computed_tokens += count
            self._cache.register(sample)

    def _step_budget(self) -> StepBudget:
        """Samples that have drawn a token wait for the next; the rest of the step is for prompts."""
        num_decoding = sum(sample.num_output_tokens > 0 for sample in self.running)
        bound, num_tokens = self._pace.max_prompt_tokens(num_decoding), self._max_num_tokens
        return StepBudget(num_tokens, num_tokens if bound is None else min(bound, max(1, num_tokens - num_decoding)))

    def _schedule_running(self, plan: StepPlan, budget: StepBudget) -> None:
        position = 0
        while position < len(self.running) and budget.num_tokens > 0:
            sample = self.running[position]
            count = budget.take(sample.num_wanted_tokens())
            if count == 0:  # a prompt, of which this step has enough; others behind it may wait for one token
                position += 1
                continue
            if not self._make_room(sample, count, plan):
                break
            plan.add(sample, count)
            position += 1

    def _make_room(self, sample: Sample, count: int, plan: StepPlan) -> bool:
        """Give a running sample blocks for its next tokens, at the cost of later ones; False: it had to go itself."""
        missing = self._num_blocks(sample.num_computed_tokens + count) - len(sample.blocks)
        if missing <= 0:
            return True
        while self._pool.num_free < missing:
            victim = self.running[-1]
            self._preempt(victim)
            plan.num_preempted += 1
            if victim is sample:
                return False
        for block in self._pool.allocate(missing):
            self._batch.set_block(sample.row, len(sample.blocks), block)
            sample.blocks.append(block)
        return True

    def _copy_on_write(self, sample: Sample, index: int, plan: StepPlan) -> None:
        """Replace a block that others can see by a copy of the sample's own."""
        source = sample.blocks[index]
        target = self._pool.allocate(1)[0]
        plan.block_copies.append((source, target))
        self._pool.release([source])
        sample.blocks[index] = target
        self._batch.set_block(sample.row, index, target)

    def _schedule_waiting(self, plan: StepPlan, budget: StepBudget) -> None:
        position = 0
        while budget.has_prompt_tokens and position < len(self.waiting) and self._batch.has_free_row:
            sample = self.waiting[position]
            if sample.waits_for_leader or sample.waits_for_constraint:
                position += 1
                continue
            if not self._admit(sample, plan):
                break
            del self.waiting[position]
            bisect.insort(self.running, sample, key=_order)
            plan.add(sample, budget.take(sample.num_wanted_tokens()))

    def _admit(self, sample: Sample, plan: StepPlan) -> bool:
        """Give a waiting sample a row and blocks for all its known tokens, so that only new output can run out of them.

        Each running sample keeps a free block in reserve; without that, admissions would be preempted at once.
        """
        leader = sample.leader
        is_fork = leader is not None and not sample.has_started and leader.can_be_forked
        shared = self._forked_blocks(sample) if is_fork else self._cached_blocks(sample)
        missing = self._num_blocks(sample.num_tokens) - len(shared)
        copies = is_fork and (sample.num_tokens - 1) % self._block_size != 0
        available = self._pool.num_free - self._pool.num_free_among(shared) - len(self.running)
        if available < missing + copies:
            return False
        self._pool.share(shared)
        sample.blocks = shared + self._pool.allocate(missing)
        sample.num_computed_tokens = sample.num_tokens - 1 if is_fork else len(shared) * self._block_size
        sample.num_registered_blocks = sample.num_computed_tokens // self._block_size
        if not sample.has_started:
            sample.queue_seconds = time.monotonic() - sample.queued_at
            sample.num_cached_tokens = leader.num_cached_tokens if is_fork and leader else sample.num_computed_tokens
        sample.has_started = True
        sample.status = Status.RUNNING
        self._batch.add(sample)
        if copies:
            self._copy_on_write(sample, len(shared) - 1, plan)
        return True

    def _forked_blocks(self, sample: Sample) -> list[int]:
        """The leader's blocks that hold all prompt tokens but the last."""
        assert sample.leader is not None
        return sample.leader.blocks[: self._num_blocks(sample.num_prompt_tokens - 1)]

    def _cached_blocks(self, sample: Sample) -> list[int]:
        return [] if sample.needs_every_token else self._cache.match(sample)

    def _preempt(self, sample: Sample) -> None:
        """Back to the queue; tokens and output are kept, keys and values are computed again later."""
        _take_out(self.running, sample)
        self._release(sample)
        self.add(sample)

    def _release(self, sample: Sample) -> None:
        self._pool.release(sample.blocks)
        sample.blocks = []
        sample.num_computed_tokens = 0
        if sample.row >= 0:
            self._batch.remove(sample)

    def _num_blocks(self, num_tokens: int) -> int:
        return -(-num_tokens // self._block_size)


def _order(sample: Sample) -> int:
    return sample.order


def _take_out(queue: list[Sample], sample: Sample) -> None:
    position = bisect.bisect_left(queue, sample.order, key=_order)
    assert queue[position] is sample, f"sample {sample.id} is not where its status says"
    del queue[position]
