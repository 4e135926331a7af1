"""Every operation in plain torch: the definition of right, and what runs where nothing better can.

Device-agnostic and without host synchronization. Arithmetic is in float32 (float64 for float64 input) and rounded once
to the input's dtype. Shape legend in attention_batch.py.
"""

from __future__ import annotations

from .activation_quantization import fake_quantize, quantize_activation
from .attention import hidden_positions, paged_attention
from .elementwise import add_rms_norm, gelu_and_mul, linear, rms_norm, rope, silu_and_mul
from .kv_cache import copy_blocks, rope_write_kv, write_kv
from .lora import lora_expand, lora_shrink
from .moe import expert_linear, route
from .sampling import argmax, draw_tokens, edit_logits
from .scaled_matmul import (
    add_rms_norm_quantized,
    gelu_and_mul_quantized,
    rms_norm_quantized,
    scaled_matmul,
    silu_and_mul_quantized,
)

__all__ = [
    "add_rms_norm",
    "add_rms_norm_quantized",
    "argmax",
    "copy_blocks",
    "draw_tokens",
    "edit_logits",
    "expert_linear",
    "fake_quantize",
    "gelu_and_mul",
    "gelu_and_mul_quantized",
    "hidden_positions",
    "linear",
    "lora_expand",
    "lora_shrink",
    "paged_attention",
    "quantize_activation",
    "rms_norm",
    "rms_norm_quantized",
    "rope",
    "rope_write_kv",
    "route",
    "scaled_matmul",
    "silu_and_mul",
    "silu_and_mul_quantized",
    "write_kv",
]
