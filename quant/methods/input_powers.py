"""How large the inputs of a layer's matrices are, guessed from weights alone: rounding errors count by it.

A norm's outputs are as large as its weights, and a matrix's outputs as the norms of its rows: that says which columns
of the next matrix meet large inputs, where no text was run.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from torch import Tensor

from ...engine.model_config import ModelConfig
from ..calibration.stages import STAGES
from ..plan import LayerPlan
from .folds import ATTENTION_NORMS, MLP_NORMS
from .layer_method import ReadWeight

_QKV, _OUT, _GATE_UP, _DOWN = STAGES
_UPS = {"down_proj": "up_proj", "w2": "w3"}


@dataclass(frozen=True, slots=True)
class InputPowers:
    """Called with a layer, it gives the mean square of each input feature, [K] up to a factor, of the modules that it
    can tell for; ``read`` gives weights and norms in float32."""

    read: ReadWeight
    config: ModelConfig

    def __call__(self, layer: LayerPlan) -> dict[str, Tensor]:
        return dict(self._all(layer))

    def _all(self, layer: LayerPlan) -> Iterator[tuple[str, Tensor]]:
        attention, mlp = (self._norm(layer, names) for names in (ATTENTION_NORMS, MLP_NORMS))
        for module in layer.quantize:
            parent, _, kind = module.rpartition(".")
            if kind in _QKV and attention is not None:
                yield module, attention
            elif kind in _GATE_UP and mlp is not None:
                yield module, mlp
            elif kind in _OUT and (value := f"{parent}.v_proj") in layer.quantize:
                yield module, self._of_heads(self._rows(value, attention))
            elif kind in _DOWN and (up := f"{parent}.{_UPS[kind]}") in layer.quantize:
                yield module, self._rows(up, mlp)

    def _norm(self, layer: LayerPlan, names: tuple[str, ...]) -> Tensor | None:
        """Squares of what a layer's norm multiplies by."""
        for name in layer.copy:
            norm, _, last = name.rpartition(".")
            if last == "weight" and norm.rpartition(".")[2] == names[0]:
                return (self.read(norm) + self.config.norm_offset).square()
        return self._norm(layer, names[1:]) if len(names) > 1 else None

    def _rows(self, module: str, inputs: Tensor | None) -> Tensor:
        weight = self.read(module).square()
        return weight.sum(1) if inputs is None or len(inputs) != weight.shape[1] else weight @ inputs

    def _of_heads(self, rows: Tensor) -> Tensor:
        """What the output projection reads: each KV head's features once for every query head that it serves."""
        size = self.config.head_size
        if len(rows) % size:
            return rows
        heads = rows.view(-1, 1, size)
        return heads.expand(-1, max(1, self.config.num_heads // len(heads)), -1).flatten()


def relative(power: Tensor, columns: int) -> Tensor | None:
    """Around 1, and never 0: what no input is known for is rounded all the same. None where it tells nothing."""
    if power.shape != (columns,) or not bool(power.isfinite().all()) or not bool(power.any()):
        return None
    return (power / power.mean()).clamp(min=1e-3)
