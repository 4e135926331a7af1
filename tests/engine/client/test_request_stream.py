"""The queue of one request: order, joining for slow readers, and every way to end."""

from __future__ import annotations

import asyncio

import pytest
from twofold.engine.client.request_stream import RequestStream
from twofold.engine.outputs import SampleDelta
from twofold.errors import EngineDeadError


def make_stream(num_samples: int = 1) -> tuple[RequestStream, list[RequestStream]]:
    ended: list[RequestStream] = []
    return RequestStream("r", num_samples, ended.append), ended


def delta(text: str, index: int = 0, finish: str | None = None) -> SampleDelta:
    return SampleDelta(request_id="r", index=index, text=text, token_ids=[1], finish_reason=finish)


async def read_all(stream: RequestStream) -> list[SampleDelta]:
    return [item async for item in stream]


def test_slow_reader_gets_one_joined_delta_per_sample() -> None:
    async def check() -> None:
        stream, ended = make_stream(2)
        for _ in range(1000):
            stream.put(delta("a", 0))
            stream.put(delta("b", 1))
        stream.put(delta("c", 0, "stop"))
        assert ended == []
        stream.put(delta("d", 1, "length"))
        assert ended == [stream]
        got = await read_all(stream)
        assert [(d.index, d.text, len(d.token_ids), d.finish_reason) for d in got] == [
            (0, "a" * 1000 + "c", 1001, "stop"),
            (1, "b" * 1000 + "d", 1001, "length"),
        ]

    asyncio.run(check())


def test_fast_reader_gets_every_delta() -> None:
    async def check() -> None:
        stream, _ = make_stream()
        reader = asyncio.ensure_future(read_all(stream))
        for text in "abc":
            await asyncio.sleep(0)
            stream.put(delta(text))
            await asyncio.sleep(0)
        stream.put(delta("d", finish="stop"))
        assert [d.text for d in await reader] == list("abcd")

    asyncio.run(check())


def test_error_comes_at_once_and_ends_once() -> None:
    async def check() -> None:
        stream, ended = make_stream()
        stream.put(delta("a"))
        stream.fail(EngineDeadError("dead"))
        stream.fail(EngineDeadError("again"))
        with pytest.raises(EngineDeadError, match="dead"):
            await anext(stream)
        stream.close()
        assert ended == [stream]

    asyncio.run(check())


def test_error_wakes_a_waiting_reader() -> None:
    async def check() -> None:
        stream, _ = make_stream()
        reader = asyncio.ensure_future(anext(stream))
        await asyncio.sleep(0)
        stream.fail(EngineDeadError("dead"))
        with pytest.raises(EngineDeadError):
            await reader

    asyncio.run(check())


def test_error_after_the_end_changes_nothing() -> None:
    async def check() -> None:
        stream, ended = make_stream()
        stream.put(delta("a", finish="stop"))
        stream.fail(EngineDeadError("dead"))
        assert [d.text for d in await read_all(stream)] == ["a"]
        assert ended == [stream]

    asyncio.run(check())


def test_closing_ends_a_waiting_reader() -> None:
    async def check() -> None:
        stream, ended = make_stream()
        reader = asyncio.ensure_future(read_all(stream))
        await asyncio.sleep(0)
        await stream.aclose()
        assert await reader == []
        assert ended == [stream]

    asyncio.run(check())


def test_a_consumer_takes_deltas_in_their_order_and_never_the_last() -> None:
    async def check() -> None:
        stream, _ = make_stream()
        seen: list[tuple[str, str]] = []
        is_open = True

        def consumer(item: SampleDelta) -> bool:
            if is_open:
                seen.append(("direct", item.text))
            return is_open

        async def read() -> None:
            async for item in stream:
                seen.append(("read", item.text))

        stream.divert(consumer)
        stream.put(delta("a"))
        reader = asyncio.ensure_future(read())
        await asyncio.sleep(0)
        stream.put(delta("b"))
        is_open = False
        stream.put(delta("c"))
        is_open = True
        # The reader has not had its turn for "c", so that "d" must wait behind it.
        stream.put(delta("d"))
        await asyncio.sleep(0)
        stream.put(delta("e"))
        stream.put(delta("f", finish="stop"))
        await reader
        assert seen == [("read", "a"), ("direct", "b"), ("read", "cd"), ("direct", "e"), ("read", "f")]

    asyncio.run(check())


def test_an_error_of_the_consumer_is_the_readers() -> None:
    async def check() -> None:
        stream, ended = make_stream()

        def consumer(item: SampleDelta) -> bool:
            raise UnicodeEncodeError("utf-8", item.text, 0, 1, "no text")

        stream.divert(consumer)
        reader = asyncio.ensure_future(read_all(stream))
        await asyncio.sleep(0)
        stream.put(delta("a"))
        with pytest.raises(UnicodeEncodeError):
            await reader
        assert ended == [stream]

    asyncio.run(check())
