"""Running a test against an AsyncEngineClient whose core counts instead of computing."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from typing import Any

from counting_core import ByteTokenizer
from twofold.engine.client import AsyncEngineClient
from twofold.engine.config import EngineConfig
from twofold.engine.outputs import SampleDelta


def counting_client(core: str = "CountingCore", **options: Any) -> AsyncEngineClient:
    """A client, not started yet; ``core`` is a class of `counting_core`."""
    options = {"tokenizer": ByteTokenizer(), "core_factory": f"counting_core:{core}", **options}
    return AsyncEngineClient(EngineConfig(model="counting"), **options)


def with_client(
    check: Callable[[AsyncEngineClient], Coroutine[Any, Any, None]], core: str = "CountingCore", **options: Any
) -> None:
    """Run ``check`` on a started client, and shut that down whatever happens."""

    async def run() -> None:
        client = counting_client(core, **options)
        await client.launch()
        try:
            await asyncio.wait_for(check(client), 200)
        finally:
            await client.shutdown()

    asyncio.run(run())


async def collect(deltas: AsyncIterator[SampleDelta]) -> list[SampleDelta]:
    return [delta async for delta in deltas]


async def until(condition: Callable[[], bool], timeout: float = 60.0) -> float:
    """Wait for ``condition``; returns the seconds that it took."""
    began = time.monotonic()
    while not condition():
        assert time.monotonic() - began < timeout, "the condition did not come true in time"
        await asyncio.sleep(0.01)
    return time.monotonic() - began
