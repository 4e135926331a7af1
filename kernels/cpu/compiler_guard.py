"""Compilers that never outlive the process that needs them, however it ends."""

from __future__ import annotations

import os
import signal
import subprocess
from contextlib import suppress
from pathlib import Path
from types import TracebackType

# Reads the compilers' process groups, one a line. Its input ends without the word `done` where this process was killed,
# which it cannot notice itself.
_SCRIPT = """
groups=
while read -r line; do
    [ "$line" = done ] && exit 0
    groups="$groups $line"
done
for group in $groups; do kill -s TERM -- "-$group" 2>/dev/null; done
rm -rf -- "$1"
"""


class CompilerGuard:
    """Compilers started in a block: those that still run when it fails, or when this process dies, are ended.

    ``folder``, which they write into, is removed then. Without a shell only the block ends them.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running: list[subprocess.Popen[str]] = []
        self._guard: subprocess.Popen[str] | None = None

    def __enter__(self) -> CompilerGuard:
        with suppress(OSError):
            self._guard = subprocess.Popen(
                ["/bin/sh", "-c", _SCRIPT, "sh", str(self._folder)],
                stdin=subprocess.PIPE, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
                text=True, bufsize=1, start_new_session=True,
            )  # fmt: skip
        return self

    def start(self, command: list[str]) -> subprocess.Popen[str]:
        """Run ``command``, its output and errors in one pipe."""
        process = subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
        )
        self._running.append(process)
        self._tell(f"{process.pid}\n")
        return process

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self._tell("done\n")
        for process in self._running:
            if process.poll() is None:
                with suppress(OSError):
                    os.killpg(process.pid, signal.SIGTERM)
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError):
                self._guard.stdin.close()
            self._guard.wait()
        for process in self._running:
            process.wait()
            if process.stdout is not None:
                process.stdout.close()

    def _tell(self, line: str) -> None:
        if self._guard is not None and self._guard.stdin is not None:
            with suppress(OSError):
                self._guard.stdin.write(line)
