"""GPTQ's loops over columns and its search for scales in C, offered to the methods (``quant.conversions``)."""

from __future__ import annotations

import torch
from torch import Tensor

from ...platforms import cpu_threads
from ...quant.conversions import offer
from .library import functions, unavailable

# As COLUMNS in gptq.c.
_MOST_COLUMNS = 64
# Torch adds up longer groups in another order.
_LONGEST_GROUP = 1024


def offer_gptq() -> None:
    """Nothing is compiled or loaded before one of them is wanted."""
    offer("gptq_round", round_columns)
    offer("gptq_move", move_codes)
    offer("search_grids", search_grids)


def round_columns(
    weight: Tensor,
    factor: Tensor,
    block: tuple[int, int],
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    top: int,
    codes: Tensor,
) -> Tensor | None:
    """Columns [first, last) of ``weight`` [K, N] to ``codes`` [K, N], each error spread over the later ones of them.

    Returns the errors [last - first, N]. ``factor`` [K, K], ``scales`` and ``zeros`` [G, N], ``groups`` int64 [K]; all
    but ``groups`` float32.
    """
    if not _can(weight, scales, zeros, codes) or block[1] - block[0] > _MOST_COLUMNS:
        return None
    own = slice(*block)
    factors = factor[own, own].contiguous()
    errors = torch.empty_like(weight[own])
    functions.twofold_gptq_round(
        weight.data_ptr(), weight.shape[1], factors.data_ptr(), *block, scales.data_ptr(), zeros.data_ptr(),
        groups.data_ptr(), top, codes.data_ptr(), errors.data_ptr(),
    )  # fmt: skip
    return errors


def move_codes(
    values: Tensor,
    gradient: Tensor,
    moments: Tensor,
    steps: Tensor,
    block: tuple[int, int],
    scales: Tensor,
    zeros: Tensor,
    groups: Tensor,
    top: int,
    codes: Tensor,
) -> Tensor | None:
    """Codes [first, last) to their best places, each change added to the ``gradient`` of the later ones of them.

    Returns the changes of ``values`` [K, N], [last - first, N]. ``moments`` [K, K], ``steps`` [K] minus one over their
    diagonal; the others as in `round_columns`.
    """
    if not _can(values, gradient, scales, zeros, codes) or block[1] - block[0] > _MOST_COLUMNS:
        return None
    own = slice(*block)
    factors = moments[own, own].contiguous()
    changes = torch.empty_like(values[own])
    functions.twofold_gptq_move(
        values.data_ptr(), gradient.data_ptr(), values.shape[1], factors.data_ptr(), steps.data_ptr(),
        *block, scales.data_ptr(), zeros.data_ptr(), groups.data_ptr(), top, codes.data_ptr(), changes.data_ptr(),
    )  # fmt: skip
    return changes


def search_grids(weights: Tensor, fractions: list[float], top: int, fits: int, positive: bool) -> Tensor | None:
    """``grid.search_grid`` with zeros and without importance: scales and zeros [2, N, G, 1] of [N, G, group]."""
    if weights.shape[-1] > _LONGEST_GROUP or not _can(weights):
        return None
    if weights.shape[-1] % functions.twofold_panel_width():
        return None
    shares = torch.tensor([[fraction / top for fraction in fractions], fractions])
    found = torch.empty(2, *weights.shape[:-1], 1)
    functions.twofold_search_grids(
        weights.data_ptr(), weights.shape[:-1].numel(), weights.shape[-1], shares.data_ptr(), len(fractions), top, fits,
        positive, found[0].data_ptr(), found[1].data_ptr(),
    )  # fmt: skip
    return found


def _can(*tensors: Tensor) -> bool:
    """Whether C can work on them; it takes as many threads as torch where nobody has said how many."""
    usable = all(t.device.type == "cpu" and t.is_contiguous() and t.dtype is torch.float32 for t in tensors)
    if not usable or unavailable() is not None:
        return False
    if not cpu_threads.num_threads():
        cpu_threads.set_num_threads(torch.get_num_threads())
    return True
