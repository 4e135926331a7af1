"""A Llama of random weights in every format that the peers read: `random_model.py TARGET --gguf FILE [--layers 24]`.

Writes TARGET/hf (Hugging Face layout, bfloat16) and TARGET/{q4_0,q8_0,f16}.gguf of the same values, the embedding of
q4_0 in Q8_0. FILE is any GGUF file; its tokenizer is taken over, and its vocabulary. `openvino_models.py` exports for
OpenVINO from the GGUF files. Weights are drawn tensor by tensor, so memory stays below one file.
"""

from __future__ import annotations

import argparse
import json
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import MODEL_ARCH, GGMLQuantizationType, GGUFReader, GGUFValueType, GGUFWriter, get_tensor_name_map, quantize
from random_engine import tensor_shapes

# general.file_type of each file
TYPES = {
    "q4_0": (GGMLQuantizationType.Q4_0, 2),
    "q8_0": (GGMLQuantizationType.Q8_0, 7),
    "f16": (GGMLQuantizationType.F16, 1),
}


def main() -> None:
    """Write what is not there yet."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("target", type=Path, metavar="TARGET")
    parser.add_argument("--gguf", type=Path, required=True, metavar="FILE", help="whose tokenizer to take")
    parser.add_argument("--hidden", type=int, default=1536)
    parser.add_argument("--intermediate", type=int, default=4096)
    parser.add_argument("--layers", type=int, default=24)
    parser.add_argument("--heads", type=int, default=24)
    parser.add_argument("--kv-heads", type=int, default=6)
    parser.add_argument("--types", default=",".join(TYPES), help="comma list of GGUF files to write")
    args = parser.parse_args()
    torch.set_num_threads(1)
    tokenizer = {
        field.name: (field.contents(), field.types)
        for field in GGUFReader(args.gguf).fields.values()
        if field.name.startswith("tokenizer.")
    }
    fields = config(args, tokenizer)
    write_folder(args.target / "hf", fields, args.gguf)
    for name in args.types.split(","):
        write_gguf(args.target / f"{name}.gguf", fields, tokenizer, *TYPES[name])


def config(args: argparse.Namespace, tokenizer: dict[str, Any]) -> dict[str, Any]:
    """config.json, with the head tied to the embedding."""
    return {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "hidden_size": args.hidden,
        "intermediate_size": args.intermediate,
        "num_hidden_layers": args.layers,
        "num_attention_heads": args.heads,
        "num_key_value_heads": args.kv_heads,
        "head_dim": args.hidden // args.heads,
        "vocab_size": len(tokenizer["tokenizer.ggml.tokens"][0]),
        "max_position_embeddings": 8192,
        "rms_norm_eps": 1e-5,
        "rope_theta": 100000.0,
        "hidden_act": "silu",
        "tie_word_embeddings": True,
        "bos_token_id": 1,
        "eos_token_id": 2,
        "pad_token_id": 2,
        "torch_dtype": "bfloat16",
    }


def drawn(fields: dict[str, Any]) -> Iterator[tuple[str, torch.Tensor]]:
    """Every parameter by its name, [N, K] or [K], in bfloat16; the same at every call."""
    for name, shape in tensor_shapes(fields).items():
        if name == "lm_head.weight":
            continue
        if len(shape) == 1:
            yield name, torch.ones(shape, dtype=torch.bfloat16)
            continue
        generator = torch.Generator().manual_seed(zlib.crc32(name.encode()))
        yield name, torch.empty(shape).normal_(std=0.02, generator=generator).bfloat16()


def write_folder(folder: Path, fields: dict[str, Any], source: Path) -> None:
    """config.json, model.safetensors and the tokenizer."""
    from safetensors.torch import save_file
    from transformers import AutoTokenizer

    if (folder / "config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    AutoTokenizer.from_pretrained(source.parent, gguf_file=source.name).save_pretrained(folder)
    save_file(dict(drawn(fields)), folder / "model.safetensors", metadata={"format": "pt"})
    (folder / "config.json").write_text(json.dumps(fields, indent=1) + "\n")


def write_gguf(
    target: Path, fields: dict[str, Any], tokenizer: dict[str, Any], kind: GGMLQuantizationType, file_type: int
) -> None:
    """One file as llama.cpp's converter lays it out."""
    if target.exists():
        return
    part = target.with_suffix(".part")
    writer = GGUFWriter(part, "llama")
    add_shape(writer, fields)
    writer.add_file_type(file_type)
    for key, (value, types) in tokenizer.items():
        writer.add_key_value(key, value, types[0], types[-1] if types[0] == GGUFValueType.ARRAY else None)
    names = get_tensor_name_map(MODEL_ARCH.LLAMA, fields["num_hidden_layers"])
    heads = {"q_proj": fields["num_attention_heads"], "k_proj": fields["num_key_value_heads"]}
    for name, tensor in drawn(fields):
        stored = names.get_name(name, try_suffixes=(".weight",))
        assert stored is not None, name
        values = tensor.float().numpy()
        if values.ndim == 1:
            writer.add_tensor(stored, values)
            continue
        if num_heads := heads.get(name.split(".")[-2]):
            values = interleaved(values, num_heads)
        own = kind if kind != GGMLQuantizationType.Q4_0 or "token_embd" not in stored else GGMLQuantizationType.Q8_0
        writer.add_tensor(stored, quantize(values, own), raw_dtype=own)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    part.rename(target)


def add_shape(writer: GGUFWriter, fields: dict[str, Any]) -> None:
    """The keys that say what the model is."""
    writer.add_name("random")
    writer.add_block_count(fields["num_hidden_layers"])
    writer.add_context_length(fields["max_position_embeddings"])
    writer.add_embedding_length(fields["hidden_size"])
    writer.add_feed_forward_length(fields["intermediate_size"])
    writer.add_head_count(fields["num_attention_heads"])
    writer.add_head_count_kv(fields["num_key_value_heads"])
    writer.add_rope_freq_base(fields["rope_theta"])
    writer.add_rope_dimension_count(fields["head_dim"])
    writer.add_layer_norm_rms_eps(fields["rms_norm_eps"])
    writer.add_vocab_size(fields["vocab_size"])


def interleaved(weight: np.ndarray, num_heads: int) -> np.ndarray:
    """llama.cpp's row order of q and k: a row of a head's first half, then its partner of the second."""
    halves = weight.reshape(num_heads, 2, weight.shape[0] // num_heads // 2, weight.shape[1])
    return np.ascontiguousarray(halves.swapaxes(1, 2).reshape(weight.shape))


if __name__ == "__main__":
    main()
