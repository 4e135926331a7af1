"""``twofold chat``: a conversation in the terminal, with an engine in this process or a running server."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Protocol

from ..errors import ConfigError, RequestError
from .engine_options import add_engine_arguments, engine_config
from .parser import closest, natural_int, number, positive_int

_HELP = "/reset starts over, /exit or Ctrl-D leaves, Ctrl-C stops an answer."
_COMMANDS = ("/reset", "/exit", "/quit", "/help")
Message = dict[str, str]


class Session(Protocol):
    """Where answers come from. ``KeyboardInterrupt`` out of the iterator means that the answer was stopped cleanly."""

    def stream(self, messages: list[Message]) -> Iterator[str]:
        """The answer to a conversation, piece by piece (RequestError where it cannot be answered)."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", metavar="MODEL", nargs="?", help="directory, .gguf file, hub id or catalogue name")
    parser.add_argument("--url", metavar="URL", help="talk to a running OpenAI-compatible server instead")
    parser.add_argument("--api-key", metavar="KEY", help="key for the server at --url")
    parser.add_argument("--system", metavar="TEXT", help="system message that opens the conversation")
    parser.add_argument("--max-tokens", type=positive_int, metavar="N", help="tokens in one answer at most")
    parser.add_argument("--temperature", type=number(0, 100), metavar="T", help="0 is greedy (default: the model's)")
    parser.add_argument("--top-p", type=number(0, 1), metavar="P", help="nucleus sampling (default: the model's)")
    parser.add_argument("--sampling-seed", type=natural_int, metavar="N", help="seed of each answer")
    add_engine_arguments(parser, model=False)


def run(args: argparse.Namespace) -> int:
    """Converse until the user leaves."""
    if args.model is None and args.url is None:
        raise ConfigError("name a MODEL, or a running server with --url")
    session = _server_session(args) if args.url else _local_session(args)
    interactive = sys.stdin.isatty()
    if interactive:
        import readline  # noqa: F401  (line editing and history for input())

        print(_HELP)
    prompt = "> " if interactive else ""
    return Conversation(session, system=args.system).loop(lambda: input(prompt))


def sampling_overrides(args: argparse.Namespace) -> dict[str, Any]:
    """The sampling options that were given, by SamplingParams' names."""
    options = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "top_p": args.top_p,
        "seed": args.sampling_seed,
    }
    return {name: value for name, value in options.items() if value is not None}


@dataclass
class Conversation:
    """The messages so far, and the loop that reads a line and prints its answer."""

    session: Session
    system: str | None = None
    messages: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Forget everything but the system message."""
        self.messages = [{"role": "system", "content": self.system}] if self.system else []

    def loop(self, read: Callable[[], str]) -> int:
        """Read lines until /exit or the end of input; returns the exit code."""
        while True:
            try:
                line = read().strip()
            except EOFError:
                return 0
            except KeyboardInterrupt:
                print(f"\n{_HELP}")
                continue
            if line in ("/exit", "/quit"):
                return 0
            if line.startswith("/"):
                self._command(line)
            elif line:
                self.answer(line)

    def answer(self, text: str) -> None:
        """Print the answer to one message. A stopped answer stays in the conversation as far as it came."""
        self.messages.append({"role": "user", "content": text})
        pieces: list[str] = []
        try:
            for piece in self.session.stream(self.messages):
                pieces.append(piece)
                print(piece, end="", flush=True)
        except KeyboardInterrupt:
            print(" [stopped]", end="")
        except RequestError as error:
            print(f"twofold chat: {error}; /reset starts over", file=sys.stderr)
        if pieces:
            print(flush=True)
            self.messages.append({"role": "assistant", "content": "".join(pieces)})
        else:
            self.messages.pop()

    def _command(self, line: str) -> None:
        if line == "/reset":
            self.reset()
            print("The conversation starts over.")
        elif line == "/help":
            print(_HELP)
        else:
            word = line.split()[0]
            print(f"unknown command {word}; there are {', '.join(_COMMANDS)}{closest(word, _COMMANDS)}")


@dataclass
class ServerSession:
    """Answers from an OpenAI-compatible server."""

    client: Any
    model: str
    options: dict[str, Any]

    def stream(self, messages: list[Message]) -> Iterator[str]:
        """Stream one answer; hanging up stops it at the server."""
        body = {"model": self.model, "messages": messages, **self.options}
        for _, event in self.client.stream("/v1/chat/completions", body):
            for choice in event.get("choices") or []:
                if text := (choice.get("delta") or {}).get("content"):
                    yield text


def _server_session(args: argparse.Namespace) -> Session:
    from .openai_client import OpenAIClient

    client = OpenAIClient(args.url, api_key=args.api_key)
    names = client.model_names()
    if args.model is not None and args.model not in names:
        raise ConfigError(f"{args.url} does not serve {args.model!r}; it serves {', '.join(names)}")
    return ServerSession(client, args.model or names[0], sampling_overrides(args))


def _local_session(args: argparse.Namespace) -> Session:
    from .chat_engine import EngineSession

    return EngineSession(engine_config(args), sampling_overrides(args))
