"""A chat session with the engine in this process."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

from ..engine.config import EngineConfig
from ..engine.core.engine_core import EngineCore
from ..engine.input_processor import InputProcessor
from ..engine.interrupt import DelayedInterrupt
from ..engine.messages import AbortRequest
from ..engine.output_processor import OutputProcessor
from ..engine.text_side import find_model, load_text_side
from ..errors import TwofoldError


class EngineSession:
    """Answers from an engine that is stepped here; ``options`` lie over the sampling defaults that its model ships."""

    def __init__(self, config: EngineConfig, options: dict[str, Any]) -> None:
        self._tokenizer, generation = load_text_side(find_model(config), config)
        self._core = EngineCore(config)
        self._inputs = InputProcessor(self._tokenizer, self._core.info(), generation)
        self._outputs = OutputProcessor(self._tokenizer)
        self._params = self._inputs.default_params(**{"max_tokens": None, **options})
        self._numbers = itertools.count()

    def stream(self, messages: list[dict[str, str]]) -> Iterator[str]:
        """One answer in pieces. Ctrl-C takes effect between steps; the request is then taken out of the engine."""
        request_id = f"chat-{next(self._numbers)}"
        token_ids = self._tokenizer.encode_chat(messages)
        request = self._inputs.make_request(token_ids, self._params, request_id=request_id)
        self._core.add_request(request)
        self._outputs.add(request)
        try:
            with DelayedInterrupt() as interrupt:
                while request_id in self._outputs:
                    interrupt.check()
                    yield from self._step()
        finally:
            self._outputs.remove(request_id)
            self._core.abort(AbortRequest(request_id=request_id))

    def _step(self) -> Iterator[str]:
        deltas, aborts = self._outputs.process(self._core.step())
        for abort in aborts:
            self._core.abort(abort)
        for delta in deltas:
            if delta.error:
                raise TwofoldError(delta.error)
            if delta.text:
                yield delta.text
