"""An echoed prompt: its text, and where each of its tokens stands in it."""

from __future__ import annotations

import codecs
from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from .logprobs import show_bytes

if TYPE_CHECKING:
    from ..engine.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """``tokens[i]`` begins at character ``offsets[i]`` of ``text``; hidden tokens take no room."""

    text: str
    tokens: list[str]
    offsets: list[int]


def echoed_prompt(
    tokenizer: Tokenizer, token_ids: Sequence[int], text: str | None, hidden: Collection[int]
) -> EchoedPrompt:
    """The prompt as its client sees it again; ``text`` is what the client wrote, None where it sent token ids."""
    if text is None:
        text = tokenizer.decode(token_ids, skip_special_tokens=bool(hidden))
    pieces = [tokenizer.token_bytes(token) for token in token_ids]
    shown = [b"" if token in hidden else piece for token, piece in zip(token_ids, pieces, strict=True)]
    first = next((index for index, piece in enumerate(shown) if piece), None)
    joined = b"".join(shown)
    # Tokenizers that mark word starts put a space before the first word, which is not in the text.
    if first is not None and joined[:1] == b" " and joined[1:] == text.encode("utf-8", "replace"):
        pieces[first] = shown[first] = shown[first][1:]
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    offsets, position = [], 0
    for piece in shown:
        offsets.append(position)
        position += len(decoder.decode(piece))
    return EchoedPrompt(text, [show_bytes(piece) for piece in pieces], offsets)
