"""AttentionBatch: where each query token of one step reads and writes its keys and values.

Legend used in every kernel: T tokens, B requests, H heads, G KV heads, D head size, N output features, K input
features, S block size, P rows of a block table.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NoReturn

from torch import Tensor

from ..platforms.graphs import UnrecordableError


@dataclass(frozen=True, slots=True, kw_only=True)
class AttentionBatch:
    """The requests of one step, flattened: request b owns query rows ``query_start_loc[b]:query_start_loc[b+1]``.

    ``query_start_loc``  int32 [B+1], device.
    ``seq_lens``         int32 [B], device: tokens in the context once this step's tokens are written.
    ``block_table``      int32 [B, P], device: the KV block of each S tokens; past the context any valid block.
    ``slot_mapping``     int64 [T], device: ``block * S + offset`` at which the token's key and value are written.
    ``query_lens_host`` and ``seq_lens_host`` are the same lengths as Python ints, so that no kernel launcher has to
    synchronize with the device. Requests come in any order and any mixture of lengths, from 1 token up.
    """

    query_start_loc: Tensor
    seq_lens: Tensor
    block_table: Tensor
    slot_mapping: Tensor
    query_lens_host: tuple[int, ...]
    seq_lens_host: tuple[int, ...]

    @property
    def num_requests(self) -> int:
        return len(self.query_lens_host)

    @property
    def max_query_len(self) -> int:
        return max(self.query_lens_host, default=0)

    @property
    def max_seq_len(self) -> int:
        return max(self.seq_lens_host, default=0)


class _UnknownLengths(tuple[int, ...]):
    """Stands for lengths that differ at each replay: who looks at them cannot be recorded."""

    def _refuse(self, *_: object) -> NoReturn:
        raise UnrecordableError("a kernel follows the lengths of the requests on the host")

    __iter__ = __getitem__ = __len__ = __eq__ = _refuse  # type: ignore[assignment]
    __hash__ = tuple.__hash__


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedBatch(AttentionBatch):
    """A step that is being recorded: of the lengths only a bound is known, ``longest``."""

    seq_lens_host: tuple[int, ...] = _UnknownLengths()
    longest: int

    @property
    def max_seq_len(self) -> int:
        return self.longest


@dataclass(frozen=True, slots=True, kw_only=True)
class RecordedPrompt(RecordedBatch):
    """The same of a step of any size: of the queries only their number is known, that of this recording."""

    query_lens_host: tuple[int, ...] = _UnknownLengths()
    num_recorded: int

    @property
    def num_requests(self) -> int:
        return self.num_recorded
