"""API keys: who may ask, and how much at a time. Only hashes are kept, of keys on the command line as well."""

from __future__ import annotations

import hashlib
import math
import time
from collections.abc import Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from ..errors import ConfigError
from ..log import get_logger

logger = get_logger(__name__)

# How often a changed file is looked for, in seconds.
_RELOAD_INTERVAL = 1.0
_PREFIX = "sha256:"


class KeyEntry(msgspec.Struct, kw_only=True, forbid_unknown_fields=True, omit_defaults=True):
    """One key in a file. ``hash`` is ``sha256:`` and the hex digest of the key; limits of None do not bind."""

    name: str
    hash: str
    requests_in_flight: int | None = None
    requests_per_minute: int | None = None


class KeyFile(msgspec.Struct, kw_only=True, forbid_unknown_fields=True):
    keys: list[KeyEntry] = []


@dataclass(slots=True)
class ApiKey:
    """A known key with its use so far. ``budget`` counts the requests that may still come at once."""

    entry: KeyEntry
    num_open: int = 0
    budget: float = 0.0
    refilled: float = field(default_factory=time.monotonic)

    def __post_init__(self) -> None:
        self.budget = float(self.entry.requests_per_minute or 0)

    def refusal(self) -> tuple[str, int] | None:
        """Why one more request must wait, and for how many seconds; None takes it, and `release` must follow."""
        now, entry = time.monotonic(), self.entry
        if entry.requests_in_flight is not None and self.num_open >= entry.requests_in_flight:
            return f"this key has {self.num_open} requests in flight, as many as it may", 1
        if entry.requests_per_minute is not None:
            rate = entry.requests_per_minute / 60
            self.budget = min(float(entry.requests_per_minute), self.budget + (now - self.refilled) * rate)
            self.refilled = now
            if self.budget < 1:
                return f"this key may send {entry.requests_per_minute} requests a minute", math.ceil(
                    (1 - self.budget) / rate
                )
            self.budget -= 1
        self.num_open += 1
        return None

    def release(self, *, counts: bool = True) -> None:
        """A request that `refusal` took has ended; one that does not count is given back to the minute's budget."""
        self.num_open -= 1
        if not counts:
            self.budget += 1


class ApiKeys:
    """``plain`` keys without limits, and those of a file, which is read again when it changes."""

    def __init__(self, plain: Iterable[str], path: Path | None) -> None:
        self._path = path
        self._plain: dict[bytes, ApiKey] = {}
        for key in plain:
            # Two spellings of one key are one key.
            known = ApiKey(KeyEntry(name=f"key-{hash_key(key)[len(_PREFIX) :][:12]}", hash=hash_key(key)))
            self._plain.update(dict.fromkeys((_digest(form) for form in _byte_forms(key)), known))
        self._listed: dict[bytes, ApiKey] = {}
        self._modified = 0
        self._next_look = 0.0
        if path is not None:
            self._modified = _modified(path)
            self._take(read_key_file(path))

    @property
    def required(self) -> bool:
        """False where anyone may ask. A file means keys, even while it lists none."""
        return bool(self._plain) or self._path is not None

    def find(self, given: bytes) -> ApiKey | None:
        """The key that a client sent. What is looked up is its hash, so the time taken tells nothing about others."""
        self._look()
        digest = _digest(given)
        return self._plain.get(digest) or self._listed.get(digest)

    def reload(self) -> None:
        """Read the file now; a wrong one changes nothing and is logged."""
        if self._path is None:
            return
        try:
            self._modified = _modified(self._path)
            self._take(read_key_file(self._path))
            logger.info("read %d API keys from %s", len(self._listed), self._path)
        except ConfigError as error:
            logger.error("the API keys stay as they were: %s", error)

    def _look(self) -> None:
        now = time.monotonic()
        if self._path is None or now < self._next_look:
            return
        self._next_look = now + _RELOAD_INTERVAL
        with suppress(ConfigError):
            if _modified(self._path) != self._modified:
                self.reload()

    def _take(self, file: KeyFile) -> None:
        """Keys that stay as they were keep their counts."""
        listed = {}
        for entry in file.keys:
            digest = bytes.fromhex(entry.hash[len(_PREFIX) :])
            known = self._listed.get(digest)
            if known is None:
                listed[digest] = ApiKey(entry)
            else:
                known.entry = entry
                listed[digest] = known
        self._listed = listed


def hash_key(key: str) -> str:
    """A key as files hold it."""
    return _PREFIX + _digest(key.encode("utf-8", "surrogateescape")).hex()


def read_key_file(path: Path) -> KeyFile:
    """The file's keys (ConfigError where it cannot be read, or a key in it is wrong)."""
    try:
        file = msgspec.json.decode(path.read_bytes(), type=KeyFile)
    except OSError as error:
        raise ConfigError(f"the API key file {path} cannot be read: {error.strerror or error}") from None
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise ConfigError(f"the API key file {path} is wrong: {error}") from None
    names = [entry.name for entry in file.keys]
    for entry in file.keys:
        _check(entry, path)
        if names.count(entry.name) > 1:
            raise ConfigError(f"the API key file {path} has the name {entry.name!r} twice; names must differ")
    return file


def _check(entry: KeyEntry, path: Path) -> None:
    if not entry.name:
        raise ConfigError(f"the API key file {path} has a key without a name; give each one")
    digest = entry.hash.removeprefix(_PREFIX)
    if digest == entry.hash or len(digest) != 64 or not all(char in "0123456789abcdef" for char in digest):
        raise ConfigError(f"the hash of {entry.name!r} in {path} must be {_PREFIX} and 64 small hexadecimal digits")
    for name in ("requests_in_flight", "requests_per_minute"):
        value = getattr(entry, name)
        if value is not None and value < 1:
            raise ConfigError(f"{name} of {entry.name!r} in {path} is {value}; it must be at least 1")


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


def _modified(path: Path) -> int:
    try:
        return path.stat().st_mtime_ns
    except OSError as error:
        raise ConfigError(f"the API key file {path} cannot be read: {error.strerror or error}") from None


def _byte_forms(key: str) -> set[bytes]:
    """A key as clients send it: in UTF-8, as curl does, and in latin-1, as most HTTP libraries do where they can."""
    forms = {key.encode("utf-8", "surrogateescape")}
    with suppress(UnicodeEncodeError):
        forms.add(key.encode("latin-1"))
    return forms
