"""Options of an engine that change what a model's products and caches are computed in, on a CPU."""

from __future__ import annotations

import pytest
from twofold.kernels.cpu import linear_bf16

OTHER_ARITHMETIC = [
    {"kv_cache_dtype": "int8"},
    {"kv_cache_dtype": "fp8"},
    {"kv_cache_dtype": "bfloat16"},
    {"quantization": "int4"},
    {"quantization": "int8", "cpu_activations": "int8"},
    pytest.param(
        {"cpu_activations": "bf16"},
        marks=pytest.mark.skipif(linear_bf16.missing() is not None, reason=str(linear_bf16.missing())),
    ),
]
