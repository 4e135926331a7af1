"""What a core knows of text: each token's bytes, for grammars and for the marks around a model's thoughts."""

from __future__ import annotations

import functools
from collections.abc import Callable, Collection
from typing import Any

from tokenizers import Tokenizer as Pipeline

from ..token_bytes import TokenBytes
from .grammar_text import llguidance


def last_token(pipeline: Pipeline) -> int:
    """The largest id, added tokens included."""
    return max(pipeline.get_vocab(with_added_tokens=True).values())


class Vocabulary:
    """Tokens of the tokenizer pipeline that ``load`` makes, on first use: without grammars nobody needs it.

    ``size`` counts ids, added tokens included.
    """

    def __init__(self, load: Callable[[], Pipeline], size: int) -> None:
        self._load = load
        self.size = size

    @functools.cached_property
    def _pipeline(self) -> Pipeline:
        return self._load()

    @functools.cached_property
    def _bytes(self) -> TokenBytes:
        return TokenBytes(self._pipeline, self._pipeline.get_added_tokens_decoder())

    @functools.cached_property
    def special_tokens(self) -> dict[str, int]:
        """Text to id."""
        added = self._pipeline.get_added_tokens_decoder()
        return {token.content: index for index, token in added.items() if token.special}

    def token_bytes(self, token: int) -> bytes:
        """The UTF-8 bytes of a token; none for an id that is no token."""
        return self._bytes[token]

    def encode(self, text: str) -> list[int]:
        """Ids of a text; a special token's text is that token."""
        return list(self._pipeline.encode(text, add_special_tokens=False).ids)

    @functools.cached_property
    def newlines(self) -> frozenset[int]:
        """Tokens that are one or two line breaks."""
        return frozenset(token for token in range(self.size) if self._bytes[token] in (b"\n", b"\n\n"))

    def grammar_tokenizer(self, vocab_size: int, eos_token_ids: Collection[int]) -> Any:
        """llguidance's tokenizer over ids below ``vocab_size``; the ids that end a text are ``eos_token_ids``.

        Costs some tenths of a second for a large vocabulary.
        """
        library = llguidance()
        ends = sorted(token for token in eos_token_ids if token < vocab_size)
        source = _TokenSource(self, vocab_size, ends)
        return library.LLTokenizer(library.TokenizerWrapper(source), n_vocab=vocab_size, eos_token=ends or None)


class _TokenSource:
    """A vocabulary as llguidance reads it: attributes of these names, and a call that tokenizes."""

    def __init__(self, vocabulary: Vocabulary, vocab_size: int, eos_token_ids: list[int]) -> None:
        self._vocabulary = vocabulary
        special = frozenset(vocabulary.special_tokens.values()) | set(eos_token_ids)
        self.tokens = [vocabulary.token_bytes(token) for token in range(vocab_size)]
        self.special_token_ids = sorted(token for token in special if token < vocab_size)
        self.bos_token_id = None
        # llguidance wants some end; without one of its own a vocabulary ends with a token that is never drawn.
        self.eos_token_id = eos_token_ids[0] if eos_token_ids else vocab_size - 1
        self._special = frozenset(self.special_token_ids)
        self._longest = max((len(token) for token in self.tokens), default=1)

    def __call__(self, text: str) -> list[int]:
        """Tokens whose bytes are those of ``text``: the tokenizer's own choice, else the longest at each place."""
        if not isinstance(text, str):
            raise TypeError("texts only")
        ids = self._vocabulary.encode(text)
        joined = b"".join(self.tokens[token] if token < len(self.tokens) else b"?" for token in ids)
        if joined == text.encode() and not self._special.intersection(ids):
            return ids
        return self._greedy(text.encode())

    def _greedy(self, raw: bytes) -> list[int]:
        ids, start = [], 0
        while start < len(raw):
            lengths = range(min(self._longest, len(raw) - start), 0, -1)
            found = next(
                (token for n in lengths if (token := self._by_bytes.get(raw[start : start + n])) is not None), None
            )
            if found is None:
                return []
            ids.append(found)
            start += len(self.tokens[found])
        return ids

    @functools.cached_property
    def _by_bytes(self) -> dict[bytes, int]:
        return {raw: token for token, raw in enumerate(self.tokens) if raw and token not in self._special}
