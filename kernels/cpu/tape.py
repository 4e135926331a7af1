"""Graphs on the CPU: the kernel calls of a step as a tape, which C replays in one call.

While a step is recorded its kernels are not called: each call's function and arguments are noted. Torch may allocate
and make views; some of its operations have a kernel that stands for them (``lowering.py``), any other makes the step
unrecordable. So all that a replay does stands on the tape, and nothing in it depends on a value of the recorded run.
"""

from __future__ import annotations

import ctypes
import struct
import threading
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from ...platforms.graphs import Graph, GraphRecorder, SizedStep, Step, UnrecordableError
from . import step_memory, tape_program
from .arena import Arena
from .library import functions
from .lowering import lowered_operations
from .signatures import RECORDED, SIGNATURES
from .sized_tape import Recording, SizedArena, SizedTape

# A batch is padded by at most an eighth.
_PADDING_BITS = 4

# How each type of argument fills its 64 bits.
_PACK: dict[type, struct.Struct] = {
    ctypes.c_void_p: struct.Struct("=Q"),
    ctypes.c_ssize_t: struct.Struct("=q"),
    ctypes.c_int: struct.Struct("=i4x"),
    ctypes.c_float: struct.Struct("=f4x"),
    ctypes.c_uint32: struct.Struct("=I4x"),
}
_WORD = struct.Struct("=q")


class Tape(Graph):
    """``names`` are the kernels in the order of their calls; ``keeps`` are the arguments that live in Python."""

    def __init__(self, names: list[str], program: bytes, keeps: list[Any], outputs: tuple[Tensor, ...]) -> None:
        self.names = names
        self.outputs = outputs
        self._program = program
        self._address = ctypes.cast(ctypes.c_char_p(program), ctypes.c_void_p).value
        self._keeps = keeps

    @property
    def num_bytes(self) -> int:
        return len(self._program)

    def replay(self) -> None:
        tape_program.run(self._address, self.names)

    def timed_replay(self) -> list[int]:
        """Replay, and the nanoseconds of each call."""
        return tape_program.timed(self._address, self.names)


class TapeRecorder(GraphRecorder):
    """Records tapes; ``num_bytes`` counts the arena that they share and their programs."""

    name = "a tape of kernel calls"

    def __init__(self) -> None:
        self._arena = Arena()
        self._lowered = lowered_operations(self._arena)
        self._program_bytes = 0
        self._sized_arena = SizedArena()

    @property
    def num_bytes(self) -> int:
        return self._arena.num_bytes + self._program_bytes

    def rows_for(self, num_rows: int) -> int:
        step = 1 << max(0, num_rows.bit_length() - _PADDING_BITS)
        return -(-num_rows // step) * step

    def record(self, step: Step) -> Tape:
        self._arena.restart()
        notes, outputs = _note(step, self._lowered)
        tape = Tape(notes.names, bytes(notes.program), notes.keeps, outputs)
        self._program_bytes += tape.num_bytes
        return tape

    def record_sized(self, step: SizedStep, smallest: tuple[int, int], largest: tuple[int, int]) -> SizedTape:
        arena = self._sized_arena
        lowered = lowered_operations(arena)

        def recording(*sizes: int) -> Recording:
            notes, outputs = _note(lambda: step(*sizes), lowered)
            return Recording(sizes, notes.names, bytes(notes.program), notes.arrays, outputs)

        arena.measure(smallest[0])
        recording(*smallest)
        arena.lay_out(largest[0])
        recordings = []
        for sizes in (largest, (largest[0] - 1, largest[1]), (largest[0], largest[1] - 1), smallest):
            arena.repeat(sizes[0])
            recordings.append(recording(*sizes))
        return SizedTape(arena.area, *recordings)

    def give_back_pages(self) -> None:
        self._sized_arena.restart()
        self._sized_arena.give_back_pages()


def _note(step: Step, lowered: dict[Any, Callable[..., Tensor]]) -> tuple[_Notes, tuple[Tensor, ...]]:
    notes = _Notes()
    with step_memory.step(is_open=False), functions.diverted(notes.taker), _OnlyKernels(lowered):
        return notes, step()


class _Notes:
    """What is called while a step is recorded, by the thread that records; others' calls go through.

    ``arrays`` are those of ``keeps`` with the word of ``program`` that holds each one's address.
    """

    def __init__(self) -> None:
        self.names: list[str] = []
        self.program = bytearray()
        self.keeps: list[Any] = []
        self.arrays: list[tuple[int, ctypes.Array[Any]]] = []
        self._thread = threading.get_ident()

    def taker(self, name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        """What stands for a kernel's function."""
        index, types = RECORDED.index(name), SIGNATURES[name]

        def take(*arguments: Any) -> Any:
            if threading.get_ident() != self._thread:
                return function(*arguments)
            assert len(arguments) == len(types), f"{name} takes {len(types)} arguments"
            self.names.append(name)
            self.program += _WORD.pack(index) + _WORD.pack(len(types))
            for kind, value in zip(types, arguments, strict=True):
                self.program += _PACK[kind].pack(self._plain(value))
            return 0

        return take

    def _plain(self, value: Any) -> Any:
        if value is None:
            return 0
        if isinstance(value, ctypes.Array):
            self.keeps.append(value)
            self.arrays.append((len(self.program) // _WORD.size, value))
            return ctypes.addressof(value)
        return value


class _OnlyKernels(TorchDispatchMode):
    """Lets torch make views, puts kernels in place of ``lowered`` operations, and refuses all others by name."""

    def __init__(self, lowered: dict[Any, Callable[..., Tensor]]) -> None:
        super().__init__()
        self._lowered = lowered

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        # Else the first step that is recorded imports torch's compiler: seconds, and 70 MB.
        return False

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in self._lowered:
            return self._lowered[func](*args, **kwargs)
        with self:
            parts = func.decompose(*args, **kwargs)
        if parts is not NotImplemented:
            return parts
        returns = func._schema.returns
        if returns and all(each.alias_info is not None and not each.alias_info.is_write for each in returns):
            return func(*args, **kwargs)
        shapes = ", ".join(f"{arg.dtype} {list(arg.shape)}" for arg in args if isinstance(arg, torch.Tensor))
        raise UnrecordableError(
            f"a layer is computed by torch, whose {func} of {shapes or 'numbers'} has no kernel that a recorded step "
            "could call; the lines about kernels above name the layers with a torch kernel"
        )
