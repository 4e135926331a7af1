"""Byte-level BPE from its definition, in plain Python: split, spell bytes, merge the best-ranked pair until none is.

Reads a GGUF file's vocabulary with the gguf package itself. Slow and independent of the ``tokenizers`` library.
"""

from __future__ import annotations

import itertools
from pathlib import Path

import regex
from chain_model import byte_alphabet
from gguf import GGUFReader

# llama.cpp's pre-tokenizer "smollm": digits one by one, then GPT-2's pattern on what is left.
DIGIT = regex.compile(r"\p{N}")
GPT2 = regex.compile(r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+")


def split_digits(text: str) -> list[str]:
    """Every number character by itself, the text between them whole."""
    return [piece for piece in regex.split(r"(\p{N})", text) if piece]


class PlainBpe:
    """``encode`` for text without special tokens."""

    def __init__(self, path: Path) -> None:
        fields = GGUFReader(path).fields
        self.ids = {token: index for index, token in enumerate(fields["tokenizer.ggml.tokens"].contents())}
        merges = fields["tokenizer.ggml.merges"].contents()
        self.ranks = {tuple(merge.split(" ")): rank for rank, merge in enumerate(merges)}
        self.alphabet = byte_alphabet()

    def encode(self, text: str) -> list[int]:
        words = [word for piece in split_digits(text) for word in GPT2.findall(piece)]
        return [self.ids[token] for word in words for token in self._merge(word)]

    def _merge(self, word: str) -> list[str]:
        parts = [self.alphabet[byte] for byte in word.encode()]
        while len(parts) > 1:
            ranked = [(self.ranks.get(pair, 1 << 30), at) for at, pair in enumerate(itertools.pairwise(parts))]
            rank, at = min(ranked)
            if rank == 1 << 30:
                break
            parts[at : at + 2] = [parts[at] + parts[at + 1]]
        return parts
