"""DecodeInputs: what a recorded decode step reads, in tensors that stay where they are."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from .batch import Batch

_NO_SLOT = -1


class DecodeInputs:
    """``input_ids``, ``positions`` and ``slots`` int64 [R], ``seq_lens`` int32 [R], ``block_table`` int32 [R, columns].

    Written on the host; where the device is another one, copied there.
    """

    def __init__(self, num_rows: int, num_columns: int, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._copies: list[tuple[Tensor, Tensor]] = []
        self._places = np.arange(num_rows)

        def both(*shape: int, dtype: torch.dtype) -> tuple[NDArray[np.generic], Tensor]:
            host = torch.zeros(shape, dtype=dtype)
            there = host.to(device)
            if there is not host:
                self._copies.append((there, host))
            return host.numpy(), there

        self._host_ids, self.input_ids = both(num_rows, dtype=torch.int64)
        self._host_positions, self.positions = both(num_rows, dtype=torch.int64)
        self._host_slots, self.slots = both(num_rows, dtype=torch.int64)
        self._host_seq_lens, self.seq_lens = both(num_rows, dtype=torch.int32)
        self._host_table, self.block_table = both(num_rows, num_columns, dtype=torch.int32)
        self.query_start_loc = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self.clear()

    def clear(self) -> None:
        """Padding alone: a step over it changes nothing."""
        self._pad(0, len(self._places))
        self._upload(len(self._places))

    def fill(self, batch: Batch, rows: NDArray[np.int64], size: int) -> None:
        """The last token of each of the batch's ``rows``, then padding up to ``size`` rows."""
        count, block_size = len(rows), self._block_size
        last = batch.num_tokens[rows] - 1
        columns = int(last.max()) // block_size + 1
        self._host_ids[:count] = batch.token_ids[rows, last]
        self._host_positions[:count] = last
        self._host_seq_lens[:count] = last + 1
        self._host_table[:count, :columns] = batch.block_table[rows, :columns]
        blocks = self._host_table[self._places[:count], last // block_size].astype(np.int64)
        self._host_slots[:count] = blocks * block_size + last % block_size
        if count < size:
            self._pad(count, size)
        self._upload(size)

    def _upload(self, size: int) -> None:
        for there, host in self._copies:
            there[:size].copy_(host[:size], non_blocking=True)

    def _pad(self, first: int, last: int) -> None:
        """Requests of length 0."""
        self._host_ids[first:last] = self._host_positions[first:last] = self._host_seq_lens[first:last] = 0
        self._host_slots[first:last] = _NO_SLOT
