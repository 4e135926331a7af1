"""Passes through a decoder layer that halt before each group of modules, so that its weights can change meanwhile.

What is quantized later reads what was quantized before it, and the layer computes once for all of its groups instead
of once for each.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Sequence
from queue import SimpleQueue
from types import TracebackType
from typing import Any

from torch import Tensor, nn

from .stages import InputGroup


class HaltingPasses:
    """``runs`` pass batches through ``layer`` side by side, from group to group; at most one computes at any time.

    Iterating gives each of ``groups`` in the order they compute, with the inputs [..., K] of all batches, and the
    passes go on at the next one. ``outputs`` is complete after the last. Every run must call the same groups.
    """

    def __init__(self, layer: nn.Module, groups: Sequence[InputGroup], runs: Sequence[Callable[[], Tensor]]) -> None:
        self.outputs: list[Tensor] = []
        self._passes = [_Pass(run) for run in runs]
        self._handles = [
            layer.get_submodule(name).register_forward_pre_hook(_hook(group))
            for group in groups
            for name in group.modules
        ]

    def __enter__(self) -> HaltingPasses:
        for one in self._passes:
            one.start()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        for handle in self._handles:
            handle.remove()
        for one in self._passes:
            one.abandon()

    def __iter__(self) -> Iterator[tuple[InputGroup, list[Tensor]]]:
        while True:
            answers = [one.step() for one in self._passes]
            groups = {answer[0] for answer in answers}
            assert len(groups) == 1, "the batches of a layer compute in one order"
            group = groups.pop()
            if group is None:
                self.outputs = [value for _, value in answers]
                return
            yield group, [value for _, value in answers]


class _Abandoned(BaseException):
    """Nobody waits for this pass any more."""


class _Pass(threading.Thread):
    """A run that computes only while `step` waits for it: until its next group, or to its end."""

    def __init__(self, compute: Callable[[], Tensor]) -> None:
        super().__init__(daemon=True, name="calibration pass")
        self._compute = compute
        self._turn = threading.Semaphore(0)
        self._answers: SimpleQueue[tuple[InputGroup | None, Tensor] | BaseException] = SimpleQueue()
        self._is_abandoned = False
        self._seen: set[InputGroup] = set()

    def run(self) -> None:
        try:
            self._wait()
            self._answers.put((None, self._compute()))
        except _Abandoned:
            pass
        except BaseException as error:
            self._answers.put(error)

    def step(self) -> tuple[InputGroup | None, Tensor]:
        """(group, its input), or (None, the output) at the end; raises what the run raised."""
        self._turn.release()
        answer = self._answers.get()
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def halt(self, group: InputGroup, x: Tensor) -> None:
        """In the pass's own thread, at the first module of a group: hand its input over and wait."""
        if group not in self._seen:
            self._seen.add(group)
            self._answers.put((group, x))
            self._wait()

    def _wait(self) -> None:
        self._turn.acquire()
        if self._is_abandoned:
            raise _Abandoned

    def abandon(self) -> None:
        """End the thread, wherever it is."""
        self._is_abandoned = True
        self._turn.release()
        self.join()


def _hook(group: InputGroup) -> Callable[[nn.Module, tuple[Any, ...]], None]:
    def hook(module: nn.Module, arguments: tuple[Any, ...]) -> None:
        current = threading.current_thread()
        if isinstance(current, _Pass):
            current.halt(group, arguments[0])

    return hook
