"""GPTQ checkpoints: auto-gptq, GPTQModel and everything that writes their layout.

Per linear ``P`` of N output and K input features, b bits, G groups:

    P.qweight  int32 [K * b / 32, N]  codes packed along K
    P.qzeros   int32 [G, N * b / 32]  zeros packed along N; version 1 stores zero - 1
    P.scales   float [G, N]
    P.g_idx    int32 [K]              group of each input feature; absent: k // group_size
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...log import get_logger
from ..canonical import CanonicalWeight, PackedWeight
from ..conversions import convert
from ..packing import pack, unpack
from ..scheme import Scheme, WeightOnly
from .base import Format, TensorSource, is_packed
from .dense import load_dense
from .gptq_claims import Claims
from .gptq_config import BITS, GPTQConfig, parse_gptq_config
from .groups import contiguous_groups
from .missing import missing

log = get_logger(__name__)

# Version 1 to version 2: one added to every field of a 32-bit word.
_ONE_PER_FIELD = {2: 0x55555555, 4: 0x11111111, 8: 0x01010101}


class GPTQFormat(Format):
    """Versions 1 and 2; 2, 3, 4 and 8 bits; any g_idx; per-module overrides; a quantized or a plain head."""

    name = "gptq"
    marks = ("qweight", "scales")

    def __init__(self, raw: Mapping[str, Any]) -> None:
        self.config: GPTQConfig = parse_gptq_config(raw)

    def scheme(self, module: str) -> Scheme:
        return self.config.scheme(module)

    def tensor_names(self, module: str) -> tuple[str, ...]:
        return tuple(f"{module}.{part}" for part in ("weight", "qweight", "qzeros", "scales", "g_idx"))

    def stored_scheme(self, source: TensorSource, module: str) -> tuple[Scheme, tuple[int, int]]:
        """The zeros and g_idx may still make the loaded scheme symmetric, or take its act-order away."""
        reader = _PackedReader(source, module, self.config)
        declared = self.scheme(module)
        if not isinstance(declared, WeightOnly):
            declared = WeightOnly(reader.bits, -1)
        return replace(declared, bits=reader.bits), (reader.rows, reader.columns)

    def _load(self, source: TensorSource, module: str, dtype: torch.dtype) -> CanonicalWeight:
        """What is stored decides, whatever the config says: ``qweight`` is quantized, ``weight`` is dense."""
        if is_packed(source, module, self.scheme(module)):
            return _PackedReader(source, module, self.config).read()
        return load_dense(source, module)


class _PackedReader:
    """Reads one quantized module and checks its tensors against each other."""

    def __init__(self, source: TensorSource, module: str, config: GPTQConfig) -> None:
        self.source, self.module, self.config = source, module, config
        self.num_groups, self.rows = self._matrix_shape("scales")
        self.claims = Claims(config.stated_of(module), module, source.location(f"{module}.qweight"))
        self.bits = self._stored_bits()
        self.columns = self._matrix_shape("qweight")[0] * 32 // self.bits
        self.claims.check_groups(self.num_groups, self.columns)
        index = f"{module}.g_idx"
        self.claims.check_index(source.has(index) and math.prod(source.shape(index)) > 0, self.num_groups)

    def read(self) -> PackedWeight:
        group_size, perm, group_of_run = self._groups()
        self.claims.check_order(perm)
        scales = self.source.get(f"{self.module}.scales").T
        zeros = self._read_zeros()
        self.claims.check_zeros(zeros, self.bits, zeros_minus_one=self.config.zeros_minus_one)
        if group_of_run is not None:
            scales = scales[:, group_of_run]
            zeros = None if zeros is None else zeros[:, group_of_run]
        return PackedWeight(
            scheme=WeightOnly(
                bits=self.bits,
                group_size=-1 if group_size >= self.columns else group_size,
                symmetric=zeros is None,
                act_order=perm is not None,
            ),
            shape=(self.rows, self.columns),
            qweight=self._read_codes(perm),
            scales=scales.contiguous(),
            zeros=None if zeros is None else zeros.contiguous(),
            perm=perm,
        )

    def _matrix_shape(self, part: str) -> tuple[int, int]:
        name = f"{self.module}.{part}"
        if not self.source.has(name):
            raise CheckpointError(missing(self.source, name))
        shape = self.source.shape(name)
        if len(shape) != 2:
            raise CheckpointError(f"{name} in {self.source.location(name)} is {list(shape)}; it must be a matrix")
        return shape[0], shape[1]

    def _stored_bits(self) -> int:
        """The width that the shapes prove: a head or an overridden layer may differ from the config's."""
        zero_rows, zero_words = self._matrix_shape("qzeros")
        word_rows, rows = self._matrix_shape("qweight")
        bits = zero_words * 32 // self.rows
        fits = zero_rows == self.num_groups and rows == self.rows and zero_words * 32 == bits * self.rows
        if bits not in BITS or not fits or word_rows * 32 % bits:
            raise CheckpointError(
                f"{self.module} in {self.source.location(f'{self.module}.qweight')}: qweight {[word_rows, rows]}, "
                f"qzeros {[zero_rows, zero_words]} and scales {[self.num_groups, self.rows]} fit no GPTQ layout"
            )
        self.claims.check_bits(bits, word_rows, zero_words)
        declared = self.config.scheme(self.module)
        if isinstance(declared, WeightOnly) and declared.bits != bits:
            log.warning("%s is stored with %d bits where the config says %d", self.module, bits, declared.bits)
        return bits

    def _read_codes(self, perm: Tensor | None) -> Tensor:
        """qweight along K for every output feature: the canonical stream is the stored one, transposed."""
        words = self.source.get(f"{self.module}.qweight")
        if perm is None:
            return words.T
        gathered = convert("gather_codes", words, perm, self.bits)
        if gathered is not None:
            return gathered.T
        return pack(unpack(words.T, self.bits, self.columns)[:, perm.long()], self.bits)

    def _read_zeros(self) -> Tensor | None:
        """Zeros as uint8 [N, G]; None when all are the symmetric one, whatever the config calls the checkpoint."""
        words = self.source.get(f"{self.module}.qzeros")
        if self.config.zeros_minus_one and _is_damaged(words, self.bits, self.rows):
            _warn_of_damage(self.source.location(f"{self.module}.qzeros"))
        zeros = decode_zeros(words, self.bits, self.rows, zeros_minus_one=self.config.zeros_minus_one).T
        return None if bool((zeros == 2 ** (self.bits - 1)).all()) else zeros

    def _groups(self) -> tuple[int, Tensor | None, Tensor | None]:
        """Group size, input gather (None: identity), and the stored group of each canonical one (None: the same)."""
        name = f"{self.module}.g_idx"
        if not self.source.has(name) or math.prod(self.source.shape(name)) == 0:
            return self._plain_group_size(), None, None
        index = self.source.get(name).long()
        if index.shape != (self.columns,) or int(index.min()) < 0 or int(index.max()) >= self.num_groups:
            raise CheckpointError(
                f"{name} in {self.source.location(name)} must hold {self.columns} groups in 0..{self.num_groups - 1}; "
                f"it has shape {list(index.shape)} and values {int(index.min())}..{int(index.max())}"
            )
        return contiguous_groups(index, self.num_groups)

    def _plain_group_size(self) -> int:
        if self.num_groups == 1:
            return self.columns
        declared = self.config.scheme(self.module)
        size = declared.group_size if isinstance(declared, WeightOnly) else self.config.group_size
        if size < 1 or -(-self.columns // size) != self.num_groups:
            size = self.columns // self.num_groups
        if -(-self.columns // size) != self.num_groups:
            raise CheckpointError(
                f"{self.module} in {self.source.location(f'{self.module}.scales')}: {self.num_groups} groups do not "
                f"fit {self.columns} input features at group_size {self.config.group_size}, and there is no g_idx"
            )
        return size


def _is_damaged(words: Tensor, bits: int, count: int) -> bool:
    """Whether auto-gptq wrote a zero of 0 as -1 over all higher fields of its word: what they were is lost."""
    if bits == 3:
        return False
    per_word = 32 // bits
    ones = unpack(words, bits, count).unflatten(1, (-1, per_word)) == 2**bits - 1
    # In files of other writers the field above such a one differs from it as a rule.
    return bool(ones[..., :-1].any()) and bool((ones[..., 1:] | ~ones[..., :-1]).all())


@functools.cache
def _warn_of_damage(file: str) -> None:
    log.warning(
        "%s is damaged: auto-gptq wrote zero points of 0 over their neighbours, which nothing can restore; expect "
        "wrong answers, and quantize the model again (symmetric, or with another tool)",
        file,
    )


def decode_zeros(words: Tensor, bits: int, count: int, *, zeros_minus_one: bool) -> Tensor:
    """Stored qzeros [G, count * bits / 32] to zeros as uint8 [G, count].

    Version 1 is raised by one over the whole word, with carries: GPTQModel's writer subtracts that way, so a zero of 0
    borrows from the next field and only the matching addition restores it. For all other files it is one per field.
    """
    if not zeros_minus_one:
        return unpack(words, bits, count)
    if bits == 3:
        return (unpack(words, bits, count) + 1) & 7
    raised = words.to(torch.int64) + _ONE_PER_FIELD[bits]
    wrapped = torch.where(raised >= 2**31, raised - 2**32, raised).to(torch.int32)
    return unpack(wrapped, bits, count)
