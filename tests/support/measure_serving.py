"""Run as a program: serves one prompt and prints, as JSON, how far memory grew beside weights and KV cache.

    python measure_serving.py MODEL SMALL_MODEL exact|int8|bf16 PROMPT_TOKENS NEW_TOKENS

``grown`` is the peak of resident memory, from the start of the load to the last token, over what the process had when
SMALL_MODEL had served the same: what libraries take by themselves does not count. All figures in bytes.
"""

from __future__ import annotations

import gc
import json
import sys

from fake_core import run
from measure_loading import CLEAR_REFS, resident
from twofold.engine.config import EngineConfig
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.core.loading import load_parts
from twofold.engine.messages import EngineRequest
from twofold.engine.sampling_params import SamplingParams


def serve(name: str, activations: str, prompt: int, new: int) -> tuple[EngineCore, int, int]:
    """The core, what its weights take and what the request's keys and values do."""
    config = EngineConfig(model=name, device="cpu", dtype="float32", cpu_activations=activations, num_threads=2)
    parts = load_parts(config)
    core = EngineCore.from_parts(config, parts.model, parts.platform, parts.kernels, vocab_size=parts.vocab_size)
    ids = [(7 * place) % 256 for place in range(prompt)]
    params = SamplingParams(max_tokens=new, temperature=0, ignore_eos=True)
    run(core, EngineRequest(request_id="one", prompt_token_ids=ids, params=params))
    model = parts.model
    elements = 2 * model.num_layers * model.kv_heads * model.head_size * (prompt + new)
    return core, model.memory_bytes, elements * model.kv_dtype.itemsize


def main(model: str, small: str, activations: str, prompt: str, new: str) -> None:
    kept = serve(small, activations, int(prompt), int(new))
    gc.collect()
    before = resident("VmRSS")
    CLEAR_REFS.write_text("5")  # VmHWM starts anew
    core, weights, kv = serve(model, activations, int(prompt), int(new))
    peak = resident("VmHWM")
    print(json.dumps({"grown": peak - before, "weights": weights, "kv": kv}))
    del kept, core


if __name__ == "__main__":
    main(*sys.argv[1:])
