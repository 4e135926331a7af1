"""The engine's side of one HTTP request: its prompts started together, their deltas as one stream."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from dataclasses import replace

from ..engine.client import AsyncEngineClient
from ..engine.client.request_stream import RequestStream
from ..engine.messages import EngineRequest
from ..engine.outputs import SampleDelta
from ..errors import EngineBusyError, RequestError, TwofoldError
from .errors import GenerationError
from .metrics import Metrics, RequestTimer
from .schema import Usage, make_usage


class Generation:
    """Runs checked requests, one per prompt; choice ``i * n + s`` is sample ``s`` of prompt ``i``.

    Nothing has been sent to the engine before `deltas` is iterated, so a body with one bad prompt runs none of them.
    """

    def __init__(
        self, client: AsyncEngineClient, requests: Sequence[EngineRequest], metrics: Metrics, arrival: float
    ) -> None:
        self._client = client
        self._requests = requests
        self._metrics = metrics
        self._arrival = arrival
        self._num_samples = requests[0].params.n
        self._completion_tokens = [0] * (len(requests) * self._num_samples)
        self._cached_tokens = [0] * len(requests)

    @property
    def num_choices(self) -> int:
        return len(self._completion_tokens)

    @property
    def requests(self) -> Sequence[EngineRequest]:
        return self._requests

    def usage(self, *, with_output: bool = True, reasoning_tokens: int = 0) -> Usage:
        """Tokens so far: each prompt counts once, whatever ``n`` is."""
        return make_usage(
            sum(len(request.prompt_token_ids) for request in self._requests),
            sum(self._completion_tokens) if with_output else 0,
            sum(self._cached_tokens),
            reasoning_tokens,
        )

    def deltas(
        self, direct: Callable[[int, SampleDelta], bool] | None = None
    ) -> AsyncGenerator[tuple[int, SampleDelta], None]:
        """(choice index, delta) until all choices have finished; closing it aborts what is unfinished.

        ``direct`` is asked first, where whoever iterates has nothing left to do; what it takes (True) does not come
        out here. GenerationError where the engine gave up a sample.
        """
        return self._follow(0, direct) if len(self._requests) == 1 else self._merged()

    async def _follow(
        self, prompt: int, direct: Callable[[int, SampleDelta], bool] | None = None
    ) -> AsyncGenerator[tuple[int, SampleDelta], None]:
        """One prompt's deltas, counted and measured."""
        request = self._requests[prompt]
        stream = self._client.submit(request)
        timer = self._metrics.timer(request, self._arrival)
        prompt_first = request.params.prompt_logprobs is not None
        if direct is not None and not prompt_first:

            def take(delta: SampleDelta) -> bool:
                taken = direct(prompt * self._num_samples + delta.index, delta)
                if taken:
                    self._count(prompt, delta, timer)
                return taken

            stream.divert(take)
        try:
            async for delta in _prompt_first(stream) if prompt_first else stream:
                choice = self._count(prompt, delta, timer)
                if delta.finish_reason in ("error", "abort"):
                    # What came with the failure is shown before it: a slow reader's deltas arrive joined.
                    if delta.token_ids:
                        yield choice, replace(delta, finish_reason=None)
                    raise _failure(delta)
                yield choice, delta
        finally:
            stream.close()
            timer.close()

    def _count(self, prompt: int, delta: SampleDelta, timer: RequestTimer) -> int:
        """Take in the figures of one delta; its choice."""
        choice = prompt * self._num_samples + delta.index
        timer.observe(delta)
        self._completion_tokens[choice] = delta.num_completion_tokens
        if delta.num_cached_tokens > self._cached_tokens[prompt]:
            self._cached_tokens[prompt] = delta.num_cached_tokens
        return choice

    async def _merged(self) -> AsyncGenerator[tuple[int, SampleDelta], None]:
        queue: asyncio.Queue[tuple[int, SampleDelta] | BaseException | None] = asyncio.Queue()

        async def pump(prompt: int) -> None:
            try:
                async with aclosing(self._follow(prompt)) as items:
                    async for item in items:
                        queue.put_nowait(item)
                queue.put_nowait(None)
            except Exception as error:
                queue.put_nowait(error)

        tasks = [asyncio.ensure_future(pump(prompt)) for prompt in range(len(self._requests))]
        try:
            num_open = len(tasks)
            while num_open:
                item = await queue.get()
                if isinstance(item, BaseException):
                    raise item
                if item is None:
                    num_open -= 1
                else:
                    yield item
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)


def _failure(delta: SampleDelta) -> TwofoldError:
    if delta.finish_reason == "abort":
        return EngineBusyError(delta.error or "the engine stopped this answer before it was complete")
    if delta.error_param is not None:
        return RequestError(delta.error or "the request is wrong", param=delta.error_param)
    return GenerationError(delta.error or "the engine failed while generating this answer")


async def _prompt_first(stream: RequestStream) -> AsyncGenerator[SampleDelta, None]:
    """The same deltas, none before the prompt's log-probabilities: an echo begins each choice with them."""
    held: list[SampleDelta] = []
    async for delta in stream:
        held.append(delta)
        if delta.prompt_logprobs is not None or delta.finish_reason == "error":
            break
    for delta in sorted(held, key=lambda item: item.index):
        yield delta
    async for delta in stream:
        yield delta
