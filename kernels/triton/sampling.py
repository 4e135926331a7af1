"""Argmax, draws and edits of logits, without sorting the vocabulary; reference/sampling.py is the definition.

Weights are integers, so every sum is exact: a row's token does not depend on how the row is cut or on its neighbours.
Up to three launches, chunks of ``CHUNK`` columns:

    row_maxima    a program per row and chunk: the chunk's maximum            reads 4 V bytes a row
    chunk_masses  the same: its weights' sum, where a row needs all of them   reads 4 V
    draw_tokens   a program per row: the filters, then the draw               reads 4 CHUNK without filters

A threshold (the k-th largest logit, the nucleus's last one) is searched among the floats' bits, 8 candidates a
pass: at most 11 passes over what can still matter. Chunks whose maximum lies under the bracket are not read: for top_k
that is all but about k chunks from the first pass on. Then one pass for the total and part of one for the draw. So a
row reads at most 4 V (11 + 11 + 2) bytes, from L2; one with top_k up to the number of chunks about 4 k CHUNK a pass.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
import triton
import triton.language as tl
from numpy.typing import NDArray
from torch import Tensor

from ..sampling_options import DrawOptions, LogitEdits
from .launch_sampling import sampling_row
from .runtime import device_arch

CHUNK = 1024
EDIT_BLOCK = 256


@triton.jit
def _weights(logits: tl.tensor, maximum: tl.tensor, inverse: tl.tensor, min_p: tl.tensor) -> tl.tensor:
    # int64; 0 under min_p. Truncates, as the definition does.
    share = tl.exp((logits - maximum) * inverse)
    return tl.where(share >= min_p, (share * 1099511627776.0).to(tl.int64), 0)


@triton.jit
def _key(x: tl.tensor) -> tl.tensor:
    # int32 in the order of the floats; adding zero makes the zeros equal.
    bits = (x + 0.0).to(tl.int32, bitcast=True)
    return bits ^ ((bits >> 31) & 0x7FFFFFFF)


@triton.jit
def row_maxima_kernel(
    logits_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    num_columns: tl.tensor,
    num_chunks: tl.tensor,
    row_stride: tl.tensor,
    CHUNK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(logits_ptr + row * row_stride + columns, mask=columns < num_columns, other=float("-inf"))
    num_bad = tl.sum((x != x).to(tl.int32), axis=0)
    maximum = tl.max(tl.where(x == x, x, float("-inf")), axis=0)
    tl.store(maxima_ptr + row * num_chunks + chunk, tl.where(num_bad > 0, float("nan"), maximum))


@triton.jit
def _load_maxima(maxima_ptr: tl.tensor, row: tl.tensor, num_chunks: tl.tensor, CHUNKS: tl.constexpr) -> tl.tensor:
    chunks = tl.arange(0, CHUNKS)
    return tl.load(maxima_ptr + row * num_chunks + chunks, mask=chunks < num_chunks, other=float("-inf"))


@triton.jit
def _is_finite(maxima: tl.tensor, maximum: tl.tensor) -> tl.tensor:
    num_bad = tl.sum((maxima != maxima).to(tl.int32), axis=0)
    return (num_bad == 0) & (maximum < float("inf")) & (maximum > float("-inf"))


@triton.jit
def chunk_masses_kernel(
    logits_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    num_columns: tl.tensor,
    num_chunks: tl.tensor,
    row_stride: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    temperature = tl.load(temperature_ptr + row)
    maxima = _load_maxima(maxima_ptr, row, num_chunks, CHUNKS)
    maximum = tl.max(maxima, axis=0)
    if (temperature > 0) & _is_finite(maxima, maximum):
        columns = chunk * CHUNK + tl.arange(0, CHUNK)
        x = tl.load(logits_ptr + row * row_stride + columns, mask=columns < num_columns, other=float("-inf"))
        mass = tl.sum(_weights(x, maximum, tl.div_rn(1.0, temperature), 0.0), axis=0)
        tl.store(masses_ptr + row * num_chunks + chunk, mass)


@triton.jit
def _kth_of(keys: tl.tensor, k: tl.tensor, high: tl.tensor) -> tl.tensor:
    # The k-th largest key, k at most their number; all of them are under ``high``.
    low = high * 0 - 2147483648
    while high - low > 1:
        middle = (low + high) >> 1
        enough = tl.sum((keys >= middle).to(tl.int32), axis=0) >= k
        low = tl.where(enough, middle, low)
        high = tl.where(enough, high, middle)
    return low


@triton.jit
def _search(
    x_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    num_columns: tl.tensor,
    num_chunks: tl.tensor,
    maximum: tl.tensor,
    inverse: tl.tensor,
    low: tl.tensor,
    high: tl.tensor,
    needed: tl.tensor,
    COUNT: tl.constexpr,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    # The largest key from which up the columns' number (COUNT) or weights reach ``needed``; from ``low`` up they do,
    # from ``high`` up they do not. A smaller one that keeps the same columns will do.
    ways = tl.arange(0, 8).to(tl.int64)
    while high - low > 1:
        marks = tl.minimum(low + ways * ((high - low + 7) >> 3), high)
        bounds = marks.to(tl.int32)[None, :]
        sums = tl.zeros([8], dtype=tl.int64)
        for chunk in range(num_chunks):
            if _key(tl.load(maxima_ptr + chunk)) >= low:
                columns = chunk * CHUNK + tl.arange(0, CHUNK)
                x = tl.load(x_ptr + columns, mask=columns < num_columns, other=float("-inf"))
                reached = _key(x)[:, None] >= bounds
                if COUNT:
                    real = (columns < num_columns)[:, None]
                    sums += tl.sum((reached & real).to(tl.int32), axis=0).to(tl.int64)
                else:
                    sums += tl.sum(tl.where(reached, _weights(x, maximum, inverse, 0.0)[:, None], 0), axis=0)
        enough = sums >= needed
        low = tl.max(tl.where(enough, marks, low), axis=0)
        high = tl.min(tl.where(enough, high, marks), axis=0)
        if COUNT:
            num_exact = tl.sum((sums == needed).to(tl.int32), axis=0)
            high = tl.where(num_exact > 0, low + 1, high)
    return low


@triton.jit
def _mass_from(
    x_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    num_columns: tl.tensor,
    num_chunks: tl.tensor,
    maximum: tl.tensor,
    inverse: tl.tensor,
    cut: tl.tensor,
    min_p: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    total = tl.zeros([], dtype=tl.int64)
    for chunk in range(num_chunks):
        if _key(tl.load(maxima_ptr + chunk)) >= cut:
            columns = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(x_ptr + columns, mask=columns < num_columns, other=float("-inf"))
            total += tl.sum(tl.where(_key(x) >= cut, _weights(x, maximum, inverse, min_p), 0), axis=0)
    return total


@triton.jit
def _target(uniform: tl.tensor, total: tl.tensor) -> tl.tensor:
    return tl.minimum((uniform * total.to(tl.float64)).to(tl.int64), total - 1)


@triton.jit
def _needed(top_p: tl.tensor, total: tl.tensor) -> tl.tensor:
    # ceil(top_p total), at least 1 and at most total.
    exact = top_p.to(tl.float64) * total.to(tl.float64)
    whole = exact.to(tl.int64)
    whole += (whole.to(tl.float64) < exact).to(tl.int64)
    return tl.minimum(tl.maximum(whole, 1), total)


@triton.jit
def _nucleus_low(
    maximum: tl.tensor, temperature: tl.tensor, total: tl.tensor, needed: tl.tensor, num_columns: tl.tensor
) -> tl.tensor:
    # Columns lighter than (total - needed) / V do not outweigh what the nucleus leaves, so it ends above them. The
    # margins are for the rounding of the exponential and of this logit.
    lightest = (total - needed).to(tl.float32) / num_columns
    depth = (tl.log(tl.maximum(lightest, 1.0) * 9.094947017729282e-13) - 0.01) * temperature
    logit = maximum + depth
    logit -= (tl.abs(maximum) + tl.abs(depth)) * 1e-6
    return tl.where(lightest >= 1.0, _key(logit).to(tl.int64), -2147483648)


@triton.jit
def _place_in(weights: tl.tensor, target: tl.tensor, CHUNK: tl.constexpr) -> tl.tensor:
    return tl.min(tl.where(tl.cumsum(weights, axis=0) > target, tl.arange(0, CHUNK), CHUNK - 1), axis=0)


@triton.jit
def _draw_all(
    x_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    num_columns: tl.tensor,
    num_chunks: tl.tensor,
    maximum: tl.tensor,
    inverse: tl.tensor,
    uniform: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    chunks = tl.arange(0, CHUNKS)
    masses = tl.load(masses_ptr + chunks, mask=chunks < num_chunks, other=0)
    target = _target(uniform, tl.sum(masses, axis=0))
    chunk = tl.sum((tl.cumsum(masses, axis=0) <= target).to(tl.int32), axis=0)
    target -= tl.sum(tl.where(chunks < chunk, masses, 0), axis=0)
    columns = chunk * CHUNK + tl.arange(0, CHUNK)
    x = tl.load(x_ptr + columns, mask=columns < num_columns, other=float("-inf"))
    return chunk * CHUNK + _place_in(_weights(x, maximum, inverse, 0.0), target, CHUNK)


@triton.jit
def _draw_kept(
    x_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    num_columns: tl.tensor,
    num_chunks: tl.tensor,
    maximum: tl.tensor,
    inverse: tl.tensor,
    cut: tl.tensor,
    min_p: tl.tensor,
    uniform: tl.tensor,
    CHUNK: tl.constexpr,
) -> tl.tensor:
    total = _mass_from(x_ptr, maxima_ptr, num_columns, num_chunks, maximum, inverse, cut, min_p, CHUNK)
    target = _target(uniform, total)
    token = tl.full([], -1, dtype=tl.int32)
    chunk = tl.zeros([], dtype=tl.int32)
    while (token < 0) & (chunk < num_chunks):
        if _key(tl.load(maxima_ptr + chunk)) >= cut:
            columns = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(x_ptr + columns, mask=columns < num_columns, other=float("-inf"))
            weights = tl.where(_key(x) >= cut, _weights(x, maximum, inverse, min_p), 0)
            mass = tl.sum(weights, axis=0)
            if target < mass:
                token = chunk * CHUNK + _place_in(weights, target, CHUNK)
            target -= mass
        chunk += 1
    return token


@triton.jit
def _cut(
    x_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    maxima: tl.tensor,
    num_columns: tl.tensor,
    num_chunks: tl.tensor,
    maximum: tl.tensor,
    temperature: tl.tensor,
    inverse: tl.tensor,
    top_k: tl.tensor,
    top_p: tl.tensor,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> tl.tensor:
    # The smallest key that top_k and top_p leave.
    row = (x_ptr, maxima_ptr, num_columns, num_chunks, maximum, inverse)
    high = _key(maximum).to(tl.int64) + 1
    cut = high * 0 - 2147483648
    if top_k > 0:
        low = cut
        if top_k <= num_chunks:
            low = _kth_of(_key(maxima), top_k, high)
        cut = _search(*row, low, high, top_k, True, CHUNK)
    if top_p < 1.0:
        low = cut
        needed = high
        if top_k > 0:
            needed = _needed(top_p, _mass_from(*row, cut, 0.0, CHUNK))
        else:
            chunks = tl.arange(0, CHUNKS)
            total = tl.sum(tl.load(masses_ptr + chunks, mask=chunks < num_chunks, other=0), axis=0)
            needed = _needed(top_p, total)
            low = _nucleus_low(maximum, temperature, total, needed, num_columns)
        cut = _search(*row, low, high, needed, False, CHUNK)
    return cut


@triton.jit
def draw_tokens_kernel(
    logits_ptr: tl.tensor,
    maxima_ptr: tl.tensor,
    masses_ptr: tl.tensor,
    uniform_ptr: tl.tensor,
    temperature_ptr: tl.tensor,
    top_p_ptr: tl.tensor,
    min_p_ptr: tl.tensor,
    top_k_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    num_columns: tl.tensor,
    num_chunks: tl.tensor,
    row_stride: tl.tensor,
    RANDOM: tl.constexpr,
    FILTERED: tl.constexpr,
    CHUNK: tl.constexpr,
    CHUNKS: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    x_ptr = logits_ptr + row * row_stride
    maxima = _load_maxima(maxima_ptr, row, num_chunks, CHUNKS)
    row_maxima_ptr = maxima_ptr + row * num_chunks
    row_masses_ptr = masses_ptr + row * num_chunks
    maximum = tl.max(maxima, axis=0)
    token = tl.full([], -1, dtype=tl.int32)
    if _is_finite(maxima, maximum):
        temperature = 0.0
        if RANDOM:
            temperature = tl.load(temperature_ptr + row)
        if temperature == 0.0:
            chunk = tl.min(tl.where(maxima == maximum, tl.arange(0, CHUNKS), CHUNKS - 1), axis=0)
            columns = chunk * CHUNK + tl.arange(0, CHUNK)
            x = tl.load(x_ptr + columns, mask=columns < num_columns, other=float("-inf"))
            token = tl.min(tl.where(x == maximum, columns, num_columns - 1), axis=0)
        elif RANDOM:
            inverse = tl.div_rn(1.0, temperature)
            uniform = tl.load(uniform_ptr + row)
            top_k, top_p, min_p = 0, 1.0, 0.0
            if FILTERED:
                top_k = tl.load(top_k_ptr + row)
                top_p = tl.load(top_p_ptr + row)
                min_p = tl.load(min_p_ptr + row)
            if (top_k == 0) & (top_p >= 1.0) & (min_p == 0.0):
                token = _draw_all(
                    x_ptr, row_masses_ptr, num_columns, num_chunks, maximum, inverse, uniform, CHUNK, CHUNKS
                )
            elif FILTERED:
                cut = _cut(
                    x_ptr,
                    row_maxima_ptr,
                    row_masses_ptr,
                    maxima,
                    num_columns,
                    num_chunks,
                    maximum,
                    temperature,
                    inverse,
                    top_k,
                    top_p,
                    CHUNK,
                    CHUNKS,
                )
                token = _draw_kept(
                    x_ptr, row_maxima_ptr, num_columns, num_chunks, maximum, inverse, cut, min_p, uniform, CHUNK
                )
    tl.store(tokens_ptr + row, token.to(tl.int64))


@triton.jit
def edit_logits_kernel(
    logits_ptr: tl.tensor,
    rows_ptr: tl.tensor,
    tokens_ptr: tl.tensor,
    counts_ptr: tl.tensor,
    bias_ptr: tl.tensor,
    repetition_ptr: tl.tensor,
    presence_ptr: tl.tensor,
    frequency_ptr: tl.tensor,
    num_edits: tl.tensor,
    row_stride: tl.tensor,
    BLOCK: tl.constexpr,
) -> None:
    # Every (row, token) occurs once, so no two lanes touch the same logit.
    edits = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = edits < num_edits
    rows = tl.load(rows_ptr + edits, mask=mask, other=0)
    counts = tl.load(counts_ptr + edits, mask=mask, other=-1)
    places = logits_ptr + rows.to(tl.int64) * row_stride + tl.load(tokens_ptr + edits, mask=mask, other=0)
    value = tl.load(places, mask=mask, other=0.0) + tl.load(bias_ptr + edits, mask=mask, other=0.0)
    repetition = tl.load(repetition_ptr + rows, mask=mask & (counts >= 0), other=1.0)
    value = tl.where(value > 0, value / repetition, value * repetition)
    is_drawn = mask & (counts > 0)
    value -= tl.load(presence_ptr + rows, mask=is_drawn, other=0.0)
    value -= tl.load(frequency_ptr + rows, mask=is_drawn, other=0.0) * tl.maximum(counts, 0).to(tl.float32)
    tl.store(places, value, mask=mask)


def constants(num_columns: int) -> dict[str, Any]:
    """The compile-time arguments for V columns."""
    return {"CHUNK": CHUNK, "CHUNKS": triton.next_power_of_2(triton.cdiv(num_columns, CHUNK))}


def argmax(logits: Tensor) -> Tensor:
    """``reference.argmax`` of logits [R, V] float32."""
    return _draw(logits, None)


def draw_tokens(logits: Tensor, options: DrawOptions) -> Tensor:
    """``reference.draw_tokens`` of logits [R, V] float32; the options go to the device in one copy."""
    return _draw(logits, options)


def _draw(logits: Tensor, options: DrawOptions | None) -> Tensor:
    num_rows, num_columns = logits.shape
    tokens = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    if num_rows == 0:
        return tokens
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    values, launch = constants(num_columns), sampling_row(device_arch(logits.device))
    num_chunks = triton.cdiv(num_columns, CHUNK)
    maxima = torch.empty((num_rows, num_chunks), device=logits.device)
    sizes = (num_columns, num_chunks, logits.stride(0))
    chunk_grid = (num_rows, num_chunks)
    row_maxima_kernel[chunk_grid](logits, maxima, *sizes, CHUNK=CHUNK, num_warps=launch.chunk_warps)
    masses: Tensor = maxima
    arrays: tuple[Tensor, ...] = (maxima,) * 5
    if options is not None:
        masses = torch.empty((num_rows, num_chunks), dtype=torch.int64, device=logits.device)
        arrays = _upload(options, num_columns, logits.device)
        if _needs_masses(options, num_columns):
            chunk_masses_kernel[chunk_grid](
                logits, maxima, masses, arrays[1], *sizes, **values, num_warps=launch.chunk_warps
            )
    draw_tokens_kernel[(num_rows,)](
        logits,
        maxima,
        masses,
        *arrays,
        tokens,
        *sizes,
        RANDOM=options is not None,
        FILTERED=options is not None and options.has_filters(num_columns),
        **values,
        num_warps=launch.row_warps,
    )
    return tokens


def _needs_masses(options: DrawOptions, num_columns: int) -> bool:
    """Whether a row's sum over the whole vocabulary is asked for."""
    sums = (options.top_p < 1.0) | (options.min_p == 0.0)
    return bool(((options.temperature > 0) & (options.limits(num_columns) == 0) & sums).any())


