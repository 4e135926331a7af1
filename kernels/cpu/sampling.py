"""Argmax, draws and edits of logits in C, float32; a row per thread."""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ..sampling_options import DrawOptions, LogitEdits
from .library import functions


def argmax(logits: Tensor) -> Tensor:
    """``reference.argmax``: reads each row once."""
    logits, tokens = _rows(logits), torch.empty(len(logits), dtype=torch.int64)
    functions.twofold_draw_tokens(
        logits.data_ptr(),
        len(logits),
        logits.stride(0),
        logits.shape[1],
        None,
        None,
        None,
        None,
        None,
        tokens.data_ptr(),
    )
    return tokens


def draw_tokens(logits: Tensor, options: DrawOptions) -> Tensor:
    """``reference.draw_tokens``: reads each row once or twice (4 V bytes each), and a few sections again."""
    logits, tokens = _rows(logits), torch.empty(len(logits), dtype=torch.int64)
    arrays = (
        _array(options.temperature, np.float32),
        _array(options.top_k, np.int64),
        _array(options.top_p, np.float32),
        _array(options.min_p, np.float32),
        _array(options.uniform, np.float64),
    )
    functions.twofold_draw_tokens(
        logits.data_ptr(),
        len(logits),
        logits.stride(0),
        logits.shape[1],
        *(array.ctypes.data for array in arrays),
        tokens.data_ptr(),
    )
    return tokens


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    """``reference.edit_logits``, in place."""
    assert logits.stride(1) == 1, "edits need rows whose columns lie side by side"
    arrays = (
        _array(edits.rows, np.int64),
        _array(edits.tokens, np.int64),
        _array(edits.counts, np.int32),
        _array(edits.bias, np.float32),
        _array(edits.repetition_penalty, np.float32),
        _array(edits.presence_penalty, np.float32),
        _array(edits.frequency_penalty, np.float32),
    )
    functions.twofold_edit_logits(
        logits.data_ptr(), logits.stride(0), len(edits.rows), *(array.ctypes.data for array in arrays)
    )


def _rows(logits: Tensor) -> Tensor:
    return logits if logits.stride(1) == 1 else logits.contiguous()


def _array(values: NDArray[np.generic], dtype: type) -> NDArray[np.generic]:
    return np.ascontiguousarray(values, dtype=dtype)
