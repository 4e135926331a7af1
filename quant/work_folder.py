"""The folder that a long work is done in: kept when interrupted, continued by the same work, moved when done."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
from pathlib import Path
from types import TracebackType
from typing import Any

from ..errors import ConfigError
from ..storage import is_out_of_space, writing

JOURNAL = "journal.json"


def partial_folder(output: Path) -> Path:
    """Where the work for ``output`` lies while it is done."""
    return output.parent / f".{output.name}-partial"


class WorkFolder:
    """``with WorkFolder(output, key) as work:`` fills ``work.folder``, which then takes ``output``'s place.

    ``key`` names the work: one that was interrupted continues where the same key comes again, and is thrown away where
    another does. ``steps`` are those already done, ``kept`` values that go with them. Whatever stood at ``output``
    stays until the end.
    """

    def __init__(self, output: Path, key: str) -> None:
        self._output = output
        self._key = key
        self._base = partial_folder(output)
        self.folder = self._base / "new"
        self.steps: list[dict[str, Any]] = []
        self.kept: dict[str, Any] = {}
        self._lock = -1

    def __enter__(self) -> WorkFolder:
        with writing(self._output.parent):
            self._base.mkdir(exist_ok=True)
            self._lock = os.open(self._base, os.O_RDONLY)
            try:
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                os.close(self._lock)
                raise ConfigError(f"another process is making {self._output}; wait for it or stop it") from None
            self.steps, self.kept = self._previous()
            if not self.steps:
                shutil.rmtree(self.folder, ignore_errors=True)
                self.folder.mkdir()
        return self

    def finish_step(self, step: dict[str, Any]) -> None:
        """Note that a step is done and all it wrote is on disk."""
        self.steps.append(step)
        part = self._base / f"{JOURNAL}.part"
        part.write_text(json.dumps({"key": self._key, "steps": self.steps, "kept": self.kept}))
        os.replace(part, self._base / JOURNAL)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if kind is None:
                with writing(self._output.parent):
                    if self._output.exists():
                        os.replace(self._output, self._base / "old")
                    os.replace(self.folder, self._output)
            # What failed would fail again, but for want of space.
            fails_again = kind is not None and issubclass(kind, Exception) and not is_out_of_space(error)
            if kind is None or fails_again or not self.steps:
                shutil.rmtree(self._base, ignore_errors=True)
        finally:
            os.close(self._lock)

    def _previous(self) -> tuple[list[dict[str, Any]], dict[str, Any]]:
        try:
            journal = json.loads((self._base / JOURNAL).read_text())
        except (OSError, ValueError):
            return [], {}
        if journal.get("key") != self._key or not self.folder.is_dir():
            return [], {}
        return list(journal["steps"]), dict(journal.get("kept", {}))
