"""Tuned launch rows: what ``twofold tune`` measured on a GPU, read before the rows that come with the package.

One JSON file per architecture: the user's own in the cache folder, else the package's ``tuned-<arch>.json``. A file is
read once per process; a look-up is one dictionary access.
"""

from __future__ import annotations

import contextlib
import functools
import json
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, TypeVar

from ... import env
from ...log import get_logger

logger = get_logger(__name__)

Key = tuple[str | int, ...]
Row = TypeVar("Row")


@dataclass(frozen=True, slots=True)
class TunedRow:
    """A row of one table: its fields, the microseconds measured with it, and those of the row that it replaced."""

    table: str
    key: Key
    row: Mapping[str, Any]
    microseconds: float
    before: float


@dataclass(slots=True)
class Override:
    """A row in place of a table's, while it is being measured; ``uses`` counts the look-ups that it answered."""

    table: str
    key: Key
    row: Any
    uses: int = 0


_override: Override | None = None


@contextlib.contextmanager
def overriding(table: str, key: Key, row: object) -> Iterator[Override]:
    """Within it, look-ups of the key in the table give ``row``."""
    global _override
    previous, _override = _override, Override(table, key, row)
    try:
        yield _override
    finally:
        _override = previous


def tuned_row(arch: str, table: str, key: Key, kind: type[Row]) -> Row | None:
    """The tuned row of a table for an architecture, None where there is none."""
    if _override is not None and _override.table == table and _override.key == key:
        _override.uses += 1
        row: Row = _override.row
        return row
    if not arch:
        return None
    cached: Any = _decoded
    found: Row | None = cached(arch, kind).get((table, key))
    return found


def user_file(arch: str) -> Path:
    """Where ``twofold tune`` writes for an architecture."""
    return env.cache_dir() / "launch" / f"{arch}.json"


def write_rows(path: Path, device: str, versions: Mapping[str, str], rows: list[TunedRow]) -> None:
    """Write a file, keeping the rows of an older one that were not measured again."""
    kept = {(row.table, row.key): row for row in (_read(path) if path.exists() else [])}
    kept |= {(row.table, row.key): row for row in rows}
    content = {"device": device, **versions, "rows": [asdict(row) for row in kept.values()]}
    path.parent.mkdir(parents=True, exist_ok=True)
    part = path.with_suffix(".part")
    part.write_text(json.dumps(content, indent=1) + "\n")
    part.replace(path)
    forget()


def forget() -> None:
    """Read the files again at the next look-up."""
    _rows.cache_clear()
    _decoded.cache_clear()


@functools.cache
def _decoded(arch: str, kind: Any) -> dict[tuple[str, Key], Any]:
    """The rows that are of a kind of launch: their fields are its fields."""
    found = {}
    for row in _rows(arch):
        with contextlib.suppress(TypeError):
            found[row.table, row.key] = kind(**row.row)
    return found


@functools.cache
def _rows(arch: str) -> list[TunedRow]:
    for path in (user_file(arch), Path(__file__).parent / f"tuned-{arch}.json"):
        if path.is_file():
            try:
                return _read(path)
            except (OSError, ValueError, KeyError, TypeError) as error:
                logger.warning("the launch table %s is not used: %s; run `twofold tune` anew", path, error)
    return []


def _read(path: Path) -> list[TunedRow]:
    rows = json.loads(path.read_text())["rows"]
    return [TunedRow(**{**row, "key": tuple(row["key"])}) for row in rows]
