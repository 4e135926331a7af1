"""The ``twofold`` command.

Each command is a module of this package with ``add_arguments(parser)`` and ``run(args) -> int``. Only the module of the
command that was asked for is imported, and it imports what is heavy inside ``run``, so that ``--help`` answers at once.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from .. import env
from ..errors import ConfigError, RequestError, TwofoldError
from ..version import __version__
from .parser import CommandParser

COMMANDS = {
    "serve": "serve a model over an OpenAI-compatible HTTP API",
    "keys": "make the API keys of a server, with limits",
    "chat": "talk to a model in the terminal",
    "quantize": "write a quantized checkpoint of a model",
    "eval": "measure a model's perplexity, and its distance from another",
    "pull": "fetch a model into the cache, or list the catalogue",
    "bench": "measure latency, throughput, kernels, or a running server",
    "tune": "measure the kernels' launch settings on this GPU",
    "plan": "say what a model needs and how many requests fit",
    "doctor": "report what this machine offers and a model's kernels",
}

EXIT_FAILURE = 1
EXIT_USAGE = 2
EXIT_INTERRUPT = 130
EXIT_TERMINATED = 143

_EPILOG = """examples:
  twofold chat smollm2-135m-instruct
  twofold serve smollm2-135m-instruct --quantize rtn:4:32
  twofold quantize path/to/model --method rtn --bits 4 --group-size 32 --output path/to/result

`twofold COMMAND --help` lists a command's options."""


def build_parser(command: str | None) -> CommandParser:
    """The whole parser; only ``command`` has its options, the others just their one line."""
    parser = CommandParser(
        prog="twofold",
        description="Quantize and serve language models on NVIDIA, AMD and plain CPUs.",
        epilog=_EPILOG,
    )
    version = f"twofold {__version__}"
    parser.add_argument("--version", action="version", version=version, help="print the version and exit")
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True, title="commands")
    for name, summary in COMMANDS.items():
        child = commands.add_parser(name, help=summary, description=summary[0].upper() + summary[1:] + ".")
        if name == command:
            module = importlib.import_module(f".{name}", __name__)
            module.add_arguments(child)
            child.set_defaults(run=module.run)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command. Returns the exit code: 0, 1 failure, 2 wrong usage, 130 interrupted.

    SIGTERM unwinds the command like Ctrl-C does, so that temporary files go, and ends with 143 (SystemExit).
    """
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if not word.startswith("-")), None)
    try:
        # Before the command's module: its loggers read the level while they are imported.
        env.log_level()
    except ConfigError as error:
        print(f"twofold: {error}", file=sys.stderr)
        return EXIT_USAGE
    args = build_parser(command).parse_args(arguments)
    try:
        with _ended_by_sigterm():
            code: int = args.run(args)
        sys.stdout.flush()
        return code
    except TwofoldError as error:
        print(f"twofold {args.command}: {error}", file=sys.stderr)
        return EXIT_USAGE if isinstance(error, (ConfigError, RequestError)) else EXIT_FAILURE
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPT
    except BrokenPipeError:
        # The reader of our output (head, less) went away; keep the interpreter from failing again at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return EXIT_FAILURE


@contextmanager
def _ended_by_sigterm() -> Iterator[None]:
    """Inside, SIGTERM raises SystemExit, where it would otherwise end the process as it stands."""
    try:
        before = signal.getsignal(signal.SIGTERM)
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, _terminate)
    except ValueError:  # not the main thread, which alone may handle signals
        before = None
    try:
        yield
    finally:
        if before is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, before)


def _terminate(number: int, frame: FrameType | None) -> None:
    sys.exit(EXIT_TERMINATED)
