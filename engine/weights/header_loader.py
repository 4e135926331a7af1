"""HeaderLoader: builds a model's layers without reading a weight, to know what they will take and which kernels."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import torch
from torch import Tensor

from ...errors import CheckpointError
from ...kernels.kernel_set import KernelSet
from ...kernels.problems import ExpertLinearProblem, LinearProblem
from ...quant.at_load import AtLoadFormat
from ...quant.canonical import PackedWeight
from ...quant.footprint import StoredLinear, merge_stored
from ...quant.formats import Format
from ...quant.formats.gguf import GgufFormat
from ...quant.formats.missing import missing
from ...quant.formats.names import stored_module
from ...quant.kv_scales import KVScales, check_kv_scales, scaled_layers
from ...quant.packing import num_words
from ...quant.scheme import Dense, MicroScaled, Offset, Scheme, WeightOnly
from ..kv_cache_type import KVCacheType
from ..layers.embedding import Embedding, HeadRows
from ..layers.linear import Linear
from ..layers.moe import ExpertLinear
from .checkpoint import Checkpoint
from .expert_stack import one_scheme
from .leftovers import check_unexpected
from .linear_stack import kept_dtype
from .loader import Loader, layer_class

_FLOATS = {2: torch.float16, 4: torch.float32}
# Where formats keep a module's scales; a format that keeps them elsewhere makes float32 ones.
SCALE_PARTS = ("scales", "weight_scale", "weight_scale_inv")


class HeaderLoader(Loader):
    """The same layers, checks, counts and choices of kernels as ``Loader``'s, from headers alone.

    Its layers cannot compute, and scales of a KV cache are unknown numbers. Where values decide, the headers are
    believed: a GPTQ checkpoint whose zeros all turn out to be the middle one takes less than is counted here.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        quant_format: Format,
        kernels: KernelSet,
        dtype: torch.dtype,
        kv_cache: KVCacheType | None = None,
    ) -> None:
        super().__init__(checkpoint, quant_format, kernels, dtype, torch.device("meta"), kv_cache)
        self._quantized = set(quant_format.quantized_modules(checkpoint))

    def _read_kv_scales(self) -> dict[int, KVScales]:
        check_kv_scales(self.checkpoint)
        return {layer: KVScales() for layer in scaled_layers(self.checkpoint)}

    def linear(
        self, out_features: Mapping[str, int], in_features: int, *, bias: bool, is_sensitive: bool = False
    ) -> Linear:
        stored = []
        for module, rows in out_features.items():
            stored.append(self._stored(module, (rows, in_features)))
        biased = {module: rows for module, rows in out_features.items() if self._has_bias(module, required=bias)}
        parts, names = merge_stored(stored), list(out_features)
        classes = [layer_class(names)] if len(parts) == 1 else [layer_class([name]) for name in names]
        modules = [names] if len(parts) == 1 else [[name] for name in names]
        for layer, merged, members in zip(classes, parts, modules, strict=True):
            part = self._as_kept(merged, members, is_sensitive=is_sensitive)
            self.weight_bytes += part.nbytes
            self._record(layer, self._linear_problem(part, is_sensitive=is_sensitive), part.nbytes)
        if biased:
            # One bias stands for all parts of a merged matrix.
            num_bytes = sum((out_features if len(parts) == 1 else biased).values()) * self.dtype.itemsize
            self.weight_bytes += num_bytes
            self.memory_bytes += num_bytes
        return Linear([])

    def experts(
        self, prefix: str, out_features: Mapping[str, int], in_features: int, *, num_experts: int, top_k: int
    ) -> ExpertLinear:
        stored = [
            [
                self._expert_stored(f"{prefix}.{expert}.{name}", (rows, in_features))
                for name, rows in out_features.items()
            ]
            for expert in range(num_experts)
        ]
        merged, stacks = [merge_stored(parts) for parts in stored], [[name] for name in out_features]
        if all(len(parts) == 1 for parts in merged):
            stored, stacks = merged, [list(out_features)]
        for names, parts in zip(stacks, zip(*stored, strict=True), strict=True):
            layer = layer_class([f"{prefix}.{name}" for name in names])
            rows, columns = parts[0].shape
            problem = ExpertLinearProblem(
                scheme=one_scheme([part.scheme for part in parts], parts[0].shape, f"{prefix}.*.{'+'.join(names)}"),
                num_experts=num_experts,
                top_k=top_k,
                in_features=columns,
                out_features=rows,
                dtype=self.dtype,
            )
            num_bytes = sum(part.nbytes for part in parts)
            self.weight_bytes += num_bytes
            self._record(layer, problem, num_bytes)
        return ExpertLinear([])

    def finish(self, num_layers: int) -> list[str]:
        """CheckpointError names a tensor that no layer would ask for."""
        modules = [stored_module(self.checkpoint, name) for name in self._filled]
        parts = {part for module in modules for part in self._format.tensor_names(module)}
        taken = parts | self._filled | {f"{module}.bias" for module in modules}
        return check_unexpected(self.checkpoint, num_layers, parts, taken & self.checkpoint.names)

    def tied_head(self, module: str, embedding: Embedding) -> Linear:
        """A stored copy of the embedding is taken to be the same."""
        if isinstance(embedding.weight, HeadRows):
            return Linear([])
        rows, columns = embedding.weight.shape
        stored = [name for name in self._format.tensor_names(module) if self.checkpoint.has(name)]
        self._filled.update(stored)
        if stored and stored != [f"{module}.weight"]:
            return self.linear({module: rows}, columns, bias=False, is_sensitive=True)
        weight = embedding.weight
        if isinstance(weight, PackedWeight):
            part = StoredLinear(weight.scheme, (rows, columns), weight.scales.itemsize)
        else:
            part = StoredLinear(Dense(), (rows, columns), self.dtype.itemsize)
        self._record(module, self._linear_problem(part, is_sensitive=True), part.nbytes, shared=True)
        return Linear([])

    def _packed_embedding(self, module: str, shape: tuple[int, int]) -> PackedWeight | None:
        if not isinstance(self._format, GgufFormat) or module not in self._quantized:
            return None
        return _hollow(self._stored(module, shape))

    def _head_part(
        self, name: str, shape: tuple[int, int], packed: PackedWeight | None, problem: LinearProblem
    ) -> None:
        if packed is None:
            self._fill(name)
            self._check_plain(name, self.checkpoint.dtype(name), tuple(self.checkpoint.shape(name)), shape)

    def _as_kept(self, part: StoredLinear, modules: list[str], *, is_sensitive: bool) -> StoredLinear:
        """A plain matrix in the dtype that its kernel keeps it in."""
        if not isinstance(part.scheme, Dense):
            return part
        weights = [f"{stored_module(self.checkpoint, module)}.weight" for module in modules]
        candidate = self.kernels.select_candidate("linear", self._linear_problem(part, is_sensitive=is_sensitive))
        dtypes = {self.checkpoint.dtype(name) for name in weights}
        return replace(part, scale_bytes=kept_dtype(candidate, dtypes, self.dtype).itemsize)

    def _stored(self, module: str, shape: tuple[int, int]) -> StoredLinear:
        self._fill(module)
        name = stored_module(self.checkpoint, module)
        if name in self._quantized:
            scheme, found = self._format.stored_scheme(self.checkpoint, name)
        else:
            weight = f"{name}.weight"
            self._require(weight)
            scheme, found = Dense(), self.checkpoint.shape(weight)  # type: ignore[assignment]
        if tuple(found) != shape:
            raise CheckpointError(
                f"{module} in {self.checkpoint.path} is {list(found)}; the config asks for {list(shape)}"
            )
        scheme = _whole_group(scheme, shape[1])
        if isinstance(scheme, Dense):
            return StoredLinear(scheme, shape, self.dtype.itemsize)
        return StoredLinear(scheme, shape, self._scale_bytes(name), self._divisor_bytes(name, scheme))

    def _expert_stored(self, module: str, shape: tuple[int, int]) -> StoredLinear:
        if self._has_bias(module):
            raise self._biased_expert(module)
        return self._stored(module, shape)

    def _scale_bytes(self, module: str) -> int:
        if isinstance(self._format, AtLoadFormat):
            return self._format.scale_bytes()
        if isinstance(self._format, GgufFormat):
            return self._format.scale_bytes(self.checkpoint, module)
        names = [f"{module}.{part}" for part in SCALE_PARTS if self.checkpoint.has(f"{module}.{part}")]
        size = self.checkpoint.dtype(names[0]).itemsize if names else 4
        return size if size > 1 else 4  # exponents become float32

    def _divisor_bytes(self, module: str, scheme: object) -> int:
        names = (f"{module}.weight_global_scale", f"{module}.weight_scale_2")
        has_divisor = isinstance(scheme, MicroScaled) and any(map(self.checkpoint.has, names))
        return 4 if has_divisor else 0

    def _has_bias(self, module: str, *, required: bool = False) -> bool:
        name = f"{stored_module(self.checkpoint, module)}.bias"
        if self.checkpoint.has(name):
            # auto-gptq writes zeros for every layer that it quantizes; those are dropped.
            return required or module not in self._quantized or self._format.quantizes
        self._require_bias(module, required=required)
        return False

    def _plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._fill(name)
        self._require(name)
        self._check_plain(name, self.checkpoint.dtype(name), tuple(self.checkpoint.shape(name)), shape)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        self.weight_bytes += tensor.nbytes
        self.memory_bytes += tensor.nbytes
        return tensor

    def _require(self, name: str) -> None:
        if not self.checkpoint.has(name):
            raise CheckpointError(missing(self.checkpoint, name))


def _hollow(stored: StoredLinear) -> PackedWeight:
    """A packed weight of which there are only the sizes."""
    scheme, (rows, columns) = stored.scheme, stored.shape
    assert isinstance(scheme, WeightOnly | Offset), f"{scheme} is not packed"
    scales = torch.empty((rows, scheme.num_groups(columns)), dtype=_FLOATS[stored.scale_bytes], device="meta")
    words = torch.empty((rows, num_words(columns, scheme.bits)), dtype=torch.int32, device="meta")
    return PackedWeight(scheme, stored.shape, words, scales, None if scheme.symmetric else torch.empty_like(scales))


def _whole_group(scheme: Scheme, columns: int) -> Scheme:
    """A group that covers all of K is a scale per output feature."""
    if isinstance(scheme, WeightOnly) and scheme.group_size >= columns:
        return replace(scheme, group_size=-1)
    return scheme
