"""Tokens per second of the engine with random weights, beside transformers' generate: `random_engine.py [--model 8b]`.

Needs no checkpoint, no tokenizer and no network: both build a Llama of the given shape on the device. Every engine runs
in a process of its own (`--engine`), so that each has the whole memory. Prints JSON lines; `gpu_check.py` makes the
table. Nothing of the server is imported.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

ENGINES = ("transformers", "bf16", "int4", "fp8")
# Layers that each shape of the workloads has in its model.
NUM_LAYERS = {"tiny": 2, "135m": 30, "1b": 16, "8b": 32, "70b": 80}


def main() -> None:
    """Measure every engine in turn, or one."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="8b", choices=tuple(NUM_LAYERS), help="whose shape")
    parser.add_argument("--device", default="auto", help="auto, cpu, cuda or rocm")
    parser.add_argument("--engine", choices=ENGINES, help="only this one, in this process")
    parser.add_argument("--batch-sizes", default="1,16", help="requests at once, separated by commas")
    parser.add_argument("--input-len", type=int, default=512, help="tokens of each prompt")
    parser.add_argument("--output-len", type=int, default=64, help="tokens of each output")
    parser.add_argument("--seconds", type=float, default=180.0, help="for all engines together")
    args = parser.parse_args()
    if args.engine:
        for row in measure(args):
            print(json.dumps(row), flush=True)
        return
    deadline = time.monotonic() + args.seconds
    for engine in ENGINES:
        left = deadline - time.monotonic()
        command = [sys.executable, __file__, *sys.argv[1:], "--engine", engine]
        try:
            subprocess.run(command, timeout=max(left, 0.1))
        except subprocess.TimeoutExpired:
            print(json.dumps({"engine": engine, "error": "no time left"}), flush=True)


