"""From token ids to text, one token at a time, exactly as if the whole sequence were decoded at once."""

from __future__ import annotations

import codecs
from collections.abc import Sequence
from typing import Protocol

from .sampling_params import SamplingParams

# A UTF-8 decoder finds its state again at every lead byte, which is at most three bytes before the end of a
# character that is not complete yet.
_LONGEST_INCOMPLETE = 3


class TokenDecoder(Protocol):
    """The part of a tokenizer that detokenizing needs."""

    @property
    def special_ids(self) -> frozenset[int]: ...

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str: ...

    def token_bytes(self, token_id: int) -> bytes: ...


class WholeTexts(dict[int, "str | None"]):
    """The text of each token seen so far, None for one that is no sequence of whole characters."""

    def __init__(self, tokenizer: TokenDecoder) -> None:
        super().__init__()
        self._tokenizer = tokenizer

    def __missing__(self, token: int) -> str | None:
        try:
            text: str | None = self._tokenizer.token_bytes(token).decode()
        except UnicodeDecodeError:
            text = None
        self[token] = text
        return text


class IncrementalDetokenizer:
    """Text of one sample: the joined increments are ``decode(prompt + ids)[len(decode(prompt)):]``.

    A token stands for bytes, and a character may be spread over several tokens: bytes wait until their character is
    complete or can no longer become one, which then shows as U+FFFD, as ``bytes.decode(errors="replace")`` does.
    Only the first visible token of a sequence depends on its place (tokenizers that mark word starts drop the first
    space there), so each token costs its own bytes and no text is decoded twice. ``texts``, which detokenizers of one
    tokenizer share, remembers the tokens that are whole characters: between characters one of them costs a look-up.
    """

    def __init__(
        self,
        tokenizer: TokenDecoder,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        texts: WholeTexts | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = WholeTexts(tokenizer) if texts is None else texts
        self._between = False
        self._hidden: frozenset[int] = tokenizer.special_ids if params.skip_special_tokens else frozenset()
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")
        self._at_start = True
        # A prompt that ends inside a character has shown one U+FFFD for it already.
        self._num_shown = 0
        self._prime(prompt_ids)

    def push(self, token_ids: Sequence[int]) -> str:
        """The text that these tokens complete; may be empty."""
        self._between = False
        return self._unseen(self._utf8.decode(b"".join([self._bytes(token) for token in token_ids])))

    def push_token(self, token: int) -> str:
        """`push` of one token."""
        if self._between and token not in self._hidden and (text := self._texts[token]) is not None:
            return text
        text = self.push((token,))
        self._between = not (self._at_start or self._num_shown or self._utf8.getstate()[0])
        return text

    def finish(self) -> str:
        """What was held back at the end of the sequence: an incomplete character is replaced."""
        return self._unseen(self._utf8.decode(b"", final=True))

    def _bytes(self, token: int) -> bytes:
        if token in self._hidden:
            return b""
        raw = self._tokenizer.token_bytes(token)
        if self._at_start:
            self._at_start = False
            return self._first_bytes(token, raw)
        return raw

    def _first_bytes(self, token: int, raw: bytes) -> bytes:
        try:
            raw.decode()
        except UnicodeDecodeError:
            return raw
        return self._tokenizer.decode([token], skip_special_tokens=False).encode()

    def _prime(self, prompt_ids: Sequence[int]) -> None:
        start = next((i for i, token in enumerate(prompt_ids) if token not in self._hidden), None)
        if start is None:
            return
        end, tail = len(prompt_ids), b""
        while end > start + 1 and len(tail) < _LONGEST_INCOMPLETE:
            end -= 1
            if prompt_ids[end] not in self._hidden:
                tail = self._tokenizer.token_bytes(prompt_ids[end]) + tail
        if len(tail) < _LONGEST_INCOMPLETE:
            tail = self._bytes(prompt_ids[start]) + tail
        self._at_start = False
        self._utf8.decode(tail)
        self._num_shown = 1 if self._utf8.getstate()[0] else 0

    def _unseen(self, text: str) -> str:
        if not self._num_shown or not text:
            return text
        self._num_shown = 0
        return text[1:]
