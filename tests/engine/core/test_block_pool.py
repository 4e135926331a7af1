"""The block pool against a plain model of it: a list for the free blocks, a dict for the keys."""

from __future__ import annotations

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from twofold.engine.core.block_pool import BlockPool

NUM_BLOCKS = 6


class PoolMachine(RuleBasedStateMachine):
    """Holders take, share, register and release blocks in any order."""

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(NUM_BLOCKS)
        self.free = list(range(NUM_BLOCKS))
        self.keys: dict[int, bytes] = {}
        self.holders: list[list[int]] = []

    @rule(count=st.integers(1, NUM_BLOCKS))
    def allocate(self, count: int) -> None:
        if count > len(self.free):
            return
        expected, self.free = self.free[:count], self.free[count:]
        for block in expected:
            self.keys.pop(block, None)
        assert self.pool.allocate(count) == expected
        self.holders.append(expected)

    @precondition(lambda self: self.keys)
    @rule(data=st.data())
    def share_cached(self, data: st.DataObject) -> None:
        block = data.draw(st.sampled_from(sorted(self.keys)))
        assert self.pool.lookup(self.keys[block]) == block
        self.pool.share([block])
        if block in self.free:
            self.free.remove(block)
        self.holders.append([block])

    @precondition(lambda self: self.holders)
    @rule(data=st.data(), key=st.binary(min_size=1, max_size=1))
    def register(self, data: st.DataObject, key: bytes) -> None:
        block = data.draw(st.sampled_from(data.draw(st.sampled_from(self.holders))))
        if block in self.keys:
            return
        self.pool.register(block, key)
        if key not in self.keys.values():
            self.keys[block] = key

    @precondition(lambda self: self.holders)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = self.holders.pop(data.draw(st.integers(0, len(self.holders) - 1)))
        self.pool.release(blocks)
        for block in reversed(blocks):
            if any(block in other for other in self.holders):
                continue
            if block in self.keys:
                self.free.append(block)
            else:
                self.free.insert(0, block)

    @invariant()
    def agrees(self) -> None:
        assert self.pool.num_free == len(self.free)
        assert self.pool.num_live == NUM_BLOCKS - len(self.free)
        assert self.pool.num_cached == len(self.keys)
        for block in range(NUM_BLOCKS):
            held = sum(blocks.count(block) for blocks in self.holders)
            assert self.pool.references(block) == held
            assert self.pool.is_writable(block) == (held == 1 and block not in self.keys)


TestPool = PoolMachine.TestCase
TestPool.settings = settings(max_examples=60, stateful_step_count=40, deadline=None)


def test_tails_are_evicted_before_the_prefix_they_hang_on() -> None:
    pool = BlockPool(4)
    blocks = pool.allocate(3)
    for index, block in enumerate(blocks):
        pool.register(block, bytes([index]))
    pool.release(blocks)
    assert pool.allocate(1) == [3]  # never used: goes before anything cached
    assert pool.allocate(2) == [blocks[2], blocks[1]]
    assert pool.lookup(b"\0") == blocks[0] and pool.lookup(b"\1") is None


def test_a_key_is_gone_when_its_block_is_handed_out() -> None:
    pool = BlockPool(1)
    (block,) = pool.allocate(1)
    pool.register(block, b"k")
    pool.release([block])
    assert pool.lookup(b"k") == block
    assert pool.allocate(1) == [block]
    assert pool.lookup(b"k") is None and pool.num_cached == 0


def test_blocks_that_nobody_can_find_again_are_taken_before_untouched_ones() -> None:
    """Memory of a block is touched by its first use: what comes and goes must not walk through the whole pool."""
    pool = BlockPool(100)
    held = pool.allocate(3)
    for _ in range(50):
        blocks = pool.allocate(4)
        assert set(blocks) == {3, 4, 5, 6}
        pool.release(blocks)
    pool.release(held)
    assert set(pool.allocate(7)) == set(range(7))
