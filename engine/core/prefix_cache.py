"""Block keys and the prefix cache: full blocks of one request serve the next one that starts with the same tokens.

A key is a SHA-256 over the parent block's key and the block's tokens. The first parent is a root made of labelled
extras (adapter, cache salt), so two requests share blocks only where both extras and all tokens up to there are equal,
and one extra can never pass for another.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence

from .block_pool import BlockPool
from .request import Sample


def root_key(adapter: str | None, cache_salt: str | None) -> bytes:
    """The parent of every first block; an extra that is absent differs from an empty one."""
    digest = hashlib.sha256(b"twofold prefix 1")
    for label, value in (("adapter", adapter), ("salt", cache_salt)):
        if value is not None:
            data = value.encode("utf-8", "surrogatepass")
            digest.update(f"|{label}:{len(data)}:".encode() + data)
    return digest.digest()


def block_key(parent: bytes, tokens: Sequence[int]) -> bytes:
    """The 256-bit key of a full block."""
    return hashlib.sha256(parent + array("q", tokens).tobytes()).digest()


class PrefixCache:
    """Finds and registers the full blocks of samples in a pool; switched off, it finds and registers nothing."""

    def __init__(self, pool: BlockPool, block_size: int, *, enabled: bool = True) -> None:
        self.enabled = enabled
        self._pool = pool
        self._block_size = block_size

    def match(self, sample: Sample) -> list[int]:
        """The longest run of cached blocks that starts the sample's tokens; the pool is not changed.

        At least the last token stays out, since it must be computed for the next one to be drawn.
        """
        if not self.enabled:
            return []
        found: list[int] = []
        for key in self._keys(sample, (sample.num_tokens - 1) // self._block_size):
            block = self._pool.lookup(key)
            if block is None:
                break
            found.append(block)
        return found

    def register(self, sample: Sample) -> None:
        """Make the sample's newly filled blocks findable; call once their keys and values are written."""
        num_full = sample.num_computed_tokens // self._block_size
        first = sample.num_registered_blocks
        if not self.enabled or num_full <= first:
            return
        keys = self._keys(sample, num_full)
        for index in range(first, num_full):
            self._pool.register(sample.blocks[index], keys[index])
        sample.num_registered_blocks = num_full

    def _keys(self, sample: Sample, count: int) -> list[bytes]:
        """The keys of the sample's first ``count`` blocks; each is computed once in its life."""
        keys = sample.block_keys
        if not keys:
            keys.append(root_key(sample.request.adapter, sample.request.cache_salt))
        size = self._block_size
        for index in range(len(keys) - 1, count):
            keys.append(block_key(keys[index], sample.tokens[index * size : (index + 1) * size]))
        return keys[1 : count + 1]
