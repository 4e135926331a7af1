"""``twofold pull``: fetch a model into the cache, or list the catalogue."""

from __future__ import annotations

import argparse

from ..errors import ConfigError
from .parser import closest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", metavar="NAME", nargs="?", help="catalogue name or hub id; without it, list the catalogue")


def run(args: argparse.Namespace) -> int:
    """Fetch the model (nothing is fetched twice) and print where it lies."""
    from ..engine.sources import CATALOGUE, pull

    if args.model is None:
        for name in CATALOGUE:
            print(name)
        return 0
    # A hub id has a slash; anything else can only be a catalogue name.
    if "/" not in args.model and args.model not in CATALOGUE:
        raise ConfigError(
            f"no model {args.model!r} in the catalogue; it has {', '.join(CATALOGUE)}{closest(args.model, CATALOGUE)}"
        )
    files = pull(args.model)
    print(files.path)
    return 0
