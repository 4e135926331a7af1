"""The share of a decode step that structured output takes: masks, waiting for them, laying them over the logits.

    python benchmarks/grammar_masks.py MODEL [--steps 30]

Requests with a JSON schema that never ends, 1, 8 and 32 at once. `exposed` is what a step waits for: starting the
masks, what is left of their computation after the model, applying them, and advancing the grammars. `beside` is the
thread's work while the model runs.
"""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import time
from collections import defaultdict
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from twofold.engine.config import EngineConfig
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.grammar.constraint import Constraint
from twofold.engine.grammar.masks import MaskMaker, TokenMasks
from twofold.engine.input_processor import InputProcessor
from twofold.engine.sampling_params import SamplingParams
from twofold.engine.structured_output import StructuredOutput
from twofold.engine.text_side import find_model, load_text_side

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"enum": ["red", "green", "blue"]}},
    "required": ["name", "age", "tags"],
    "additionalProperties": False,
}
SCHEMA = json.dumps({"type": "array", "items": ITEM, "minItems": 1000})
spent: dict[str, float] = defaultdict(float)


def timed(owner: type, method: str, name: str) -> None:
    """Add the time of each call of a method to ``spent[name]``."""
    original: Callable[..., Any] = getattr(owner, method)

    @functools.wraps(original)
    def wrapper(*args: Any, **options: Any) -> Any:
        began = time.perf_counter()
        try:
            return original(*args, **options)
        finally:
            spent[name] += time.perf_counter() - began

    setattr(owner, method, wrapper)


def measure(core: EngineCore, inputs: InputProcessor, count: int, num_steps: int) -> dict[str, float]:
    """Medians over the steps of ``count`` samples, in ms."""
    structured = StructuredOutput(json=SCHEMA)
    params = SamplingParams(max_tokens=num_steps + 20, temperature=1.0, seed=1, structured=structured)
    for number in range(count):
        core.add_request(inputs.make_request("Some people:", params, request_id=f"{count}-{number}"))
    steps: list[dict[str, float]] = []
    while core.has_work():
        spent.clear()
        began = time.perf_counter()
        outputs = core.step()
        spent["step"] = time.perf_counter() - began
        if len(outputs) == count:
            steps.append(dict(spent))
    names = ("step", "start", "wait", "apply", "advance", "beside")
    return {name: statistics.median(step.get(name, 0.0) for step in steps[5:]) * 1e3 for name in names}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 8, 32])
    args = parser.parse_args()
    config = EngineConfig(model=args.model, device="cpu", max_num_seqs=32)
    core = EngineCore(config)
    tokenizer, generation = load_text_side(find_model(config), config)
    inputs = InputProcessor(tokenizer, core.info(), generation)
    for owner, method, name in (
        (MaskMaker, "start", "start"),
        (Future, "result", "wait"),
        (TokenMasks, "apply", "apply"),
        (Constraint, "advance", "advance"),
        (MaskMaker, "_fill", "beside"),
    ):
        timed(owner, method, name)
    for count in args.batches:
        figures = measure(core, inputs, count, args.steps)
        exposed = sum(figures[name] for name in ("start", "wait", "apply", "advance"))
        shown = "  ".join(f"{name} {value:.3f}" for name, value in figures.items())
        print(f"{count:3} at once: {shown}  exposed {exposed:.3f} ms = {exposed / figures['step']:.1%}", flush=True)
    core.shutdown()


if __name__ == "__main__":
    main()
