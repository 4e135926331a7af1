"""How long sequences may become before recorded steps no longer fit them."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from ..models.model import Model


def longer_reach(model: Model, seq_len: int, reach: int, max_len: int) -> int | None:
    """Tokens that a recording made now holds for, where one for ``reach`` is too short for ``seq_len``.

    Twice ``reach`` where the model goes so far, so that few are made. None where it cannot hold for ``seq_len``.
    """
    longer = min(model.reserve(min(max(seq_len, 2 * reach), max_len)), max_len)
    return longer if longer >= seq_len else None
