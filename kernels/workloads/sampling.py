"""The sampler's reads of the logits, one row per request."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import torch

from ..problems import SamplingProblem
from ..registry import Candidate
from ..sampling_options import DrawOptions
from .workload import Call, Inputs, ModelShapes, Step, Workload

# What no real vocabulary is below: maxima of parts of a row would outweigh a smaller one.
MIN_COLUMNS = 32768


def workloads(inputs: Inputs, model: ModelShapes, step: Step) -> Iterator[Workload]:
    """The most probable token, and a draw under top-p."""
    count, columns = len(step.seq_lens), max(model.vocab_size, MIN_COLUMNS)
    logits = torch.randn(count, columns, device=inputs.device) * 3
    options = DrawOptions(
        temperature=np.full(count, 0.8, dtype=np.float32),
        top_k=np.zeros(count, dtype=np.int64),
        top_p=np.full(count, 0.9, dtype=np.float32),
        min_p=np.zeros(count, dtype=np.float32),
        uniform=np.linspace(0, 0.99, count),
    )
    for op, arguments in (("argmax", ()), ("draw_tokens", (options,))):

        def bind(candidate: Candidate, arguments: tuple[DrawOptions, ...] = arguments) -> Call:
            return lambda: candidate.run(logits, *arguments)

        yield Workload(
            op=op,
            label=f"{count}x{columns}" + (", top-p" if arguments else ""),
            problem=SamplingProblem(vocab_size=columns),
            bind=bind,
            num_bytes=logits.nbytes + 8 * count,
            operations=(4 if arguments else 1) * logits.numel(),
            peer_name="" if arguments else "argmax",
            peer=None if arguments else lambda: lambda: logits.argmax(1),
            # Nothing is sorted. The maxima and the weights of chunks are one pass over the row each, the search for the
            # cut of top-p at most 11 (8 candidates a pass among the bits of a float), the total and the draw 2; all
            # but the first come from the last cache. Chunks that can no longer matter save three of the fifteen here.
            allowance=12.0 if arguments else 1.05,
        )
