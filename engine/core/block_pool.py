"""BlockPool: reference counts, the free list and the map from block keys to cached blocks.

A block is live while its reference count is above zero, otherwise it is in the free list. A free block may still be
cached: it keeps its key and its contents until the list hands it out again, and only then loses the key. The free list
is a doubly linked ring over block ids, so that taking a block out of its middle (a prefix-cache hit) is O(1). Its head
goes first: blocks without a key, then cached ones, least recently used first.
"""

from __future__ import annotations

from collections.abc import Sequence


class BlockPool:
    """``num_blocks`` equal blocks, all of them usable."""

    def __init__(self, num_blocks: int) -> None:
        assert num_blocks > 0, "a pool needs at least one block"
        self.num_blocks = num_blocks
        self.num_free = num_blocks
        self._references = [0] * num_blocks
        self._keys: list[bytes | None] = [None] * num_blocks
        self._cached: dict[bytes, int] = {}
        ring = num_blocks + 1  # one more node than blocks: the list's head and tail meet in it
        self._next = [(node + 1) % ring for node in range(ring)]
        self._previous = [(node - 1) % ring for node in range(ring)]

    @property
    def num_live(self) -> int:
        """Blocks that some sample holds."""
        return self.num_blocks - self.num_free

    @property
    def num_cached(self) -> int:
        """Blocks with a key, live or free."""
        return len(self._cached)

    def references(self, block: int) -> int:
        """How many samples hold a block."""
        return self._references[block]

    def is_writable(self, block: int) -> bool:
        """True for a block that one sample alone holds and that nobody can find by a key."""
        return self._references[block] == 1 and self._keys[block] is None

    def allocate(self, count: int) -> list[int]:
        """Take ``count`` blocks off the free list's head; their old keys are gone before anyone can write to them."""
        assert count <= self.num_free, f"{count} blocks asked for, {self.num_free} are free"
        blocks = []
        for _ in range(count):
            block = self._next[self.num_blocks]
            self._unlink(block)
            self._forget(block)
            self._references[block] = 1
            blocks.append(block)
        return blocks

    def share(self, blocks: Sequence[int]) -> None:
        """Add a reference to each block; free cached ones leave the free list."""
        for block in blocks:
            if self._references[block] == 0:
                self._unlink(block)
            self._references[block] += 1

    def release(self, blocks: Sequence[int]) -> None:
        """Drop a reference from each block of one sample, given in the order of its tokens.

        Runs backwards, so that a sample's last blocks are evicted first: a prefix stays useful without its tail.
        """
        for block in reversed(blocks):
            assert self._references[block] > 0, f"block {block} released twice"
            self._references[block] -= 1
            if self._references[block] == 0:
                self._link(block)

    def register(self, block: int, key: bytes) -> None:
        """Let a full live block be found by ``key``; if another block answers to it already, this one stays private."""
        if key not in self._cached:
            self._forget(block)
            self._cached[key] = block
            self._keys[block] = key

    def lookup(self, key: bytes) -> int | None:
        """The block cached under ``key``."""
        return self._cached.get(key)

    def num_free_among(self, blocks: Sequence[int]) -> int:
        """How many of these blocks nobody holds."""
        return sum(self._references[block] == 0 for block in blocks)

    def _forget(self, block: int) -> None:
        key = self._keys[block]
        if key is not None:
            del self._cached[key]
            self._keys[block] = None

    def _link(self, block: int) -> None:
        """Into the free list: before its tail where the contents may be used again, else before its head."""
        end = self.num_blocks
        before = self._previous[end] if self._keys[block] is not None else end
        after = self._next[before]
        self._next[before] = self._previous[after] = block
        self._previous[block], self._next[block] = before, after
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        before, after = self._previous[block], self._next[block]
        self._next[before], self._previous[after] = after, before
        self.num_free -= 1
