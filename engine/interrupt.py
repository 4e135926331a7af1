"""Ctrl-C at a safe moment."""

from __future__ import annotations

import signal
import threading
from types import FrameType, TracebackType
from typing import Any


class DelayedInterrupt:
    """Inside this context the first Ctrl-C waits for `check`, the second one raises at once as usual.

    A step that is cut off anywhere would leave the scheduler's books half written. Outside the main thread, and where
    the program has a handler of its own, nothing is changed.
    """

    def __init__(self) -> None:
        self._previous: Any = None
        self._pending = False

    def __enter__(self) -> DelayedInterrupt:
        if threading.current_thread() is threading.main_thread():
            previous = signal.getsignal(signal.SIGINT)
            if previous is signal.default_int_handler:
                self._previous = previous
                signal.signal(signal.SIGINT, self._note)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._previous is not None:
            signal.signal(signal.SIGINT, self._previous)
        if error is None:
            self.check()

    def check(self) -> None:
        """Raise KeyboardInterrupt where one is waiting."""
        if self._pending:
            self._pending = False
            raise KeyboardInterrupt

    def _note(self, number: int, frame: FrameType | None) -> None:
        if self._pending:
            signal.default_int_handler(number, frame)
        self._pending = True
