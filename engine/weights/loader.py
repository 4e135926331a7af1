"""Loader: gives a model its layers, filled from a checkpoint.

A model file asks for the layers it needs (pull), so that every parameter is filled exactly once or the load fails; what
the checkpoint has beyond that is reported.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ...errors import CheckpointError, UnsupportedError
from ...kernels.kernel_set import KernelSet
from ...kernels.problems import ExpertLinearProblem, LinearProblem
from ...log import get_logger
from ...platforms.heap import give_back_pages
from ...quant.canonical import CanonicalWeight, DenseWeight, PackedWeight
from ...quant.footprint import StoredLinear
from ...quant.formats import Format
from ...quant.formats.dtypes import is_plain
from ...quant.formats.names import stored_module
from ...quant.kv_scales import KVScales, read_kv_scales
from ...quant.scheme import Dense
from ..kv_cache_type import KVCacheType
from ..layers.embedding import Embedding, HeadRows
from ..layers.linear import Linear, LinearPart, linear_part, prepare_part
from ..layers.moe import ExpertLinear, ExpertPart, prepare_experts
from ..layers.norm import RMSNorm
from .checkpoint import Checkpoint
from .expert_stack import CannotMergeError, Load, SchemesDifferError, StreamedExperts, one_scheme
from .leftovers import refuse_unexpected
from .linear_stack import LinearStack, kept_dtype, to_device

logger = get_logger(__name__)


class Loader:
    """Builds layers on ``device`` in ``dtype``, with the kernels that suit each weight's scheme.

    ``kv_cache`` (None: as activations) is what keys and values are stored as, and ``kv_scales`` are the checkpoint's
    scales for it, by layer; none where they were made for another type. ``weight_bytes`` counts each parameter
    once, as stored in the canonical layout; ``memory_bytes`` what kernels keep of them, expanded or copied.
    """

    def __init__(
        self,
        checkpoint: Checkpoint,
        quant_format: Format,
        kernels: KernelSet,
        dtype: torch.dtype,
        device: torch.device,
        kv_cache: KVCacheType | None = None,
    ) -> None:
        self.checkpoint = checkpoint
        self.kernels = kernels
        self.dtype = dtype
        self.device = device
        self.weight_bytes = 0
        self.memory_bytes = 0
        self.kv_cache = kv_cache or KVCacheType(dtype)
        self.kv_scales = self._read_kv_scales() if self.kv_cache.calibrated else {}
        self._format = quant_format
        self._filled: set[str] = set()

    def _read_kv_scales(self) -> dict[int, KVScales]:
        return read_kv_scales(self.checkpoint)

    def linear(
        self, out_features: Mapping[str, int], in_features: int, *, bias: bool, is_sensitive: bool = False
    ) -> Linear:
        """One layer of the named modules stacked along N; ``out_features`` gives N of each.

        ``bias`` says that the model has biases. A stored bias is used in any case, an absent one of a quantized module
        is zero; CheckpointError names one that only this layer lacks. ``is_sensitive``: as in ``LinearProblem``.
        """
        for module in out_features:
            self._fill(module)
        linear = self._stacked(out_features, in_features, bias=bias, is_sensitive=is_sensitive)
        if linear is not None:
            return Linear([linear])
        alone = ({name: rows} for name, rows in out_features.items())
        parts = [self._stacked(module, in_features, bias=bias, is_sensitive=is_sensitive) for module in alone]
        return Linear([part for part in parts if part is not None])

    def experts(
        self, prefix: str, out_features: Mapping[str, int], in_features: int, *, num_experts: int, top_k: int
    ) -> ExpertLinear:
        """A layer of every expert ``<prefix>.<e>``: the named modules of each stacked along N, as in ``linear``.

        UnsupportedError where the experts have biases, or schemes that no kernel takes together.
        """

        def load(name: str, expert: int) -> CanonicalWeight:
            return self._expert(f"{prefix}.{expert}.{name}", (out_features[name], in_features))

        names = list(out_features)
        try:
            return ExpertLinear([self._expert_part(load, names, num_experts, top_k, prefix)])
        except CannotMergeError:
            return ExpertLinear([self._expert_part(load, [name], num_experts, top_k, prefix) for name in names])

    def norm(self, module: str, size: int, eps: float, offset: float = 0.0) -> RMSNorm:
        """An RMS norm over ``size`` features; ``offset`` is added to its weights."""
        return RMSNorm(self._plain(f"{module}.weight", (size,)), eps, self.kernels, offset)

    def tensor(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """A parameter that is no layer of its own, in the model's dtype."""
        return self._plain(name, shape)

    def embedding(
        self, module: str, vocab_size: int, size: int, scale: float = 1.0, *, tied_head: str | None = None
    ) -> Embedding:
        """The token embedding [V,K], whose rows are multiplied by ``scale``; it may stay packed.

        ``tied_head``: the head that the model ties to it. Where that head's kernel gives the matrix's rows back bit for
        bit, and the checkpoint has no head of its own, it is prepared now and the embedding has no other matrix.
        """
        shape, name = (vocab_size, size), f"{module}.weight"
        packed = self._packed_embedding(module, shape)
        problem, stored = self._tied_problem(name, shape, packed)
        look_up = None if tied_head is None else self._look_up(tied_head, problem, stored)
        if tied_head is not None and look_up is not None:
            part = self._head_part(name, shape, packed, problem)
            num_bytes = self._tied_bytes(shape, packed, problem, stored)
            self.weight_bytes += num_bytes
            self._record(tied_head, problem, num_bytes)
            if packed is not None:
                del packed
                give_back_pages()  # it was read whole: else it stays in the heap, below what is in use
            return Embedding(HeadRows(shape, part, look_up), scale, self.dtype)
        if packed is None:
            return Embedding(self._mapped(name, shape), scale)
        self.weight_bytes += packed.nbytes
        self.memory_bytes += packed.nbytes
        return Embedding(packed, scale, self.dtype, self.kernels)

    def tied_head(self, module: str, embedding: Embedding) -> Linear:
        """The head of a model that ties it to the embedding; a stored head that says something else wins.

        Quantizers often leave an identical copy; transformers, too, unties the two when they differ.
        """
        if isinstance(embedding.weight, HeadRows):
            return Linear([] if embedding.weight.part is None else [embedding.weight.part])
        if self._stored_head_differs(module, embedding):
            logger.warning(
                "the config ties %s to the embedding, but the checkpoint has another one: that is used", module
            )
            vocab_size, size = embedding.weight.shape
            return self.linear({module: vocab_size}, size, bias=False, is_sensitive=True)
        weight = embedding.weight
        stored = weight if isinstance(weight, PackedWeight) else DenseWeight(weight)
        return Linear([self._prepare_tied(module, stored)])

    def _tied_problem(
        self, name: str, shape: tuple[int, int], packed: PackedWeight | None
    ) -> tuple[LinearProblem, torch.dtype | None]:
        """The product with an embedding as the head, and the type of a dense one in the checkpoint; None: not there."""
        has = packed is None and self.checkpoint.has(name)
        scheme = Dense() if packed is None else packed.scheme
        problem = LinearProblem(
            scheme=scheme, in_features=shape[1], out_features=shape[0], dtype=self.dtype, is_sensitive=True
        )
        return problem, self.checkpoint.dtype(name) if has else None

    def _look_up(
        self, head: str, problem: LinearProblem, stored: torch.dtype | None
    ) -> Callable[[Tensor, Any], Tensor] | None:
        """What gives rows of a tied head, None where its kernel cannot or the checkpoint has a head as well."""
        candidate = self.kernels.select_candidate("linear", problem)
        missing = stored is None and isinstance(problem.scheme, Dense)
        if candidate.look_up is None or missing or any(map(self.checkpoint.has, self._format.tensor_names(head))):
            return None
        look_up: Callable[[Tensor, Any], Tensor] | None = candidate.look_up(problem, stored)
        return look_up

    def _tied_bytes(
        self, shape: tuple[int, int], packed: PackedWeight | None, problem: LinearProblem, stored: torch.dtype | None
    ) -> int:
        """Of an embedding that is the head, as stored."""
        if packed is not None:
            return packed.nbytes
        assert stored is not None, "what is looked up is in the checkpoint"
        kept = kept_dtype(self.kernels.select_candidate("linear", problem), {stored}, self.dtype)
        return shape[0] * shape[1] * kept.itemsize

    def _head_part(
        self, name: str, shape: tuple[int, int], packed: PackedWeight | None, problem: LinearProblem
    ) -> LinearPart | None:
        """The embedding in the layout of its head's kernel, a plain one read a few rows at a time."""
        candidate = self.kernels.select_candidate("linear", problem)
        assert candidate.assemble is not None, f"linear candidate {candidate.name} gives rows of assembled weights"
        assembly = candidate.assemble(problem)
        if packed is not None:
            assembly.put(0, packed)
            return linear_part(candidate, assembly.finish(), None)
        self._fill(name)
        self._check_plain(name, self.checkpoint.dtype(name), self.checkpoint.shape(name), shape)
        for first, rows in self.checkpoint.rows(name):
            assembly.put(first, DenseWeight(rows))
        return linear_part(candidate, assembly.finish(), None)

    def finish(self, num_layers: int) -> list[str]:
        """CheckpointError names a tensor that no layer asked for; returned are those that are known to be harmless."""
        modules = (stored_module(self.checkpoint, name) for name in self._filled)
        return refuse_unexpected(
            self.checkpoint, num_layers, {part for module in modules for part in self._format.tensor_names(module)}
        )

    def _stored_head_differs(self, module: str, embedding: Embedding) -> bool:
        stored = [name for name in self._format.tensor_names(module) if self.checkpoint.has(name)]
        if not stored:
            return False
        if stored != [f"{module}.weight"]:
            return True
        weight = embedding.weight
        if not isinstance(weight, Tensor) or self.checkpoint.shape(stored[0]) != tuple(weight.shape):
            return True
        for first, rows in self.checkpoint.rows(stored[0]):
            ours = weight[first : first + rows.shape[0]]
            if not torch.equal(rows.to(device=self.device, dtype=self.dtype), ours):
                return True
        return False

    def _weight(self, module: str, shape: tuple[int, int]) -> CanonicalWeight:
        self._fill(module)
        weight = self._format.load(self.checkpoint, module, self.dtype)
        self._check_shape(module, weight.shape, shape)
        return weight

    def _bias(self, module: str, rows: int, *, required: bool) -> Tensor | None:
        name = f"{module}.bias"
        self._require_bias(module, required=required)
        bias = self._format.load_bias(self.checkpoint, module, self.dtype)
        if bias is not None and bias.shape != (rows,):
            raise CheckpointError(f"{name} in {self.checkpoint.path} is {list(bias.shape)}; {module} has {rows} rows")
        return None if bias is None else bias.to(self.device)

    def _require_bias(self, module: str, *, required: bool) -> None:
        """CheckpointError where a bias is missing: a plain module's, or one that the same module of other layers has.

        Quantizers leave out biases of zero, but then those of all layers.
        """
        name = f"{stored_module(self.checkpoint, module)}.bias"
        if not required or self.checkpoint.has(name):
            return
        alike = re.compile(re.sub(r"layers\\\.\d+", r"layers\\.\\d+", re.escape(name)))
        others = [other for other in self.checkpoint.names if alike.fullmatch(other)]
        if others or self._format.quantizes or isinstance(self._format.scheme(module), Dense):
            there = f" beside {min(others)}" if others else ""
            raise CheckpointError(
                f"tensor {name} is missing from {self.checkpoint.location(name)}{there}; by the config the model has "
                f"biases there: fetch the file again, or take the config.json that was saved with it"
            )

    def _stacked(
        self, out_features: Mapping[str, int], in_features: int, *, bias: bool, is_sensitive: bool
    ) -> LinearPart | None:
        """One matrix of all modules, read straight into place; None where they cannot share one."""
        stack = LinearStack(
            self.kernels, self.dtype, self.device, sum(out_features.values()), is_sensitive=is_sensitive
        )
        for module, rows in out_features.items():
            if not self._put(stack, module, (rows, in_features)):
                return None
        outline, prepared = stack.finish()
        biases = [self._bias(module, rows, required=bias) for module, rows in out_features.items()]
        joined = _stack_biases(biases, list(out_features.values()))
        num_bytes = 0 if joined is None else joined.nbytes
        self.weight_bytes += outline.nbytes + num_bytes
        self.memory_bytes += num_bytes
        problem = self._linear_problem(outline, is_sensitive=is_sensitive)
        self._record(layer_class(list(out_features)), problem, outline.nbytes)
        return linear_part(self.kernels.select_candidate("linear", problem), prepared, joined)

    def _put(self, stack: LinearStack, module: str, shape: tuple[int, int]) -> bool:
        """Read a module into the stack, a plain one a few rows at a time; False where it does not fit there."""
        name = self._format.plain_tensor(self.checkpoint, module)
        if name is None:
            weight = self._format.load_as_stored(self.checkpoint, module, self.dtype)
            self._check_shape(module, weight.shape, shape)
            return stack.put(weight)
        self._check_shape(module, self.checkpoint.shape(name), shape)
        where = f"{name} in {self.checkpoint.location(name)}"
        for _, rows in self.checkpoint.rows(name):
            weight = self._format.from_rows(module, DenseWeight(rows), where)
            if not stack.put(weight):
                return False
        return True

    def _expert_part(self, load: Load, names: list[str], num_experts: int, top_k: int, prefix: str) -> ExpertPart:
        """Prepare the experts while they stream in; again from the first where a later one needs a wider scheme."""
        scheme = None
        while True:
            try:
                weights = StreamedExperts(load, names, num_experts, scheme)
                part, problem = prepare_experts(weights, top_k, self.dtype, self.kernels)
                break
            except SchemesDifferError as other:
                layer = f"{prefix}.*.{'+'.join(names)}"
                scheme = one_scheme([weights.scheme, other.scheme], weights[0].shape, layer)
        self.weight_bytes += weights.num_bytes
        self._record(layer_class([f"{prefix}.{name}" for name in names]), problem, weights.num_bytes)
        return part

    def _expert(self, module: str, shape: tuple[int, int]) -> CanonicalWeight:
        self._filled.add(module)
        weight = self._format.load(self.checkpoint, module, self.dtype)
        self._check_shape(module, weight.shape, shape)
        if self._format.load_bias(self.checkpoint, module, self.dtype) is not None:
            raise self._biased_expert(module)
        return to_device(weight, self.device)

    def _biased_expert(self, module: str) -> UnsupportedError:
        return UnsupportedError(f"{module} in {self.checkpoint.path} has a bias; experts are served without biases")

    def _check_shape(self, module: str, stored: tuple[int, ...], shape: tuple[int, int]) -> None:
        if stored != shape:
            raise CheckpointError(
                f"{module} in {self.checkpoint.path} is {list(stored)}; the config asks for {list(shape)}"
            )

    def _prepare_tied(self, layer: str, weight: CanonicalWeight) -> LinearPart:
        """A head that is the embedding: a kernel which takes the matrix as it is costs nothing."""
        part = prepare_part(weight, None, self.dtype, self.kernels, is_sensitive=True)
        self._record(layer, self._linear_problem(weight, is_sensitive=True), weight.nbytes, shared=True)
        return part

    def _linear_problem(self, weight: CanonicalWeight | StoredLinear, *, is_sensitive: bool) -> LinearProblem:
        rows, columns = weight.shape
        return LinearProblem(
            scheme=weight.scheme, in_features=columns, out_features=rows, dtype=self.dtype, is_sensitive=is_sensitive
        )

    def _record(
        self, layer: str, problem: LinearProblem | ExpertLinearProblem, stored: int, *, shared: bool = False
    ) -> None:
        """Count and report what the kernel chosen for a problem keeps of a weight."""
        op = "linear" if isinstance(problem, LinearProblem) else "expert_linear"
        candidate = self.kernels.select_candidate(op, problem)
        num_bytes = stored if candidate.prepared_bytes is None else candidate.prepared_bytes(problem, stored)
        if shared and candidate.shares_dense:
            num_bytes = 0
        self.memory_bytes += num_bytes
        self.kernels.record(layer, problem, num_bytes)

    def _packed_embedding(self, module: str, shape: tuple[int, int]) -> PackedWeight | None:
        packed = self._format.packed_embedding(self.checkpoint, module)
        if packed is None:
            return None
        self._fill(module)
        self._check_shape(module, packed.shape, shape)
        moved = to_device(packed, self.device)
        assert isinstance(moved, PackedWeight), "a device changes no kind"
        return moved

    def _plain(self, name: str, shape: tuple[int, ...]) -> Tensor:
        self._fill(name)
        self._check_plain(name, self.checkpoint.dtype(name), self.checkpoint.shape(name), shape)
        tensor = torch.empty(shape, dtype=self.dtype, device=self.device)
        for first, rows in self.checkpoint.rows(name):
            tensor[first : first + rows.shape[0]].copy_(rows)
        self.weight_bytes += tensor.nbytes
        self.memory_bytes += tensor.nbytes
        return tensor

    def _mapped(self, name: str, shape: tuple[int, ...]) -> Tensor:
        """Like ``_plain``, but where it lies in the file if its few rows that are wanted can be used from there."""
        lies_right = (
            self.device.type == "cpu" and self.checkpoint.has(name) and self.checkpoint.dtype(name) is self.dtype
        )
        tensor = self.checkpoint.mapped(name) if lies_right else None
        if tensor is None:
            return self._plain(name, shape)
        self._fill(name)
        self._check_plain(name, tensor.dtype, tuple(tensor.shape), shape)
        self.weight_bytes += tensor.nbytes
        self.memory_bytes += tensor.nbytes
        return tensor

    def _check_plain(self, name: str, dtype: torch.dtype, stored: tuple[int, ...], shape: tuple[int, ...]) -> None:
        if not is_plain(dtype):
            raise UnsupportedError(
                f"{name} in {self.checkpoint.path} is stored as {dtype}; only linear layers are served quantized"
            )
        if stored != shape:
            raise CheckpointError(
                f"{name} in {self.checkpoint.path} is {list(stored)}; the config asks for {list(shape)}"
            )

    def _fill(self, name: str) -> None:
        assert name not in self._filled, f"{name} is filled twice"
        self._filled.add(name)


def layer_class(modules: Sequence[str]) -> str:
    """``self_attn.q_proj+k_proj+v_proj`` for the three modules of any layer."""
    first, *others = (re.sub(r"^.*\blayers\.\d+\.", "", module) for module in modules)
    return "+".join([first, *(other.rpartition(".")[2] for other in others)])


def _stack_biases(biases: Sequence[Tensor | None], sizes: Sequence[int]) -> Tensor | None:
    """One bias for stacked modules of so many rows, zeros where a module has none."""
    first = next((bias for bias in biases if bias is not None), None)
    if first is None:
        return None
    rows = [first.new_zeros(size) if bias is None else bias for bias, size in zip(biases, sizes, strict=True)]
    return torch.cat(rows)
