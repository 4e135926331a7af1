"""What bytes each token stands for."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from functools import cached_property

from tokenizers import AddedToken
from tokenizers import Tokenizer as Pipeline

BYTE_TOKEN = re.compile(r"<0x([0-9A-Fa-f]{2})>")
SPACE_MARK = "▁"
# Of what the pipeline takes for an id.
_LARGEST_ID = 1 << 32


def byte_alphabet() -> dict[str, int]:
    """GPT-2's alphabet: the printable character that stands for each byte in a byte-level vocabulary."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    table = {chr(code): code for code in printable}
    others = (byte for byte in range(256) if byte not in set(printable))
    return table | {chr(256 + index): byte for index, byte in enumerate(others)}


class TokenBytes:
    """Bytes per token id, each made on first use: all of a large vocabulary would hold up the first answer.

    The decoder of the pipeline says which alphabet the vocabulary uses.
    """

    def __init__(self, pipeline: Pipeline, added: Mapping[int, AddedToken]) -> None:
        steps = _decoder_steps(pipeline)
        self._byte_level = "ByteLevel" in steps
        self._byte_fallback = "ByteFallback" in steps
        self._alphabet = byte_alphabet()
        self._pipeline = pipeline
        self._added = {index: token.content for index, token in added.items()}
        self._known: dict[int, bytes] = {}

    def __getitem__(self, token_id: int) -> bytes:
        known = self._known.get(token_id)
        if known is None:
            token = self._pipeline.id_to_token(token_id) if 0 <= token_id < _LARGEST_ID else None
            known = self._known[token_id] = b"" if token is None else self._convert(token_id, token)
        return known

    @cached_property
    def longest(self) -> int:
        """Bytes of the longest token, at least 1."""
        longest = 1
        vocabulary = self._pipeline.get_vocab(with_added_tokens=True)
        # A token never stands for more bytes than its name has.
        for size, index in sorted(((len(name.encode()), index) for name, index in vocabulary.items()), reverse=True):
            if size <= longest:
                break
            longest = max(longest, len(self[index]))
        return longest

    def _convert(self, index: int, token: str) -> bytes:
        if index in self._added:
            return self._added[index].encode("utf-8")
        if self._byte_level and all(character in self._alphabet for character in token):
            return bytes(self._alphabet[character] for character in token)
        if self._byte_level:
            return token.encode("utf-8")
        if self._byte_fallback and (match := BYTE_TOKEN.fullmatch(token)):
            return bytes([int(match[1], 16)])
        return token.replace(SPACE_MARK, " ").encode("utf-8")


def _decoder_steps(pipeline: Pipeline) -> set[str]:
    """Names of the decoder's steps."""
    if pipeline.decoder is None:
        return set()
    state = json.loads(pipeline.decoder.__getstate__())
    return {step["type"] for step in state.get("decoders", [])} | {state["type"]}
