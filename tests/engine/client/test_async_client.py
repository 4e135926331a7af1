"""Requests through a core in another process: answers, ends, refusals and what they leave behind."""

from __future__ import annotations

import asyncio
import contextlib
import threading

import pytest
from counting_core import MAX_MODEL_LEN, ByteTokenizer
from engine_client import collect, counting_client, until, with_client
from twofold.engine.client import AsyncEngineClient
from twofold.engine.sampling_params import SamplingParams
from twofold.errors import ContextLengthError, EngineBusyError, EngineDeadError, RequestError

FOREVER = SamplingParams(max_tokens=4000, ignore_eos=True)


def text_of(deltas: list) -> str:
    return "".join(delta.text for delta in deltas)


def test_text_ends_and_counts() -> None:
    async def check(client: AsyncEngineClient) -> None:
        assert client.is_ready and not client.errored
        assert client.info.max_model_len == MAX_MODEL_LEN
        deltas = await collect(client.generate("abc", SamplingParams(max_tokens=5)))
        assert (text_of(deltas), deltas[-1].finish_reason) == ("defgh", "length")
        assert (deltas[-1].num_prompt_tokens, deltas[-1].num_completion_tokens) == (3, 5)
        deltas = await collect(client.generate([97], SamplingParams(max_tokens=20, stop=("de",))))
        assert (text_of(deltas), deltas[-1].finish_reason, deltas[-1].stop_reason) == ("bc", "stop", "de")
        await until(lambda: client.stats().num_running == 0)
        assert client.num_open_requests == 0

    with_client(check)


def test_many_requests_and_samples_at_once() -> None:
    async def check(client: AsyncEngineClient) -> None:
        async def one(number: int) -> None:
            first = chr(ord("A") + number % 26)
            deltas = await collect(client.generate(first, SamplingParams(max_tokens=30, n=1 + number % 3)))
            for index in range(1 + number % 3):
                mine = [delta for delta in deltas if delta.index == index]
                assert text_of(mine) == "".join(chr(ord(first) + 1 + i) for i in range(30))
                assert [delta.finish_reason is not None for delta in mine] == [False] * (len(mine) - 1) + [True]

        await asyncio.gather(*[one(number) for number in range(100)])
        assert client.num_open_requests == 0

    with_client(check)


def test_on_uvloop() -> None:
    uvloop = pytest.importorskip("uvloop")

    async def check() -> None:
        client = counting_client()
        await client.launch()
        assert text_of(await collect(client.generate("a", SamplingParams(max_tokens=3)))) == "bcd"
        await client.shutdown()

    with contextlib.closing(uvloop.new_event_loop()) as loop:
        loop.run_until_complete(check())


async def leave_early(client: AsyncEngineClient) -> None:
    deltas = client.generate("a", FOREVER)
    await anext(deltas)
    await deltas.aclose()


async def cancel_reader(client: AsyncEngineClient) -> None:
    reader = asyncio.ensure_future(collect(client.generate("a", FOREVER)))
    await until(lambda: client.stats().num_running == 1)
    reader.cancel()
    await asyncio.gather(reader, return_exceptions=True)


async def abort_by_id(client: AsyncEngineClient) -> None:
    reader = asyncio.ensure_future(collect(client.generate("a", FOREVER, "mine")))
    await until(lambda: client.stats().num_running == 1)
    client.abort("mine")
    client.abort("unknown")
    deltas = await reader
    assert [delta.finish_reason for delta in deltas[:-1]] == [None] * (len(deltas) - 1)
    assert deltas[-1].finish_reason == "abort"


async def close_unread_stream(client: AsyncEngineClient) -> None:
    client.submit(await client.make_request("a", FOREVER)).close()


@pytest.mark.parametrize("leave", [leave_early, cancel_reader, abort_by_id, close_unread_stream])
def test_leaving_aborts_in_the_core(leave) -> None:
    async def check(client: AsyncEngineClient) -> None:
        await leave(client)
        assert client.num_open_requests == 0
        steps = -1
        while steps != client.stats().num_steps or client.stats().num_running:
            steps = client.stats().num_steps
            await asyncio.sleep(0.3)
        assert steps < 4000
        assert text_of(await collect(client.generate("a", SamplingParams(max_tokens=1)))) == "b"

    with_client(check, "SlowCore")


def test_slow_reader_is_given_joined_deltas() -> None:
    async def check(client: AsyncEngineClient) -> None:
        deltas = []
        async for delta in client.generate("a", SamplingParams(max_tokens=3000, ignore_eos=True)):
            deltas.append(delta)
            await asyncio.sleep(0.05)
        assert sum(len(delta.token_ids) for delta in deltas) == 3000
        assert len(deltas) < 1500

    with_client(check)


