"""The real engine core in its process, against the same engine in this one."""

from __future__ import annotations

import asyncio
import gc
import json
import subprocess
import sys
from pathlib import Path

import pytest
from chain_model import build_chain_model
from engine_client import collect, until
from tiny_models import build_tiny_model
from twofold import LLM, SamplingParams
from twofold.engine.client import AsyncEngineClient
from twofold.engine.client.core_process import DEFAULT_CORE
from twofold.engine.config import EngineConfig
from twofold.errors import CheckpointError, ConfigError, ContextLengthError, ModelNotFoundError

SIZES = {"kv_cache_bytes": 1 << 22, "max_num_seqs": 8, "max_num_batched_tokens": 32}


async def one(client: AsyncEngineClient, prompt: str | list[int], params: SamplingParams) -> list[tuple]:
    deltas = await collect(client.generate(prompt, params))
    result = []
    for index in range(params.n):
        mine = [delta for delta in deltas if delta.index == index]
        logprobs = [item.logprob for delta in mine for item in delta.logprobs or []]
        tokens = [token for delta in mine for token in delta.token_ids]
        result.append(("".join(delta.text for delta in mine), tokens, mine[-1].finish_reason, pytest.approx(logprobs)))
    return result


def test_same_answers_as_in_process(tmp_path: Path) -> None:
    # A request without a limit must still be running when the statistics come.
    build_tiny_model(tmp_path, "llama", max_position_embeddings=1 << 16)
    sizes = SIZES | {"kv_cache_bytes": 1 << 26}
    (tmp_path / "generation_config.json").write_text(json.dumps({"temperature": 0.5, "top_k": 7}))
    prompts = [list(range(3, 3 + length)) for length in (1, 5, 16, 33, 40)]
    params = [
        SamplingParams(temperature=0, max_tokens=10, ignore_eos=True, logprobs=2),
        SamplingParams(seed=1, n=3, max_tokens=10, ignore_eos=True),
        SamplingParams(seed=2, max_tokens=20, stop=("e", "a")),
        SamplingParams(seed=3, top_k=5, repetition_penalty=1.3, max_tokens=10),
        SamplingParams(seed=4, logit_bias={5: 100}, max_tokens=5),
    ]
    with LLM(str(tmp_path), **sizes) as llm:
        expected = [
            [
                (s.text, s.token_ids, s.finish_reason, [item.logprob for item in s.logprobs or []])
                for s in output.outputs
            ]
            for output in llm.generate(prompts, params, progress=False)
        ]

    async def check() -> None:
        client = await AsyncEngineClient.start(EngineConfig(model=str(tmp_path), **sizes))
        try:
            assert client.inputs.default_params().top_k == 7
            results = await asyncio.gather(*[one(client, *pair) for pair in zip(prompts, params, strict=True)])
            assert results == expected
            with pytest.raises(ContextLengthError):
                await collect(client.generate([3] * client.info.max_model_len, params[0]))
            endless = SamplingParams(max_tokens=None, ignore_eos=True)
            reader = asyncio.ensure_future(collect(client.generate([3], endless)))
            await until(lambda: client.stats().num_running == 1)
            assert client.stats().num_live_blocks > 0
            reader.cancel()
            await until(lambda: client.stats().num_live_blocks == client.stats().num_running == 0)
        finally:
            await client.shutdown()

    asyncio.run(check())


def test_mistakes_come_with_their_own_error(tmp_path: Path) -> None:
    async def check() -> None:
        with pytest.raises(ModelNotFoundError, match="nothing-here"):
            await AsyncEngineClient.start(EngineConfig(model=str(tmp_path / "nothing-here")))
        build_chain_model(tmp_path / "model", [list("AB")])
        (tmp_path / "model" / "model.safetensors").write_bytes(b"short")
        with pytest.raises(CheckpointError, match=r"model\.safetensors"):
            await AsyncEngineClient.start(EngineConfig(model=str(tmp_path / "model")))

    asyncio.run(check())


def test_client_process_does_without_torch(tmp_path: Path) -> None:
    """A server's process starts in parallel with its core, on the same cores, and does not load torch."""
    build_chain_model(tmp_path, [list("ABC")])
    script = f"""
import asyncio, sys
from twofold.engine.client import AsyncEngineClient
from twofold.engine.client.core_process import DEFAULT_CORE
from twofold.engine.config import EngineConfig
from twofold.engine.sampling_params import SamplingParams

async def main():
    client = await AsyncEngineClient.start(EngineConfig(model={str(tmp_path)!r}, kv_cache_bytes=1 << 20))
    print("".join([delta.text async for delta in client.generate("A", SamplingParams(temperature=0))]))
    await client.shutdown()
    print("torch" in sys.modules)

if __name__ == "__main__":
    asyncio.run(main())
"""
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=60)
    assert result.stdout.split("\n")[:2] == ["BC", "False"], result.stderr


@pytest.mark.parametrize("core_factory", [DEFAULT_CORE, "counting_core:CountingCore"])
def test_a_failing_text_side_leaves_no_task(
    tmp_path: Path, core_factory: str, caplog: pytest.LogCaptureFixture
) -> None:
    build_chain_model(tmp_path, [list("AB")])

    async def check() -> None:
        config = EngineConfig(model=str(tmp_path), chat_template="/nowhere/template", **SIZES)
        with pytest.raises(ConfigError, match="/nowhere/template"):
            await AsyncEngineClient.start(config, core_factory=core_factory)
        assert asyncio.all_tasks() == {asyncio.current_task()}

    asyncio.run(check())
    gc.collect()
    assert [record.getMessage() for record in caplog.records if record.name == "asyncio"] == []
