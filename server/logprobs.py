"""Log-probabilities as the two OpenAI layouts show them, always as finite numbers."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..engine.messages import TokenLogprobs
from .chat_schema import TokenCandidate, TokenEntry
from .completion_schema import CompletionLogprobs, PromptCandidate, PromptLogprobs

if TYPE_CHECKING:
    from ..engine.tokenizer import Tokenizer

# JSON has no infinity; OpenAI writes this for a token that cannot occur.
LOGPROB_FLOOR = -9999.0


def finite(logprob: float) -> float:
    """``logprob``, or the floor for minus infinity and NaN."""
    return logprob if logprob > LOGPROB_FLOOR else LOGPROB_FLOOR


class TokenTexts:
    """How single tokens are shown; remembers each answer, for the same tokens come again and again."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._tokenizer = tokenizer
        self._known: dict[int, tuple[str, list[int]]] = {}

    def raw(self, token: int) -> bytes:
        """The bytes of a token; those of special tokens spell their names."""
        return self._tokenizer.token_bytes(token)

    def get(self, token: int) -> tuple[str, list[int]]:
        """Text and UTF-8 bytes of a token; what is not whole characters reads ``bytes:\\xe4``, as OpenAI writes it."""
        known = self._known.get(token)
        if known is None:
            raw = self._tokenizer.token_bytes(token)
            known = self._known[token] = (show_bytes(raw), list(raw))
        return known


def show_bytes(raw: bytes) -> str:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{value:02x}" for value in raw)


def chat_entries(
    tokens: TokenTexts, logprobs: Sequence[TokenLogprobs], num_top: int, hidden: frozenset[int]
) -> list[TokenEntry]:
    """Chat layout. A ``hidden`` token (special ones are not shown) has no bytes, so joined bytes give the content."""
    entries = []
    for item in logprobs:
        text, raw = tokens.get(item.token_id)
        top = []
        for token, logprob in item.top[:num_top]:
            other_text, other_raw = tokens.get(token)
            top.append(TokenCandidate(token=other_text, logprob=finite(logprob), bytes=other_raw))
        shown = [] if item.token_id in hidden else raw
        entries.append(TokenEntry(token=text, logprob=finite(item.logprob), bytes=shown, top_logprobs=top))
    return entries


def completion_logprobs(
    tokens: TokenTexts,
    logprobs: Sequence[TokenLogprobs | None],
    texts: Sequence[str],
    offsets: Sequence[int],
    num_top: int,
) -> CompletionLogprobs:
    """Completions layout of tokens shown as ``texts`` at ``offsets``; an entry of None is a token without condition."""
    return CompletionLogprobs(
        tokens=list(texts),
        token_logprobs=[None if item is None else finite(item.logprob) for item in logprobs],
        top_logprobs=[None if item is None else _top_by_text(tokens, item, num_top) for item in logprobs],
        text_offset=list(offsets),
    )


def _top_by_text(tokens: TokenTexts, item: TokenLogprobs, num_top: int) -> dict[str, float]:
    """The best candidates and the token itself; of tokens that read the same, the most probable."""
    result: dict[str, float] = {}
    for token, logprob in [*item.top[:num_top], (item.token_id, item.logprob)]:
        result.setdefault(tokens.get(token)[0], finite(logprob))
    return result


def prompt_logprobs(tokens: TokenTexts, logprobs: Sequence[TokenLogprobs | None], num_top: int) -> PromptLogprobs:
    """The ``prompt_logprobs`` extension: per prompt token, token id -> logprob, rank and text; the first is None."""
    result: PromptLogprobs = []
    for item in logprobs:
        if item is None:
            result.append(None)
            continue
        row = {
            token: PromptCandidate(logprob=finite(logprob), rank=rank, decoded_token=tokens.get(token)[0])
            for rank, (token, logprob) in enumerate(item.top[:num_top], start=1)
        }
        own = PromptCandidate(logprob=finite(item.logprob), rank=item.rank, decoded_token=tokens.get(item.token_id)[0])
        row.setdefault(item.token_id, own)
        result.append(row)
    return result
