"""A core that replays tokens at a given pace instead of computing them, and a byte tokenizer."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from typing import Any

from twofold.engine.config import EngineConfig
from twofold.engine.messages import AbortRequest, EngineInfo, EngineRequest, EngineStats, TokenOutput

FACTORY = "replay_core:ReplayCore"
# Environment variable: the processor that the core keeps to.
PROCESSOR = "REPLAY_CORE_PROCESSOR"


class ByteTokenizer:
    """Ids are bytes."""

    vocab_size = 256
    special_ids: frozenset[int] = frozenset()
    special_texts: frozenset[str] = frozenset()
    max_token_length = 1
    template_text = ""

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return bytes([token_id]).decode(errors="replace")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        return bytes(ids).decode(errors="replace")

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return "".join(message["content"] for message in messages)


class ReplayCore:
    """Gives each open sample its prompt's tokens again, one every ``config.seed`` microseconds, round and round."""

    def __init__(self, config: EngineConfig) -> None:
        if PROCESSOR in os.environ:
            os.sched_setaffinity(0, {int(os.environ[PROCESSOR])})
        self._step = config.seed / 1e6
        self._next = 0.0
        self._open: dict[str, tuple[list[int], int]] = {}
        self._ends: dict[str, int] = {}

    def info(self) -> EngineInfo:
        return EngineInfo(
            model_name="replay",
            vocab_size=1 << 20,
            max_model_len=100_000,
            block_size=16,
            num_blocks=1,
            device="cpu",
            dtype="float32",
        )

    def add_request(self, request: EngineRequest) -> None:
        self._open[request.request_id] = (request.prompt_token_ids, 0)
        self._ends[request.request_id] = request.params.max_tokens or 1

    def abort(self, request: AbortRequest) -> None:
        self._open.pop(request.request_id, None)

    def has_work(self) -> bool:
        return bool(self._open)

    def step(self) -> list[TokenOutput]:
        now = time.monotonic()
        if self._next > now:
            time.sleep(self._next - now)
        self._next = max(self._next, now) + self._step
        outputs = []
        for request_id, (tokens, done) in list(self._open.items()):
            last = done + 1 == self._ends[request_id]
            if last:
                del self._open[request_id], self._ends[request_id]
            else:
                self._open[request_id] = tokens, done + 1
            token = tokens[done % len(tokens)]
            outputs.append(
                TokenOutput(request_id=request_id, token_ids=[token], finish_reason="length" if last else None)
            )
        return outputs

    def stats(self) -> EngineStats:
        return EngineStats(num_running=len(self._open), num_blocks=1 << 20, num_live_blocks=len(self._open))

    def shutdown(self) -> None:
        pass
