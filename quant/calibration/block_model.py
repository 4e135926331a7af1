"""A model of transformers with one decoder layer in memory at a time, its weights read from a checkpoint."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel

from ...engine.model_config import raw_config
from ...engine.sources import ModelFiles
from ...engine.weights.checkpoint import Checkpoint
from ...errors import CheckpointError, UnsupportedError
from ..finite import is_finite
from ..rotation import RotatedCheckpoint
from .experts import split_experts

# What a layer's argument for its KV cache is called.
_CACHES = ("cache", "past_key_values")
_OLDER_EXPERTS = ".block_sparse_moe."


class BlockModel:
    """Embeds windows, loads decoder layers, and knows what each layer is called with.

    CheckpointError where a tensor that is read holds NaN or infinity.
    UnsupportedError when transformers has no such architecture, or one without a plain stack of layers.
    """

    def __init__(self, files: ModelFiles, checkpoint: Checkpoint, device: torch.device | str = "cpu") -> None:
        self.checkpoint = checkpoint
        self.device = torch.device(device)
        self.config = _config(files)
        with _parameters_on_meta():
            model: PreTrainedModel = AutoModelForCausalLM.from_config(self.config, dtype=torch.float32)
        self._model = model.eval()
        self._body = self._model.get_decoder()
        if not hasattr(self._body, "layers") or not hasattr(self._body, "rotary_emb"):
            raise UnsupportedError(f"{type(self._body).__name__} is no plain stack of decoder layers")
        self._layers = list(self._body.layers)
        self._prefix = next(name for name, module in self._model.named_modules() if module is self._body.layers)
        self._body.rotary_emb.to(self.device)
        self._arguments: list[dict[str, Any]] = []

    @property
    def num_layers(self) -> int:
        return len(self._layers)

    def layer_name(self, index: int) -> str:
        """The prefix of a layer's tensors, ``model.layers.3``."""
        return f"{self._prefix}.{index}"

    @torch.no_grad()
    def embed(self, windows: Tensor) -> Tensor:
        """Windows int64 [B, L] -> the first layer's input float32 [B, L, K]; notes what layers are called with."""
        embedding = self._body.embed_tokens
        self._fill(embedding, self._name_of(embedding))
        recorders = [_Recorder(layer) for layer in self._layers]
        self._body.layers = nn.ModuleList(recorders)
        head, self._body.norm = self._body.norm, nn.Identity()
        try:
            hidden = self._body(input_ids=windows.to(self.device), use_cache=False).last_hidden_state
        finally:
            self._body.norm = head
            self._body.layers = nn.ModuleList(self._layers)
            embedding.weight = nn.Parameter(embedding.weight.to("meta"), requires_grad=False)
        self._arguments = [recorder.arguments for recorder in recorders]
        return hidden

    def load_layer(self, index: int) -> nn.Module:
        """A decoder layer in float32, experts apart, ready to be called through `run`."""
        layer = split_experts(copy.deepcopy(self._layers[index]), self.config)
        self._fill(layer, self.layer_name(index))
        return layer

    @torch.inference_mode()
    def run(self, index: int, layer: nn.Module, hidden: Tensor, cache: Any = None) -> Tensor:
        """A layer's output for its input [B, L, K]; ``cache`` stands for transformers' KV cache."""
        return self.call(index, layer, hidden, cache)

    def call(self, index: int, layer: nn.Module, hidden: Tensor, cache: Any = None) -> Tensor:
        """`run` with gradients where ``hidden`` has them."""
        arguments = {name: _expand(value, hidden.shape[0]) for name, value in self._arguments[index].items()}
        arguments |= {name: cache for name in _CACHES if name in arguments}
        output = layer(hidden, **arguments)
        return output[0] if isinstance(output, tuple) else output

    @torch.no_grad()
    def logits(self) -> Callable[[Tensor], Tensor]:
        """From the last layer's output [B, L, K] to logits [B, L, V]."""
        norm = copy.deepcopy(self._body.norm)
        self._fill(norm, self._name_of(self._body.norm))
        name = f"{self._name_of(self._model.get_output_embeddings())}.weight"
        is_tied = self.config.tie_word_embeddings and not isinstance(self.checkpoint, RotatedCheckpoint)
        if is_tied or not self.checkpoint.has(name):
            name = f"{self._name_of(self._body.embed_tokens)}.weight"
        weight = self._tensor(name)
        cap = getattr(self.config, "final_logit_softcapping", None)

        def compute(hidden: Tensor) -> Tensor:
            logits = nn.functional.linear(norm(hidden), weight)
            return logits if cap is None else cap * torch.tanh(logits / cap)

        return compute

    def _fill(self, module: nn.Module, prefix: str) -> None:
        """Give a module its parameters; buffers are computed, and there already."""
        for path, part in module.named_modules():
            for name in list(part._parameters):
                if part._parameters[name] is not None:
                    tensor = self._tensor(".".join(filter(None, (prefix, path, name))))
                    part._parameters[name] = nn.Parameter(tensor, requires_grad=False)
        module.to(self.device)

    def _name_of(self, module: nn.Module) -> str:
        return next(name for name, candidate in self._model.named_modules() if candidate is module)

    def _tensor(self, name: str) -> Tensor:
        stored = self.stored_name(name)
        tensor = self.checkpoint.get(stored).to(self.device, torch.float32)
        if not is_finite(tensor):
            raise CheckpointError(f"{stored} in {self.checkpoint.location(stored)} holds NaN or infinity")
        return tensor

    def stored_name(self, name: str) -> str:
        """The checkpoint's name for one of transformers' (Mixtral's files keep an older one)."""
        older = name.replace(".mlp.", _OLDER_EXPERTS)
        return older if not self.checkpoint.has(name) and self.checkpoint.has(older) else name

    def module_name(self, stored: str) -> str:
        """Transformers' name for one of the checkpoint's."""
        return stored.replace(_OLDER_EXPERTS, ".mlp.")


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Modules made inside have parameters without memory, and real buffers."""
    register = nn.Module.register_parameter

    def register_on_meta(module: nn.Module, name: str, parameter: nn.Parameter | None) -> None:
        empty = None if parameter is None else nn.Parameter(parameter.to("meta"), requires_grad=False)
        register(module, name, empty)

    nn.Module.register_parameter = register_on_meta  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


class _Recorder(nn.Module):
    """Stands for a layer once: keeps its keyword arguments and passes the hidden states on."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        # What the body's own loop asks of a layer.
        self.attention_type = getattr(layer, "attention_type", None)
        self.arguments: dict[str, Any] = {}

    def forward(self, hidden_states: Tensor, **arguments: Any) -> Tensor:
        self.arguments = arguments
        return hidden_states


def _config(files: ModelFiles) -> Any:
    raw = {key: value for key, value in raw_config(files).items() if key != "quantization_config"}
    model_type = raw.pop("model_type", None)
    try:
        return AutoConfig.for_model(model_type, **raw)
    except ValueError as error:
        raise UnsupportedError(f"transformers has no model {model_type!r}, which calibration runs: {error}") from None


def _expand(value: Any, count: int) -> Any:
    """The first row of a recorded argument for ``count`` sequences: all windows are alike but for their tokens."""
    if isinstance(value, Tensor) and value.dim() > 1:
        return value[:1].expand(count, *value.shape[1:])
    if isinstance(value, tuple):
        return tuple(_expand(part, count) for part in value)
    return value
