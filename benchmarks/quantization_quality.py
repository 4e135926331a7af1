"""How far quantized checkpoints stray from their original: one row for each, in Markdown, whatever tool wrote it.

    python benchmarks/quantization_quality.py path/to/original path/to/result ... [--text FILE] [--windows 8]
    python benchmarks/quantization_quality.py path/to/original --calibration-tokens calibration.json

Bits count all that is stored for the quantized modules, scales and zeros too. Original and results are evaluated in
float32, by the same kernels. The second form makes no rows: it writes the token windows that ``twofold quantize``
calibrates on, as lists of ids, so that another tool can be given the same ones.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path

from twofold.engine.config import EngineConfig
from twofold.engine.sources import resolve_model
from twofold.engine.tokenizer import load_tokenizer
from twofold.engine.weights import open_checkpoint
from twofold.engine.weights.checkpoint import Checkpoint
from twofold.quant.calibration import CalibrationSpec
from twofold.quant.calibration.texts import calibration_windows
from twofold.quant.evaluation import EvaluationSpec, evaluate_each


def linear_bits(original: Checkpoint, result: Checkpoint) -> float:
    """Bits stored per weight of the modules whose weight is no longer as it was."""
    stored, weights = 0, 0
    for name in original.names:
        module, _, last = name.rpartition(".")
        parts = [part for part in result.names if part.rpartition(".")[0] == module]
        if last == "weight" and (name not in parts or result.dtype(name).itemsize == 1):
            stored += sum(math.prod(result.shape(part)) * result.dtype(part).itemsize * 8 for part in parts)
            weights += math.prod(original.shape(name))
    return stored / weights if weights else math.nan


def write_windows(model: str, path: Path, calibration: CalibrationSpec) -> None:
    """The windows of ``twofold quantize`` as JSON."""
    windows = calibration_windows(load_tokenizer(resolve_model(model)), calibration)
    path.write_text(json.dumps(windows.tolist()))


def main() -> None:
    """Evaluate and print."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("original")
    parser.add_argument("results", nargs="*")
    parser.add_argument("--text", type=Path)
    parser.add_argument("--windows", type=int, default=8)
    parser.add_argument("--calibration-tokens", type=Path, metavar="FILE")
    parser.add_argument("--calibration-sequences", type=int, default=CalibrationSpec().num_sequences)
    args = parser.parse_args()
    if args.calibration_tokens:
        calibration = CalibrationSpec(num_sequences=args.calibration_sequences)
        write_windows(args.original, args.calibration_tokens, calibration)
    if not args.results:
        return
    original = open_checkpoint(resolve_model(args.original))
    spec = EvaluationSpec(source=args.text, num_windows=args.windows)
    configs = [EngineConfig(model=result, dtype="float32") for result in args.results]
    print(f"{spec}\n\n| result | bits | divergence | same top token | perplexity |\n| --- | --- | --- | --- | --- |")
    reference = EngineConfig(model=args.original, dtype="float32")
    for result, found in zip(args.results, evaluate_each(configs, spec, reference=reference), strict=True):
        bits = linear_bits(original, open_checkpoint(resolve_model(result)))
        print(
            f"| {Path(result).name} | {bits:.3f} | {found.divergence:.4f} | {found.same_top:.1%} | "
            f"{found.perplexity:.2f} of {found.reference_perplexity:.2f} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
