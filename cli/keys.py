"""``twofold keys``: the file of hashed API keys that ``twofold serve --api-key-file`` reads."""

from __future__ import annotations

import argparse
import os
import secrets
from pathlib import Path
from typing import TYPE_CHECKING

from ..errors import ConfigError
from .parser import positive_int

if TYPE_CHECKING:
    from ..server.api_keys import KeyFile


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the command's options."""
    parser.add_argument("action", choices=("add", "remove", "list"), help="what to do")
    parser.add_argument("file", metavar="FILE", type=Path, help="the key file; add makes it")
    parser.add_argument("name", metavar="NAME", nargs="?", help="whose key")
    parser.add_argument(
        "--requests-in-flight", type=positive_int, metavar="N", help="requests at a time (default: no limit)"
    )
    parser.add_argument(
        "--requests-per-minute", type=positive_int, metavar="N", help="requests a minute (default: no limit)"
    )


def run(args: argparse.Namespace) -> int:
    """Change or show the file; a new key is printed once and stored as a hash."""
    from ..server.api_keys import KeyEntry, KeyFile, hash_key, read_key_file

    makes = args.action == "add" and not args.file.exists()
    keys = KeyFile() if makes else read_key_file(args.file)
    if args.action == "list":
        for entry in keys.keys:
            limits = f"{entry.requests_in_flight or 'any'} in flight, {entry.requests_per_minute or 'any'} a minute"
            print(f"{entry.name}  {limits}")
        return 0
    if not args.name:
        raise ConfigError(f"keys {args.action} needs a name")
    known = [entry.name for entry in keys.keys]
    if args.action == "remove":
        if args.name not in known:
            raise ConfigError(f"{args.file} has no key {args.name!r}; it has {', '.join(known) or 'none'}")
        _write(args.file, KeyFile(keys=[entry for entry in keys.keys if entry.name != args.name]))
        return 0
    if args.name in known:
        raise ConfigError(f"{args.file} has a key {args.name!r} already; remove it first, or choose another name")
    key = f"tf-{secrets.token_urlsafe(32)}"
    entry = KeyEntry(
        name=args.name,
        hash=hash_key(key),
        requests_in_flight=args.requests_in_flight,
        requests_per_minute=args.requests_per_minute,
    )
    _write(args.file, KeyFile(keys=[*keys.keys, entry]))
    print(key)
    return 0


def _write(path: Path, keys: KeyFile) -> None:
    """Replace the file in one step: a server may read it at any moment."""
    import msgspec

    from ..storage import writing

    part = path.with_name(path.name + ".part")
    with writing(path.parent):
        part.touch(mode=0o600)
        part.write_bytes(msgspec.json.format(msgspec.json.encode(keys), indent=2) + b"\n")
        os.replace(part, path)