def test_refusals_leave_nothing_behind() -> None:
    async def check(client: AsyncEngineClient) -> None:
        wrong = [
            ("", SamplingParams(), RequestError),
            ([999], SamplingParams(), RequestError),
            ("a", SamplingParams(max_tokens=MAX_MODEL_LEN), ContextLengthError),
            ("a" * 5_000_000, SamplingParams(), ContextLengthError),
            ([255], SamplingParams(), ContextLengthError),
        ]
        for number in range(500):
            prompt, params, error = wrong[number % len(wrong)]
            with pytest.raises(error):
                await collect(client.generate(prompt, params))
        assert client.num_open_requests == 0
        assert len(client._outputs) == 0

    with_client(check)


def test_refusal_by_the_core_keeps_its_param() -> None:
    async def check(client: AsyncEngineClient) -> None:
        with pytest.raises(ContextLengthError, match="255 is one too many") as caught:
            await collect(client.generate([255], SamplingParams()))
        assert (caught.value.param, caught.value.code) == ("prompt", "context_length_exceeded")

    with_client(check)


def test_request_id_in_use_and_too_many_requests() -> None:
    async def check(client: AsyncEngineClient) -> None:
        streams = [client.submit(await client.make_request("a", FOREVER, request_id=name)) for name in ("x", "y")]
        with pytest.raises(EngineBusyError, match="2 requests are open"):
            await collect(client.generate("a", FOREVER))
        streams.pop().close()
        with pytest.raises(RequestError, match="'x' is in use"):
            await collect(client.generate("a", FOREVER, "x"))
        assert text_of(await collect(client.generate("a", SamplingParams(max_tokens=1), "y"))) == "b"

    with_client(check, "SlowCore", max_open_requests=2)


def test_a_request_id_taken_again_gets_nothing_of_its_forerunner() -> None:
    """The core is still computing for the closed request when the second one of that name arrives."""

    async def check(client: AsyncEngineClient) -> None:
        for _ in range(20):
            stream = client.submit(await client.make_request("a", FOREVER, request_id="again"))
            await anext(stream)
            stream.close()
            deltas = await collect(client.generate("x", SamplingParams(max_tokens=3), "again"))
            assert (text_of(deltas), deltas[-1].finish_reason) == ("yz{", "length")
            assert {delta.request_id for delta in deltas} == {"again"}
        assert client.num_open_requests == 0

    with_client(check, "SlowCore")


def test_failure_of_one_sample_spares_the_others() -> None:
    async def check(client: AsyncEngineClient) -> None:
        bad, good = await asyncio.gather(
            collect(client.generate("a", SamplingParams(max_tokens=10), "bad")),
            collect(client.generate("a", SamplingParams(max_tokens=10), "good")),
        )
        assert (text_of(bad), bad[-1].finish_reason, bad[-1].error) == ("bcde", "error", "bad row")
        assert (text_of(good), good[-1].finish_reason) == ("bcdefghijk", "length")
        assert client.is_ready

    with_client(check, "FailingSampleCore")


def test_long_texts_are_tokenized_off_the_loop() -> None:
    turns_taken = threading.Event()

    class SlowTokenizer(ByteTokenizer):
        max_token_length = 10

        def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
            assert turns_taken.wait(60), "the loop stands still meanwhile"
            return super().encode(text[:100])

    async def check(client: AsyncEngineClient) -> None:
        work = asyncio.ensure_future(collect(client.generate("a" * 10_000, SamplingParams(max_tokens=1))))
        for _ in range(20):
            await asyncio.sleep(0.01)
        turns_taken.set()
        assert text_of(await work) == "b"

    with_client(check, tokenizer=SlowTokenizer())


def test_drain_lets_running_requests_finish() -> None:
    async def check(client: AsyncEngineClient) -> None:
        reader = asyncio.ensure_future(collect(client.generate("a", SamplingParams(max_tokens=20))))
        await until(lambda: client.num_open_requests == 1)
        drained = asyncio.ensure_future(client.drain(100))
        await asyncio.sleep(0)
        assert not client.is_ready and not client.errored
        with pytest.raises(EngineBusyError, match="takes no new requests"):
            await collect(client.generate("a", SamplingParams()))
        assert await drained
        deltas = await reader
        assert (len(text_of(deltas)), deltas[-1].finish_reason) == (20, "length")

    with_client(check, "SlowCore")


def test_shutdown_ends_what_is_still_running() -> None:
    async def check(client: AsyncEngineClient) -> None:
        reader = asyncio.ensure_future(collect(client.generate("a", FOREVER)))
        await until(lambda: client.num_open_requests == 1)
        assert not await client.drain(0.1)
        await client.shutdown()
        with pytest.raises(EngineDeadError, match="shutting down"):
            await reader
        await client.shutdown()

    with_client(check, "SlowCore")


def test_before_the_start_nothing_is_taken() -> None:
    async def check() -> None:
        client = counting_client()
        assert not client.is_ready and not client.errored
        with pytest.raises(EngineBusyError, match="still loading"):
            await collect(client.generate("a", SamplingParams()))
        with pytest.raises(EngineBusyError, match="still loading"):
            _ = client.info

    asyncio.run(check())