def measure(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Rows of one engine, one per batch size; an engine that fails gives its reason in one row."""
    run = measure_transformers if args.engine == "transformers" else measure_twofold
    rows = []
    try:
        for batch_size, prefill, total in run(args):
            steps = max(args.output_len - 1, 1)
            rows.append(
                {
                    "engine": args.engine,
                    "batch_size": batch_size,
                    "prefill_tokens_per_second": batch_size * args.input_len / prefill,
                    "decode_tokens_per_second": batch_size * steps / max(total - prefill, 1e-9),
                }
            )
    except Exception as error:  # the other engines' figures still count
        rows.append({"engine": args.engine, "error": f"{type(error).__name__}: {str(error)[:120]}"})
    return rows


def hf_config(name: str) -> dict[str, Any]:
    """config.json of a Llama of that shape, in bfloat16."""
    from twofold.kernels.workloads import MODELS

    model = MODELS[name]
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": model.hidden,
        "intermediate_size": model.intermediate,
        "num_hidden_layers": NUM_LAYERS[name],
        "num_attention_heads": model.num_heads,
        "num_key_value_heads": model.num_kv_heads,
        "head_dim": model.head_size,
        "vocab_size": model.vocab_size,
        "max_position_embeddings": 4096,
        "rms_norm_eps": 1e-5,
        "rope_theta": 500000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": False,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def batch_sizes(args: argparse.Namespace) -> list[int]:
    """The numbers of requests to measure."""
    return [int(word) for word in args.batch_sizes.split(",")]


def measure_twofold(args: argparse.Namespace) -> list[tuple[int, float, float]]:
    """(batch size, seconds of the prefill, seconds in all)."""
    from twofold.cli.bench_offline import OfflineBench
    from twofold.engine.config import EngineConfig

    longest = args.input_len + args.output_len
    config = EngineConfig(
        model=f"random {args.model}",
        device=args.device,
        quantization=None if args.engine == "bf16" else args.engine,
        max_model_len=longest,
        max_num_seqs=max(batch_sizes(args)),
        max_num_batched_tokens=max(2048, longest),
        memory_fraction=0.5,
    )
    with tempfile.TemporaryDirectory() as folder:
        bench = OfflineBench(config, random_parts(args.model, config, Path(folder)))
    return [(size, *bench.run(size, args.input_len, args.output_len)) for size in warmed(bench.run, args)]


def warmed(run: Any, args: argparse.Namespace) -> list[int]:
    """The batch sizes, after a short run of each that compiles its kernels."""
    for size in batch_sizes(args):
        run(size, args.input_len, 3)
    return batch_sizes(args)


def random_parts(name: str, config: Any, folder: Path) -> Any:
    """CoreParts of a random model; ``folder`` takes its config.json."""
    from twofold.engine.core.loading import CoreParts
    from twofold.engine.model_config import load_model_config
    from twofold.engine.models import Decoder
    from twofold.engine.sources.model_files import ModelFiles
    from twofold.engine.weights.loader import Loader
    from twofold.kernels.kernel_set import KernelSet
    from twofold.platforms import select_platform
    from twofold.quant.at_load import load_format

    fields = hf_config(name)
    (folder / "config.json").write_text(json.dumps(fields))
    platform = select_platform(config.device)
    platform.set_threads(config.num_threads)
    kernels = KernelSet(platform.spec)
    model_config = load_model_config(ModelFiles(name=name, path=folder, kind="directory"))
    dtype = platform.preferred_dtype(torch.bfloat16)
    checkpoint = random_checkpoint(fields, platform.device, folder)
    loader = Loader(checkpoint, load_format(None, config.quantization), kernels, dtype, platform.device)
    model = Decoder(model_config, loader, block_size=config.block_size, num_positions=config.max_model_len)
    platform.synchronize()
    return CoreParts(model=model, platform=platform, kernels=kernels, vocab_size=fields["vocab_size"])


def random_checkpoint(fields: dict[str, Any], device: torch.device, folder: Path) -> Any:
    """A Checkpoint whose tensors are drawn on the device when they are read."""
    from twofold.engine.weights.checkpoint import Checkpoint

    shapes = tensor_shapes(fields)

    class RandomCheckpoint(Checkpoint):
        names = frozenset(shapes)  # type: ignore[assignment]

        def shape(self, name: str) -> tuple[int, ...]:
            return shapes[name]

        def dtype(self, name: str) -> torch.dtype:
            return torch.bfloat16

        def location(self, name: str) -> str:
            return "nowhere: it is random"

        def _read(self, name: str) -> Tensor:
            shape = shapes[name]
            if len(shape) == 1:
                return torch.ones(shape, dtype=torch.bfloat16, device=device)
            return torch.randn(shape, dtype=torch.bfloat16, device=device).mul_(0.02)

    return RandomCheckpoint(folder)


def tensor_shapes(fields: dict[str, Any]) -> dict[str, tuple[int, ...]]:
    """Name and shape of every parameter of a Llama."""
    hidden, wide, vocabulary = fields["hidden_size"], fields["intermediate_size"], fields["vocab_size"]
    query, kv = (fields["head_dim"] * fields[name] for name in ("num_attention_heads", "num_key_value_heads"))
    layer: dict[str, tuple[int, ...]] = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (wide, hidden),
        "mlp.up_proj": (wide, hidden),
        "mlp.down_proj": (hidden, wide),
        "input_layernorm": (hidden,),
        "post_attention_layernorm": (hidden,),
    }
    shapes: dict[str, tuple[int, ...]] = {
        "model.embed_tokens.weight": (vocabulary, hidden),
        "model.norm.weight": (hidden,),
        "lm_head.weight": (vocabulary, hidden),
    }
    for index in range(fields["num_hidden_layers"]):
        shapes |= {f"model.layers.{index}.{name}.weight": shape for name, shape in layer.items()}
    return shapes


def measure_transformers(args: argparse.Namespace) -> list[tuple[int, float, float]]:
    """(batch size, seconds of the prefill, seconds in all) of generate, greedily and to the full length."""
    from transformers import AutoModelForCausalLM, LlamaConfig
    from twofold.platforms import select_platform

    platform = select_platform(args.device)
    config = LlamaConfig(**hf_config(args.model))
    dtype = platform.preferred_dtype(torch.bfloat16)
    with torch.device(platform.device):
        model = AutoModelForCausalLM.from_config(config, torch_dtype=dtype).eval()
    model.generation_config.eos_token_id = None

    def generate(size: int, length: int) -> float:
        ids = torch.randint(3, config.vocab_size, (size, args.input_len), device=platform.device)
        platform.synchronize()
        begin = time.perf_counter()
        with torch.inference_mode():
            model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                do_sample=False,
                min_new_tokens=length,
                max_new_tokens=length,
                pad_token_id=0,
            )
        platform.synchronize()
        return time.perf_counter() - begin

    for size in batch_sizes(args):
        generate(size, 2)
    return [(size, generate(size, 1), generate(size, args.output_len)) for size in batch_sizes(args)]


if __name__ == "__main__":
    main()
