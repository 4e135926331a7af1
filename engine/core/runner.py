"""ModelRunner: carries out a step plan: copies blocks, runs the model over the batch, draws tokens."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from ...kernels.kv_layout import KVCache
from ..grammar.masks import MaskMaker, TokenMasks
from ..messages import TokenLogprobs
from .batch import Batch, StepInputs
from .decode_graphs import DecodeGraphs
from .logprobs import token_logprobs
from .prompt_graphs import PromptGraphs
from .request import Sample
from .sampler import Kernels, Sampler
from .step_plan import StepPlan

if TYPE_CHECKING:
    from ..models.model import Model

_LOGIT_ROWS = 128  # rows of prompt logits held at once

CopyBlocks = Callable[[list[Tensor], list[tuple[int, int]]], None]


@dataclass(slots=True)
class StepResult:
    """One entry per drawn token, in plan order. ``tokens`` holds None where a sample had no valid token to draw.

    ``pooled`` are the samples whose vector is complete.
    """

    samples: list[Sample] = field(default_factory=list)
    tokens: list[int | None] = field(default_factory=list)
    logprobs: list[TokenLogprobs | None] = field(default_factory=list)
    pooled: list[Sample] = field(default_factory=list)


class ModelRunner:
    """Runs one model over the rows of one batch."""

    def __init__(
        self,
        *,
        model: Model,
        batch: Batch,
        caches: list[KVCache],
        device: torch.device,
        copy_blocks: CopyBlocks,
        kernels: Kernels,
        vocab_size: int,
    ) -> None:
        self._model = model
        self._batch = batch
        self._caches = caches
        self._device = device
        self._copy_blocks = copy_blocks
        self._vocab_size = vocab_size
        self._sampler = Sampler(batch, vocab_size, kernels)
        self._masks = MaskMaker(vocab_size)
        self._graphs: DecodeGraphs | None = None
        self._prompt_graphs: PromptGraphs | None = None
        self._step_memory = kernels.step_memory
        self.argmax = self._sampler.argmax

    def use_graphs(self, graphs: DecodeGraphs | None, prompt_graphs: PromptGraphs | None) -> None:
        """Replay decode steps and steps with prompts from now on."""
        self._graphs, self._prompt_graphs = graphs, prompt_graphs

    def execute(self, plan: StepPlan) -> StepResult:
        """Compute a step; drawn tokens are appended to their batch rows."""
        if plan.block_copies:
            self._copy_blocks([part for cache in self._caches for part in cache.tensors], plan.block_copies)
        result = self._replay(plan) if self._graphs is not None and plan.is_decode else None
        if result is not None:
            return result
        with self._step_memory():
            return self._compute(plan)

    def _replay(self, plan: StepPlan) -> StepResult | None:
        """A recorded step; None where there is none for this plan.

        After a model's weights have passed through the caches each line of Python costs ten times as much as in a
        loop of its own, so greedy tokens go from the graph to the result with as few of them as possible.
        """
        assert self._graphs is not None
        rows = np.array([sample.row for sample in plan.samples], dtype=np.int64)
        if not self._graphs.can_run(self._batch, rows):
            return None
        masks = self._masks.start([sample.constraint for sample in plan.samples])
        outputs = self._graphs.run(self._batch, rows)
        if masks is None and self._sampler.is_greedy(rows):
            tokens = outputs.tokens.cpu().numpy()
            self._batch.append_tokens(rows, np.maximum(tokens, 0))
            drawn = [token if token >= 0 else None for token in tokens.tolist()]
            return StepResult(samples=plan.samples, tokens=drawn, logprobs=[None] * len(drawn))
        return self._sample(plan.samples, rows, outputs.logits, masks)

    @torch.inference_mode()
    def _compute(self, plan: StepPlan) -> StepResult:
        inputs = self._batch.inputs(plan, self._device)
        # Masks take their time beside the model, not after it.
        masks = self._masks.start([plan.samples[place].constraint for place in inputs.drawing.tolist()])
        hidden = self._forward(inputs)
        for place, sample in enumerate(plan.samples):
            if sample.wants_prompt_logprobs:
                self._read_prompt_logprobs(sample, hidden, inputs, place)
        pooled = [sample for place, sample in enumerate(plan.samples) if _pool(sample, hidden, inputs, place)]
        result = self._draw(plan, hidden, inputs, masks)
        result.pooled = pooled
        return result

    def _forward(self, inputs: StepInputs) -> Tensor:
        graphs = self._prompt_graphs
        if graphs is not None and graphs.can_run(inputs):
            return graphs.run(inputs)
        return self._model.forward(inputs.input_ids, inputs.positions, self._caches, inputs.attention, inputs.outputs)

    def _draw(self, plan: StepPlan, hidden: Tensor, inputs: StepInputs, masks: Future[TokenMasks] | None) -> StepResult:
        drawing = inputs.drawing
        if len(drawing) == 0:
            return StepResult()
        last = inputs.starts[drawing] + inputs.num_outputs[drawing] - 1
        if len(last) != len(hidden):
            hidden = hidden[torch.from_numpy(last).to(self._device, non_blocking=True)]
        samples = [plan.samples[place] for place in drawing.tolist()]
        return self._sample(samples, inputs.rows[drawing], self._model.compute_logits(hidden), masks)

    @torch.inference_mode()
    def _sample(
        self, samples: list[Sample], rows: NDArray[np.int64], logits: Tensor, masks: Future[TokenMasks] | None
    ) -> StepResult:
        drawn = self._sampler.sample(logits, rows, None if masks is None else masks.result())
        self._batch.append_tokens(rows, drawn.tokens)
        tokens = [
            token if is_valid else None
            for token, is_valid in zip(drawn.tokens.tolist(), drawn.is_valid.tolist(), strict=True)
        ]
        return StepResult(
            samples=samples,
            tokens=tokens,
            logprobs=[drawn.logprobs.get(place) for place in range(len(tokens))],
        )

    def _read_prompt_logprobs(self, sample: Sample, hidden: Tensor, inputs: StepInputs, place: int) -> None:
        """Log-probabilities of the prompt tokens that this step's queries predict."""
        entries = sample.prompt_logprobs
        num_top = sample.params.prompt_logprobs
        assert entries is not None and num_top is not None
        computed, start = int(inputs.computed[place]), int(inputs.starts[place])
        if computed == 0:  # at the start, or again after a preemption
            entries[:] = [None]
        stop = min(computed + int(inputs.counts[place]), sample.num_prompt_tokens - 1)
        for first in range(computed, stop, _LOGIT_ROWS):
            count = min(_LOGIT_ROWS, stop - first)
            offset = start + first - computed
            logits = self._model.compute_logits(hidden[offset : offset + count])[:, : self._vocab_size]
            targets = np.array(sample.tokens[first + 1 : first + 1 + count], dtype=np.int64)
            entries += token_logprobs(logits, torch.from_numpy(targets).to(self._device), [num_top] * count)


def _pool(sample: Sample, hidden: Tensor, inputs: StepInputs, place: int) -> bool:
    """Give a pooling sample the hidden states of this step; True where they were the last."""
    if sample.pooler is None:
        return False
    start, num_rows, computed = (int(part[place]) for part in (inputs.starts, inputs.num_outputs, inputs.computed))
    if num_rows:
        sample.pooler.add(hidden[start : start + num_rows], computed)
    return computed + int(inputs.counts[place]) == sample.num_tokens
