"""Chat with the engine in the same process."""

import os
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from twofold.cli.chat_engine import EngineSession
from twofold.engine.config import EngineConfig
from twofold.engine.llm import LLM
from twofold.engine.sampling_params import SamplingParams
from twofold.errors import RequestError

MESSAGES = [{"role": "user", "content": "hello there"}]


def session(model: Path, **options: object) -> EngineSession:
    return EngineSession(EngineConfig(model=str(model), device="cpu", kv_cache_bytes=1 << 22), options)


def test_pieces_join_to_the_offline_answer(tiny_model: Callable[..., Path]) -> None:
    model = tiny_model("llama")
    pieces = list(session(model, temperature=0.0, max_tokens=20).stream(MESSAGES))
    with LLM(str(model), device="cpu", kv_cache_bytes=1 << 22) as llm:
        (output,) = llm.chat(MESSAGES, SamplingParams(temperature=0.0, max_tokens=20), progress=False)
    assert "".join(pieces) == output.outputs[0].text
    assert len(pieces) > 5


def test_a_closed_answer_leaves_the_engine_free(tiny_model: Callable[..., Path]) -> None:
    talk = session(tiny_model("llama"), temperature=0.0, max_tokens=200)
    stream = talk.stream(MESSAGES)
    next(stream)
    stream.close()
    talk._core.step()
    assert not talk._core.has_work() and talk._core.stats().num_live_blocks == 0
    assert next(talk.stream(MESSAGES))


def test_a_conversation_that_is_too_long_is_refused(tiny_model: Callable[..., Path]) -> None:
    talk = session(tiny_model("llama"))
    with pytest.raises(RequestError, match="512"):
        list(talk.stream([{"role": "user", "content": "word " * 2000}]))
    assert not talk._core.has_work()


def test_ctrl_c_stops_the_answer_and_not_the_chat(tiny_model: Callable[..., Path]) -> None:
    # An answer so long that it is still running however late the signal comes.
    model = tiny_model("llama", max_position_embeddings=1 << 17)
    command = [sys.executable, "-m", "twofold", "chat", str(model), "--device", "cpu", "--num-threads", "1"]
    command += ["--temperature", "0", "--max-tokens", "100000"]
    environment = {**os.environ, "TWOFOLD_LOG_LEVEL": "ERROR"}
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, env=environment) as process:
        assert process.stdin and process.stdout
        try:
            for line in (b"first\n", b"second\n"):
                process.stdin.write(line)
                process.stdin.flush()
                said = process.stdout.read(1)
                process.send_signal(signal.SIGINT)
                while said and not said.endswith(b" [stopped]\n"):
                    said += process.stdout.read(1)
                assert said
            process.stdin.write(b"/exit\n")
            process.stdin.flush()
            assert process.wait(60) == 0
        finally:
            process.kill()
