"""A core without a model, for tests of everything around it: it counts upwards from the prompt's last token.

``CountingCore`` is given to a core process as ``counting_core:CountingCore``; faulty and slow ones follow.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from dataclasses import replace

from twofold.engine.config import EngineConfig
from twofold.engine.messages import AbortRequest, EngineInfo, EngineRequest, EngineStats, TokenOutput
from twofold.errors import ConfigError, ContextLengthError
from twofold.platforms import cpu_threads

VOCAB_SIZE = 256
MAX_MODEL_LEN = 4096


class ByteTokenizer:
    """Ids 0..255 are bytes; 0 is special and shows as <eos>."""

    vocab_size = VOCAB_SIZE
    eos_token_id = 0
    bos_token_id = None
    special_ids = frozenset({0})
    max_token_length = 1
    template_text = ""
    special_texts = frozenset({"<eos>"})

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return list(text.encode())

    def token_bytes(self, token_id: int) -> bytes:
        return b"<eos>" if token_id == 0 else bytes([token_id])

    def token_text(self, token_id: int) -> str:
        return self.token_bytes(token_id).decode(errors="replace")

    def decode(self, ids: Sequence[int], skip_special_tokens: bool = True) -> str:
        shown = [self.token_bytes(i) for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(shown).decode(errors="replace")


class CountingCore:
    """One token per open sample and step: (last token + 1) mod 256; 0 ends a sample unless ignore_eos."""

    step_seconds = 0.0

    def __init__(self, config: EngineConfig) -> None:
        self.samples: dict[tuple[str, int], list[int]] = {}
        self.requests: dict[str, EngineRequest] = {}
        self.counts = EngineStats(num_blocks=64)

    def info(self) -> EngineInfo:
        return EngineInfo(
            model_name="counting",
            vocab_size=VOCAB_SIZE,
            max_model_len=MAX_MODEL_LEN,
            block_size=16,
            num_blocks=64,
            device="cpu",
            dtype="float32",
        )

    def add_request(self, request: EngineRequest) -> None:
        if request.prompt_token_ids[-1] == 255:
            raise ContextLengthError("255 is one too many", param="prompt")
        self.requests[request.request_id] = request
        for index in range(request.params.n):
            self.samples[request.request_id, index] = []

    def abort(self, request: AbortRequest) -> None:
        for key in list(self.samples):
            if key[0] == request.request_id and request.index in (None, key[1]):
                del self.samples[key]

    def has_work(self) -> bool:
        return bool(self.samples)

    def step(self) -> list[TokenOutput]:
        time.sleep(self.step_seconds)
        self.counts.num_steps += 1
        outputs = [self._advance(*key) for key in list(self.samples)]
        self.counts.num_generated_tokens += len(outputs)
        return outputs

    def _advance(self, request_id: str, index: int) -> TokenOutput:
        request, tokens = self.requests[request_id], self.samples[request_id, index]
        last = tokens[-1] if tokens else request.prompt_token_ids[-1]
        token = (last + 1) % VOCAB_SIZE
        tokens.append(token)
        ended = token == 0 and not request.params.ignore_eos
        full = len(tokens) == (request.params.max_tokens or MAX_MODEL_LEN - len(request.prompt_token_ids))
        finish = "stop" if ended else "length" if full else None
        if finish:
            del self.samples[request_id, index]
        return TokenOutput(
            request_id=request_id,
            index=index,
            token_ids=[token],
            finish_reason=finish,
            stop_token=token if ended else None,
        )

    def stats(self) -> EngineStats:
        self.counts.num_running = len({request_id for request_id, _ in self.samples})
        return self.counts

    def shutdown(self) -> None:
        pass


class SlowCore(CountingCore):
    """20 ms a step."""

    step_seconds = 0.02


class TiedCore(CountingCore):
    """Its computing thread is tied to the first CPU; the rest belongs on the last."""

    def __init__(self, config: EngineConfig) -> None:
        super().__init__(config)
        cpus = sorted(os.sched_getaffinity(0))
        cpu_threads.set_team_cpus((cpus[0],), rest=(cpus[-1],))

    def info(self) -> EngineInfo:
        return replace(super().info(), rest_cpus=list(cpu_threads.rest_cpus()))


class HangingCore(CountingCore):
    """Its fifth step never ends."""

    def step(self) -> list[TokenOutput]:
        if self.counts.num_steps == 4:
            time.sleep(3600)
        return super().step()


class RaisingCore(SlowCore):
    """Its fifth step raises."""

    def step(self) -> list[TokenOutput]:
        if self.counts.num_steps == 4:
            raise ZeroDivisionError("the fifth step")
        return super().step()


class DyingCore(SlowCore):
    """It is killed in its fifth step."""

    def step(self) -> list[TokenOutput]:
        if self.counts.num_steps == 4:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step()


class FailingSampleCore(CountingCore):
    """The fifth token of a request whose id begins with "bad" is an error."""

    def _advance(self, request_id: str, index: int) -> TokenOutput:
        if request_id.startswith("bad") and len(self.samples[request_id, index]) == 4:
            del self.samples[request_id, index]
            return TokenOutput(request_id=request_id, index=index, finish_reason="error", error="bad row")
        return super()._advance(request_id, index)


class MisconfiguredCore(CountingCore):
    """Does not start, by a mistake of the user."""

    def __init__(self, config: EngineConfig) -> None:
        raise ConfigError("block_size is 3; it must be a power of two")


class BrokenCore(CountingCore):
    """Does not start, by a mistake of ours."""

    def __init__(self, config: EngineConfig) -> None:
        raise KeyError("oops")


class KilledAtStartCore(CountingCore):
    """Is killed while it loads."""

    def __init__(self, config: EngineConfig) -> None:
        os.kill(os.getpid(), signal.SIGKILL)


class SlowStartCore(CountingCore):
    """Loads for an hour."""

    def __init__(self, config: EngineConfig) -> None:
        time.sleep(3600)
