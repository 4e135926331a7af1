"""AsyncEngineClient: requests to a core in another process, answers as they come, from one event loop."""

from __future__ import annotations

import asyncio
import concurrent.futures
import functools
import itertools
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from ...errors import EngineBusyError, EngineDeadError, RequestError, TwofoldError
from ...log import get_logger
from ..config import EngineConfig
from ..input_processor import InputProcessor
from ..messages import AbortRequest, EngineInfo, EngineRequest, EngineStats, TokenOutput
from ..output_processor import OutputProcessor
from ..outputs import SampleDelta
from ..sampling_params import SamplingParams
from ..structured_output import StructuredOutput
from ..text_side import find_model, load_text_side
from . import wire
from .core_handle import CoreHandle
from .core_process import DEFAULT_CORE
from .request_stream import RequestStream

logger = get_logger(__name__)

# Longer texts are tokenized in a thread, so that the loop stays free for the other requests.
_INLINE_CHARACTERS = 2000
# Grammars are checked in threads of their own, so that many costly ones do not hold up long prompts.
_GRAMMAR_THREADS = 2
_GRAMMAR_SECONDS = 10.0


class AsyncEngineClient:
    """One engine, seen from an event loop.

    ``tokenizer`` and ``generation`` (the model's sampling defaults) are read from the model unless given.
    ``core_factory`` is ``module:callable`` and makes the core in its process. ``max_open_requests`` bounds the requests
    taken at once, None for no bound. ``hang_timeout`` is the longest that one step of the core may take, in seconds,
    before the core counts as dead.
    """

    def __init__(
        self,
        config: EngineConfig,
        *,
        tokenizer: Any = None,
        generation: Mapping[str, Any] | None = None,
        core_factory: str = DEFAULT_CORE,
        max_open_requests: int | None = None,
        hang_timeout: float = 600.0,
    ) -> None:
        self.config = config
        self.tokenizer = tokenizer
        self._generation = generation
        self._core_factory = core_factory
        self._max_open_requests = max_open_requests
        self._hang_timeout = hang_timeout
        self._handle: CoreHandle | None = None
        self._info: EngineInfo | None = None
        self._inputs: InputProcessor | None = None
        self._outputs: OutputProcessor | None = None
        # By the name that the core knows a request by: a late output of a closed request must not reach a later one
        # that was given the same request_id.
        self._streams: dict[str, RequestStream] = {}
        self._core_ids: dict[str, str] = {}
        self._stats = EngineStats()
        self._error: TwofoldError | None = None
        self._draining = False
        self._numbers = itertools.count()
        self._submissions = itertools.count()
        self._grammar_threads = concurrent.futures.ThreadPoolExecutor(_GRAMMAR_THREADS, "twofold-grammar")
        self._idle = asyncio.Event()
        self._idle.set()

    @classmethod
    async def start(cls, config: EngineConfig, **options: Any) -> AsyncEngineClient:
        """A client whose core is ready; ``options`` are those of the class."""
        client = cls(config, **options)
        await client.launch()
        return client

    async def launch(self) -> None:
        """Fetch the model where needed, start the core and load the tokenizer side by side, and wait for both.

        Raises what the core raised while starting (ConfigError, ModelNotFoundError, ...), or EngineDeadError.
        """
        core: asyncio.Task[EngineInfo] | None = None
        try:
            files = None if self.tokenizer is not None else await asyncio.to_thread(find_model, self.config)
            self._handle = CoreHandle(self._receive, self._die, hang_timeout=self._hang_timeout)
            core = asyncio.create_task(self._handle.start(self.config, self._core_factory))
            if files is not None:
                self.tokenizer, self._generation = await asyncio.to_thread(load_text_side, files, self.config)
                await asyncio.to_thread(self.tokenizer.prepare_chat)
            self._info = await core
            self._inputs = InputProcessor(self.tokenizer, self._info, self._generation)
            self._outputs = OutputProcessor(self.tokenizer)
        except BaseException as error:
            self._error = error if isinstance(error, TwofoldError) else EngineDeadError("the engine did not start")
            if self._handle is not None:
                self._handle.kill()
            if core is not None:
                core.cancel()
                # Its own error, if any, comes second to the one that is on its way.
                await asyncio.gather(core, return_exceptions=True)
            raise

    @property
    def info(self) -> EngineInfo:
        """What the core said about itself when it was ready."""
        if self._info is None:
            raise EngineBusyError("the engine is still loading its model")
        return self._info

    @property
    def inputs(self) -> InputProcessor:
        """Makes and checks requests for this engine."""
        if self._inputs is None:
            raise EngineBusyError("the engine is still loading its model")
        return self._inputs

    @property
    def is_ready(self) -> bool:
        """True while new requests are taken: loaded, alive and not draining."""
        return self._inputs is not None and self._error is None and not self._draining

    @property
    def errored(self) -> bool:
        """True once the core has died or failed to start."""
        return self._error is not None

    @property
    def error(self) -> TwofoldError | None:
        """Why the core is dead."""
        return self._error

    @property
    def core_pid(self) -> int | None:
        """Process id of the core, None before `launch`."""
        return None if self._handle is None else self._handle.pid

    @property
    def num_open_requests(self) -> int:
        """Requests that have not finished."""
        return len(self._streams)

    def stats(self) -> EngineStats:
        """The core's latest statistics: at most a quarter of a second old while it works, exact when it is idle."""
        return self._stats

    async def make_request(
        self, prompt: str | Sequence[int], params: SamplingParams, *, request_id: str | None = None, **options: Any
    ) -> EngineRequest:
        """Check and tokenize a prompt without sending it (`InputProcessor.make_request`), long texts in a thread."""
        self._check_open()
        inputs = self.inputs
        request_id = request_id or f"request-{next(self._numbers)}"
        make = functools.partial(inputs.make_request, prompt, params, request_id=request_id, **options)
        if params.structured is not None:
            return await self._check_grammar(params.structured, make)
        if isinstance(prompt, str) and len(prompt) > _INLINE_CHARACTERS:
            return await asyncio.to_thread(make)
        return make()

    async def generate(
        self, prompt: str | Sequence[int], params: SamplingParams, request_id: str | None = None, **options: Any
    ) -> AsyncIterator[SampleDelta]:
        """The request's deltas, in order for each sample; closing the iterator aborts what is unfinished.

        ``options`` are those of `InputProcessor.make_request`. Raises RequestError or ContextLengthError for a wrong
        request, EngineBusyError while loading, draining or full, EngineDeadError as soon as the core is dead. A failure
        inside the engine that concerns one sample is a last delta with finish_reason ``error``.
        """
        request = await self.make_request(prompt, params, request_id=request_id, **options)
        stream = self.submit(request)
        try:
            async for delta in stream:
                yield delta
        finally:
            stream.close()

    def submit(self, request: EngineRequest) -> RequestStream:
        """Send a request from `make_request` to the core; the caller reads the stream and closes it."""
        self._check_open()
        name = request.request_id
        if name in self._core_ids:
            raise RequestError(f"request_id {name!r} is in use", param="request_id")
        assert self._outputs is not None
        core_id = f"{name}#{next(self._submissions)}"
        request = replace(request, request_id=core_id)
        stream = RequestStream(name, request.params.n, functools.partial(self._forget, core_id))
        self._outputs.add(request)
        self._streams[core_id] = stream
        self._core_ids[name] = core_id
        self._idle.clear()
        self._send(wire.Add(request))
        return stream

    def abort(self, request_id: str) -> None:
        """Stop a request; its unfinished samples end with finish_reason ``abort``. Unknown ids are ignored."""
        core_id = self._core_ids.get(request_id)
        if core_id is not None:
            assert self._outputs is not None
            indices = self._outputs.open_samples(core_id)
            self._send(wire.Abort([AbortRequest(request_id=core_id)]))
            self._deliver([TokenOutput(request_id=core_id, index=i, finish_reason="abort") for i in indices])

    async def drain(self, timeout: float) -> bool:
        """Take no new requests and wait ``timeout`` seconds for the running ones; True where all have finished."""
        self._draining = True
        try:
            await asyncio.wait_for(self._idle.wait(), timeout)
        except asyncio.TimeoutError:
            return False
        return True

    async def shutdown(self, timeout: float = 5.0) -> None:
        """Stop the core, by force after ``timeout`` seconds; requests still open end with EngineDeadError."""
        self._draining = True
        self._fail_all(EngineDeadError("the engine is shutting down"))
        if self._handle is not None:
            await self._handle.stop(timeout)
        self._grammar_threads.shutdown(wait=False, cancel_futures=True)

    async def _check_grammar(self, structured: StructuredOutput, make: Callable[[], EngineRequest]) -> EngineRequest:
        loop = asyncio.get_running_loop()
        try:
            return await asyncio.wait_for(loop.run_in_executor(self._grammar_threads, make), _GRAMMAR_SECONDS)
        except asyncio.TimeoutError:
            raise structured.error(
                f"{structured.param} could not be checked within {_GRAMMAR_SECONDS:g} s; make it simpler"
            ) from None

    def _check_open(self) -> None:
        if self._error is not None:
            raise EngineDeadError(str(self._error))
        if self._inputs is None:
            raise EngineBusyError("the engine is still loading its model")
        if self._draining:
            raise EngineBusyError("the engine is shutting down and takes no new requests")
        if self._max_open_requests is not None and len(self._streams) >= self._max_open_requests:
            raise EngineBusyError(
                f"{len(self._streams)} requests are open, as many as max_open_requests allows; try again later"
            )

    def _send(self, message: wire.ToCore) -> None:
        assert self._handle is not None
        self._handle.send(message)

    def _receive(self, message: wire.FromCore) -> None:
        if isinstance(message, wire.Rejected):
            stream = self._streams.get(message.request_id)
            if stream is not None:
                stream.fail(wire.to_error(message.failure))
        elif isinstance(message, wire.Outputs):
            self._stats = message.stats or self._stats
            self._deliver(message.outputs)
            tokens = message.tokens
            if tokens.token_ids:
                assert self._outputs is not None
                rows = zip(*msgspec.structs.astuple(tokens), strict=True)
                self._hand_out(*self._outputs.process_tokens(rows))

    def _deliver(self, outputs: list[TokenOutput]) -> None:
        if outputs:
            assert self._outputs is not None
            self._hand_out(*self._outputs.process(outputs))

    def _hand_out(self, deltas: list[SampleDelta], aborts: list[AbortRequest]) -> None:
        for delta in deltas:
            stream = self._streams[delta.request_id]
            delta.request_id = stream.request_id
            stream.put(delta)
        if aborts:
            self._send(wire.Abort(aborts))

    def _forget(self, core_id: str, stream: RequestStream) -> None:
        """A stream has ended: with its last delta, by its reader, or with an error."""
        del self._streams[core_id], self._core_ids[stream.request_id]
        if not self._streams:
            self._idle.set()
        assert self._outputs is not None
        if core_id in self._outputs:
            self._outputs.remove(core_id)
            self._send(wire.Abort([AbortRequest(request_id=core_id)]))

    def _die(self, error: TwofoldError) -> None:
        logger.error("%s; open requests: %d", error, len(self._streams))
        self._error = error
        self._fail_all(error)

    def _fail_all(self, error: TwofoldError) -> None:
        for stream in list(self._streams.values()):
            stream.fail(EngineDeadError(str(error)))
