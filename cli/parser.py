"""An argument parser whose errors name the wrong value, the right ones and the closest match; and typed values."""

from __future__ import annotations

import argparse
import difflib
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NoReturn

_UNITS = {"": 1, "B": 1, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}


def closest(word: str, known: Iterable[str]) -> str:
    """``; did you mean X?`` for the known word most like ``word``, else nothing."""
    matches = [match for match in difflib.get_close_matches(word, list(known), n=3, cutoff=0.6) if _alike(word, match)]
    return f"; did you mean {matches[0]}?" if matches else ""


def _alike(word: str, known: str) -> bool:
    """Short words with another beginning (tpu, cpu) are other words and no slips."""
    return word[:1] == known[:1] or difflib.SequenceMatcher(None, word, known).ratio() >= 0.7


class CommandParser(argparse.ArgumentParser):
    """argparse without abbreviations, with defaults shown in the help and helpful errors."""

    def __init__(self, **kwargs: Any) -> None:
        kwargs.setdefault("formatter_class", HelpFormatter)
        super().__init__(**kwargs, allow_abbrev=False)
        # -5GiB is a wrong value, which its converter refuses in words, and no option.
        self._negative_number_matcher = re.compile(r"-\.?[0-9]")

    def parse_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse all of ``args``; an unknown option is named together with the one most like it."""
        result, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].split("=")[0]
            owner = self._owner(sys.argv[1:] if args is None else args)
            kind = "option" if word.startswith("-") else "argument"
            owner.error(f"unknown {kind} {word}{closest(word, owner._option_string_actions)}")
        return result

    def error(self, message: str) -> NoReturn:
        """Print one line and where to read on; exit code 2."""
        self.exit(2, f"{self.prog}: {message}\nTry `{self.prog} --help`.\n")

    def _check_value(self, action: argparse.Action, value: Any) -> None:
        if action.choices is not None and value not in action.choices:
            choices = [str(choice) for choice in action.choices]
            name = action.metavar if isinstance(action.metavar, str) and not action.option_strings else "value"
            message = f"unknown {name.lower()} {str(value)!r}; choose from {', '.join(choices)}"
            raise argparse.ArgumentError(
                action if action.option_strings else None, message + closest(str(value), choices)
            )

    def _owner(self, args: Sequence[str]) -> CommandParser:
        """The parser of the deepest sub-command that ``args`` name."""
        owner: CommandParser = self
        for word in args:
            for action in owner._actions:
                if isinstance(action, argparse._SubParsersAction) and word in action.choices:
                    owner = action.choices[word]
        return owner


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Keeps line breaks of descriptions and adds the default to each option's line."""

    def __init__(self, prog: str, **kwargs: Any) -> None:
        super().__init__(prog, max_help_position=34, **kwargs)

    def _get_help_string(self, action: argparse.Action) -> str | None:
        text = action.help or ""
        silent = action.default in (None, False, argparse.SUPPRESS) or not action.option_strings
        return text if silent or "default" in text else f"{text} (default: %(default)s)"


def positive_int(text: str) -> int:
    """A whole number of at least 1."""
    return _whole(text, 1)


def natural_int(text: str) -> int:
    """A whole number of at least 0."""
    return _whole(text, 0)


def whole_number(text: str) -> int:
    """A whole number, below 0 too."""
    return _whole(text, None)


def _whole(text: str, low: int | None) -> int:
    digits = text.strip().replace("_", "")
    if re.fullmatch(r"[+-]?[0-9]{1,18}", digits) is None:  # int() takes digits of every script
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number")
    value = int(digits)
    if low is not None and value < low:
        raise argparse.ArgumentTypeError(f"{value} is too small; it must be at least {low}")
    return value


def number(low: float, high: float, *, above: bool = False) -> Any:
    """A converter for numbers from ``low`` to ``high``; with ``above``, not ``low`` itself."""

    def convert(text: str) -> float:
        try:
            value = float(text.encode("ascii"))  # digits of other scripts are refused
        except ValueError:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number") from None
        if not low <= value <= high or (above and value == low):
            limit = f"at least {low:g}" if high == float("inf") else f"from {low:g} to {high:g}"
            if above:
                limit = f"above {low:g} and at most {high:g}"
            raise argparse.ArgumentTypeError(f"{text} is out of range; it must be {limit}")
        return value

    return convert


def byte_size(text: str) -> int:
    """Bytes from ``512M``, ``4GiB`` or a plain number; K, M, G and T are powers of 1024."""
    match = re.fullmatch(r"([0-9]+(?:\.[0-9]+)?)\s*([KMGT]?)(?:i?B)?", text.strip(), re.IGNORECASE)
    if not match:
        if re.match(r"-\s*[0-9]", text.strip()):
            raise argparse.ArgumentTypeError(f"{text!r} is not a size: it is below 0; write one such as 4G")
        raise argparse.ArgumentTypeError(f"{text!r} is not a size; write bytes, or K, M, G or T as in 4G")
    return int(float(match[1]) * _UNITS[match[2].upper()])


def memory_size(text: str) -> int:
    """`byte_size` of memory for a model: a small number without a unit is one whose unit was forgotten."""
    size = byte_size(text)
    if size < _UNITS["M"] and text.strip()[-1].isdigit():
        raise argparse.ArgumentTypeError(f"{text} means {size} bytes; add a unit, as in {text.strip()}G")
    return size


def file_path(text: str) -> Path:
    """A path, with ``~`` read as a shell does; whether anything is there is asked by whoever uses it."""
    if not text.strip():
        raise argparse.ArgumentTypeError("the path is empty; name a file or folder")
    try:
        return Path(text).expanduser()
    except RuntimeError:
        raise argparse.ArgumentTypeError(f"{text!r} names a home that is not known; write the whole path") from None
