"""What a GPTQ config says of a module against what its tensors show.

A config from another model, or one edited by hand, would give wrong numbers in silence: files are read by their tensors
only where the config says nothing else. Every error names the tensor, both values and the remedy.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from ...errors import CheckpointError
from ...log import get_logger

log = get_logger(__name__)

_REMEDY = "take the config.json that was saved with these weights, or correct it"


@dataclass(frozen=True, slots=True)
class Claims:
    """``stated`` by the config of one ``module``, whose tensors lie in ``file``; empty: nothing is checked."""

    stated: Mapping[str, Any]
    module: str
    file: str

    def check_bits(self, bits: int, word_rows: int, columns_of_zeros: int) -> None:
        """The width that the shapes of qweight and qzeros prove."""
        said = self.stated.get("bits")
        if said is not None and said != bits:
            raise CheckpointError(
                f"{self.module}.qweight in {self.file} has {word_rows} rows and qzeros {columns_of_zeros} columns, "
                f"which is {bits} bits; the config says bits: {said}. If only some modules differ, give them a rule in "
                f"dynamic; else {_REMEDY}"
            )

    def check_groups(self, num_groups: int, columns: int) -> None:
        """The rows of scales, one for each group of the ``columns`` input features."""
        said = self.stated.get("group_size")
        if said is None:
            return
        expected = 1 if said == -1 else -(-columns // said)
        if num_groups != expected:
            raise CheckpointError(
                f"{self.module}.scales in {self.file} has {num_groups} rows, which is group_size "
                f"{_size_of(num_groups, columns)}; the config says group_size: {said}, {expected} rows for {columns} "
                f"input features. If only some modules differ, give them a rule in dynamic; else {_REMEDY}"
            )

    def check_zeros(self, zeros: Tensor | None, bits: int, *, zeros_minus_one: bool) -> None:
        """Zeros [N, G] of a symmetric checkpoint are the middle code (None)."""
        if zeros is None or self.stated.get("sym") is not True:
            return
        middle, found = 2 ** (bits - 1), sorted({int(zero) for zero in zeros.unique()})
        other, shifted = ("gptq_v2", middle + 1) if zeros_minus_one else ("gptq", middle - 1)
        if found == [shifted]:
            remedy = f"read as {other} they would all be {middle}: set checkpoint_format to {other!r}"
        else:
            remedy = f"set sym to false if the model was quantized with zero points; else {_REMEDY}"
        shown = ", ".join(map(str, found[:4])) + (" ..." if len(found) > 4 else "")
        raise CheckpointError(
            f"{self.module}.qzeros in {self.file} holds zeros of {shown}; the config says sym: true, which is {middle} "
            f"everywhere; {remedy}"
        )

    def check_index(self, is_stored: bool, num_groups: int) -> None:
        """With act-order only g_idx tells which group a feature belongs to."""
        if self.stated.get("desc_act") is True and num_groups > 1 and not is_stored:
            raise CheckpointError(
                f"{self.module}.g_idx is missing from {self.file}; the config says desc_act: true, so that nothing "
                f"else tells the group of a feature. Fetch the file again, or set desc_act to false if the model was "
                f"quantized in the order of its features"
            )

    def check_order(self, perm: Tensor | None) -> None:
        """Features out of their groups' order without act-order: g_idx defines the groups, so that is no error."""
        if perm is not None and self.stated.get("desc_act") is False:
            _warn_of_order(f"{self.module}.g_idx", self.file)


def _size_of(num_groups: int, columns: int) -> str:
    if columns % num_groups:
        return f"of some {columns / num_groups:.0f}"
    return f"{columns // num_groups}{' or -1' if num_groups == 1 else ''}"


def _warn_of_order(name: str, file: str) -> None:
    if file in _warned:
        return
    _warned.add(file)
    log.warning(
        "%s in %s is not in order, though the config says desc_act: false; weights are read by g_idx, which defines "
        "their groups. Set desc_act to true: other engines may need it",
        name,
        file,
    )


# Files that a warning was given of.
_warned: set[str] = set()
