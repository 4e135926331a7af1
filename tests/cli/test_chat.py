"""The conversation loop over scripted sessions, and the command over a scripted server."""

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator

import pytest
from sse_server import scripted_server
from twofold import cli
from twofold.cli.chat import Conversation, Message
from twofold.errors import ContextLengthError


class Echo:
    """Answers with the number of messages and the last one; ``stop`` and ``fail`` do so after one piece or none."""

    def __init__(self) -> None:
        self.seen: list[list[Message]] = []

    def stream(self, messages: list[Message]) -> Iterator[str]:
        self.seen.append(list(messages))
        last = messages[-1]["content"]
        if last == "fail":
            raise ContextLengthError("the conversation is too long")
        yield f"{len(messages)}:"
        if last == "stop":
            raise KeyboardInterrupt
        yield last


def typed(*lines: str | type[BaseException]) -> Callable[[], str]:
    script = iter(lines)

    def read() -> str:
        line = next(script, EOFError)
        if isinstance(line, str):
            return line
        raise line

    return read


def test_the_conversation_grows_and_resets(capsys: pytest.CaptureFixture) -> None:
    session = Echo()
    conversation = Conversation(session, system="be brief")
    assert conversation.loop(typed("hello", "", "again", "/reset", "new", "/exit", "never")) == 0
    assert [len(messages) for messages in session.seen] == [2, 4, 2]
    assert session.seen[1] == [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "2:hello"},
        {"role": "user", "content": "again"},
    ]
    assert "2:hello\n4:again\n" in capsys.readouterr().out


def test_ctrl_c_stops_the_answer_only(capsys: pytest.CaptureFixture) -> None:
    session = Echo()
    conversation = Conversation(session)
    assert conversation.loop(typed("stop", "next", KeyboardInterrupt, "last")) == 0
    assert "1: [stopped]\n3:next\n" in capsys.readouterr().out
    assert session.seen[1][1] == {"role": "assistant", "content": "1:"}
    assert session.seen[2][-1]["content"] == "last"


def test_a_request_that_cannot_be_answered_leaves_no_trace(capsys: pytest.CaptureFixture) -> None:
    session = Echo()
    Conversation(session).loop(typed("fail", "good"))
    assert len(session.seen[1]) == 1
    assert "too long; /reset starts over" in capsys.readouterr().err


def test_unknown_commands_are_not_sent(capsys: pytest.CaptureFixture) -> None:
    session = Echo()
    Conversation(session).loop(typed("/rest", "/help"))
    assert session.seen == []
    assert "unknown command /rest" in (out := capsys.readouterr().out) and "did you mean /reset?" in out


def test_over_a_server(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("hi\nmore\n"))
    with scripted_server() as server:
        arguments = ["chat", "--url", server.url, "--system", "s", "--max-tokens", "2", "--temperature", "0"]
        assert cli.main(arguments) == 0
    assert capsys.readouterr().out == "w0 w1 \nw0 w1 \n"
    assert server.bodies[1]["messages"][2] == {"role": "assistant", "content": "w0 w1 "}
    assert (server.bodies[0]["temperature"], server.bodies[0]["max_tokens"]) == (0, 2)
    assert "top_p" not in server.bodies[0]


def test_wrong_use(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["chat"]) == 2
    assert "name a MODEL" in capsys.readouterr().err
    with scripted_server() as server:
        assert cli.main(["chat", "other", "--url", server.url]) == 2
    assert "it serves scripted" in capsys.readouterr().err
    assert cli.main(["chat", "--url", server.url]) == 1
    assert "cannot be used" in capsys.readouterr().err


def test_a_real_ctrl_c_hangs_up_and_goes_on() -> None:
    with scripted_server(pause=0.02) as server:
        command = [sys.executable, "-m", "twofold", "chat", "--url", server.url, "--max-tokens", "2000"]
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, env={**os.environ}
        )
        assert process.stdin and process.stdout
        process.stdin.write(b"first\n")
        process.stdin.flush()
        assert process.stdout.read(3) == b"w0 "
        process.send_signal(signal.SIGINT)
        limit = time.monotonic() + 30
        while not server.num_hung_up and time.monotonic() < limit:
            time.sleep(0.02)
        out, err = process.communicate(b"/exit\n", timeout=100)
    assert process.returncode == 0, err
    assert out.endswith(b"[stopped]\n") and server.num_hung_up == 1