def edit_logits(logits: Tensor, edits: LogitEdits) -> None:
    """``reference.edit_logits``, in place: moves 32 bytes an edit, 16 of them from the host."""
    assert logits.stride(1) == 1, "edits need rows whose columns lie side by side"
    num_edits = len(edits.rows)
    if num_edits == 0:
        return
    arrays = _pack(
        edits.rows.astype(np.int32),
        edits.tokens.astype(np.int32),
        edits.counts,
        edits.bias,
        edits.repetition_penalty,
        edits.presence_penalty,
        edits.frequency_penalty,
        device=logits.device,
    )
    grid = (triton.cdiv(num_edits, EDIT_BLOCK),)
    edit_logits_kernel[grid](logits, *arrays, num_edits, logits.stride(0), BLOCK=EDIT_BLOCK, num_warps=4)


def _upload(options: DrawOptions, num_columns: int, device: torch.device) -> tuple[Tensor, ...]:
    """uniform, temperature, top_p, min_p, top_k (int32, 0 where it limits nothing) on the device."""
    return _pack(
        options.uniform,
        options.temperature,
        options.top_p,
        options.min_p,
        options.limits(num_columns).astype(np.int32),
        device=device,
    )


def _pack(*arrays: NDArray[Any], device: torch.device) -> tuple[Tensor, ...]:
    """The arrays on the device after one copy; each starts at a multiple of 16 bytes."""
    starts = np.cumsum([0, *(-(-array.nbytes // 16) * 16 for array in arrays)]).tolist()
    buffer = np.zeros(starts[-1], dtype=np.uint8)
    for start, array in zip(starts, arrays, strict=False):
        buffer[start : start + array.nbytes] = np.ascontiguousarray(array).view(np.uint8)
    uploaded = torch.from_numpy(buffer).to(device, non_blocking=True)
    kinds = {"float64": torch.float64, "float32": torch.float32, "int32": torch.int32}
    return tuple(
        uploaded[start : start + array.nbytes].view(kinds[str(array.dtype)])
        for start, array in zip(starts, arrays, strict=False)
    )
