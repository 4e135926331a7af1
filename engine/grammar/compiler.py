"""Compiler: grammars built once each, in a thread of their own, so that the steps of other requests go on."""

from __future__ import annotations

from collections import OrderedDict
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

from ...errors import RequestError, TwofoldError
from ...platforms import cpu_threads
from ..sampling_params import SamplingParams
from ..structured_output import StructuredOutput
from .constraint import Constraint
from .grammar_text import cannot_build, grammar_text, llguidance, parser_limits
from .vocabulary import Vocabulary

_CACHED_GRAMMARS = 64


class GrammarCompiler:
    """Makes the constraints of requests. The most recent grammars are kept, compiled.

    ``vocabulary`` None: the core has no tokenizer, and constrained requests are refused.
    """

    def __init__(self, vocabulary: Vocabulary | None, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        self._vocabulary = vocabulary
        self._vocab_size = vocab_size
        self._eos = eos_token_ids
        self._tokenizer: Any = None
        self._cache: OrderedDict[StructuredOutput, Any] = OrderedDict()
        self._thread: ThreadPoolExecutor | None = None

    def start(self, params: SamplingParams) -> Future[list[Constraint]] | None:
        """Begin to make the ``params.n`` constraints of a request; None where it needs none.

        The future raises RequestError where the grammar cannot be built. RequestError at once without a vocabulary.
        """
        if params.structured is None and params.reasoning is None:
            return None
        if self._vocabulary is None:
            name = "structured" if params.structured is not None else "reasoning"
            raise RequestError(f"{name} needs the model's tokenizer, and this engine was made without", param=name)
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "twofold-grammar", initializer=cpu_threads.leave_team)
        return self._thread.submit(self._make, params)

    def close(self) -> None:
        """Drop what has not been compiled yet."""
        if self._thread is not None:
            self._thread.shutdown(wait=False, cancel_futures=True)

    def _make(self, params: SamplingParams) -> list[Constraint]:
        assert self._vocabulary is not None
        try:
            matcher = None if params.structured is None else self._compiled(params.structured)
        except TwofoldError:
            raise
        except Exception as error:  # llguidance raises what its Rust side panics with
            assert params.structured is not None
            raise cannot_build(params.structured, str(error)) from None
        return [
            Constraint(None if matcher is None else matcher.deep_copy(), params.reasoning, self._vocabulary, self._eos)
            for _ in range(params.n)
        ]

    def _compiled(self, structured: StructuredOutput) -> Any:
        """A matcher at the start of the grammar, never advanced itself."""
        if structured in self._cache:
            self._cache.move_to_end(structured)
            return self._cache[structured]
        assert self._vocabulary is not None
        if self._tokenizer is None:
            self._tokenizer = self._vocabulary.grammar_tokenizer(self._vocab_size, self._eos)
        text = grammar_text(structured, self._vocabulary.special_tokens)
        matcher = llguidance().LLMatcher(self._tokenizer, text, limits=parser_limits(), log_level=0)
        if matcher.is_error():
            raise cannot_build(structured, matcher.get_error())
        self._cache[structured] = matcher
        while len(self._cache) > _CACHED_GRAMMARS:
            self._cache.popitem(last=False)
        return matcher
