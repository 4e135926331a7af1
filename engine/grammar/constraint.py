"""Constraint: which tokens one sample may draw next, from its thoughts to the end of its structured answer."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..structured_output import ReasoningSpan
from .vocabulary import Vocabulary

# Line breaks that a model may put between its thoughts and the answer.
_MAX_GAP = 2


class Constraint:
    """Follows one sample token by token; lives as long as the sample, so a preemption changes nothing.

    ``matcher`` is a llguidance matcher at the grammar's start, None without a grammar; ``eos_token_ids`` end a text.
    """

    def __init__(
        self, matcher: Any, span: ReasoningSpan | None, vocabulary: Vocabulary, eos_token_ids: frozenset[int]
    ) -> None:
        self._matcher = matcher
        self._vocabulary = vocabulary
        self._eos = eos_token_ids
        thinking = span is not None and not span.closed
        strict = matcher is not None
        self._thoughts = Thoughts(span, vocabulary, strict=strict) if span is not None and thinking else None
        self._gap = _MAX_GAP if self._thoughts is not None else 0
        self.error: str | None = None

    @property
    def is_complete(self) -> bool:
        """True once the grammar takes no further token."""
        matcher = self._matcher
        return self._is_answering and matcher is not None and matcher.is_stopped() and not matcher.is_error()

    @property
    def _is_answering(self) -> bool:
        return self._thoughts is None or self._thoughts.are_over

    @property
    def _in_gap(self) -> bool:
        """True between thoughts and an answer that has not begun."""
        thoughts = self._thoughts
        return self._gap > 0 and thoughts is not None and thoughts.have_begun and thoughts.are_over

    def fill(self, mask: NDArray[np.int32]) -> bool:
        """Set the bits of the tokens that may come next in ``mask`` [ceil(V/32)]; False where any may (mask untouched).

        A grammar that fails here, say because one token costs too much, allows nothing and leaves ``error``.
        """
        thoughts = self._thoughts
        if thoughts is not None and not thoughts.are_over:
            forced = thoughts.next_forced()
            if forced is not None:
                mask[:] = 0
                _set_bits(mask, (forced,))
                return True
            if self._matcher is None:
                return False
            if thoughts.have_begun:
                mask[:] = -1
                _clear_bits(mask, self._eos)
                return True
        if self._matcher is None:
            return False
        self._fill_by_grammar(mask)
        if self.error is None:
            self._add_openings(mask)
        return True

    def advance(self, token: int) -> None:
        """Take in a drawn token."""
        thoughts = self._thoughts
        if thoughts is not None and not thoughts.are_over:
            if thoughts.advance(token):
                return
        elif self._in_gap and token in self._vocabulary.newlines:
            self._gap -= 1
            return
        self._gap = 0
        if self._matcher is not None and token not in self._eos and not self._matcher.consume_token(token):
            self.error = self._matcher.get_error() or f"token {token} does not follow the grammar"

    def _fill_by_grammar(self, mask: NDArray[np.int32]) -> None:
        self._matcher.unsafe_compute_mask_ptr(mask.ctypes.data, mask.nbytes)
        if self._matcher.is_error():
            self.error = self._matcher.get_error()
            mask[:] = 0

    def _add_openings(self, mask: NDArray[np.int32]) -> None:
        """Where the answer has not begun: line breaks after thoughts, or the token that begins thoughts."""
        thoughts = self._thoughts
        if thoughts is None:
            return
        if self._in_gap:
            _set_bits(mask, self._vocabulary.newlines)
        elif not thoughts.are_over and thoughts.start_token is not None:
            _set_bits(mask, (thoughts.start_token,))


class Thoughts:
    """A model's thoughts, recognised by the bytes around them; ends them when their budget is spent.

    ``strict``: a grammar follows, so only the very token of the start begins thoughts; anything else is the answer's.
    """

    def __init__(self, span: ReasoningSpan, vocabulary: Vocabulary, *, strict: bool) -> None:
        self._span = span
        self._vocabulary = vocabulary
        self._strict = strict
        self._seen = b""
        self._start, self._end = span.start.encode(), span.end.encode()
        self._num_tokens = 0
        self._forced: list[int] = []
        start = vocabulary.encode(span.start)
        self.start_token = start[0] if len(start) == 1 else None
        self.have_begun = span.opened
        self.are_over = strict and not span.opened and self.start_token is None

    def next_forced(self) -> int | None:
        """The token that has to come now because the budget is spent, None where any may."""
        budget = self._span.budget
        if not self._forced and self.have_begun and budget is not None and self._num_tokens >= budget:
            self._forced = self._vocabulary.encode(self._span.closing or self._span.end)
        return self._forced[0] if self._forced else None

    def advance(self, token: int) -> bool:
        """Take in a token; False where it belongs to the answer."""
        if self._forced:
            self._forced.pop(0)
            self.are_over = not self._forced
            return True
        self._seen += self._vocabulary.token_bytes(token)
        if not self.have_begun:
            return self._begin(token)
        self._num_tokens += 1
        if self._end in self._seen:
            self.are_over = True
        self._seen = self._seen[-len(self._end) :]
        return True

    def _begin(self, token: int) -> bool:
        text = self._seen.lstrip()
        if token == self.start_token or (not self._strict and text.startswith(self._start)):
            self.have_begun, self._seen = True, b""
        elif self._strict or not self._start.startswith(text):
            self.are_over = True
            return False
        return True


def _set_bits(mask: NDArray[np.int32], tokens: frozenset[int] | tuple[int, ...]) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        if token // 32 < len(words):
            words[token // 32] |= np.uint32(1 << token % 32)


def _clear_bits(mask: NDArray[np.int32], tokens: frozenset[int]) -> None:
    words = mask.view(np.uint32)
    for token in tokens:
        if token // 32 < len(words):
            words[token // 32] &= np.uint32(~(1 << token % 32) & 0xFFFFFFFF)
