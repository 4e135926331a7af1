"""Folders that Twofold writes into, and one sentence where a folder or its disk does not take what comes."""

from __future__ import annotations

import errno
import fcntl
import math
import os
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from . import env
from .errors import StorageError
from .log import get_logger

logger = get_logger(__name__)

_FULL = frozenset({errno.ENOSPC, errno.EDQUOT})
_TURN_POLL = 0.1


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Make ``folder`` and write below it in the block; the folders that this made go again where the block fails.

    StorageError in place of an OSError which means that the folder cannot be written or that its disk is full; any
    other error passes.
    """
    made = [path for path in (folder, *folder.parents) if not os.path.lexists(path)]
    try:
        folder.mkdir(parents=True, exist_ok=True)
        yield
    except BaseException as error:
        for path in made:
            with suppress(OSError):  # somebody else's file lies there by now
                path.rmdir()
        reason = _reason(error, folder)
        if reason is not None:
            raise StorageError(reason) from error
        raise


@contextmanager
def turn(
    lock: Path, result: Path, seconds: float = math.inf, is_made: Callable[[], bool] | None = None
) -> Iterator[None]:
    """Wait while another process makes ``result``, for at most ``seconds``: look first whether it is there now.

    ``is_made`` tells whether the result is there; by default, whether its path exists. A process that dies gives its
    turn up. Where the file system has no locks nobody waits.
    """
    stream = _held(lock, result, time.monotonic() + seconds, is_made or result.exists)
    try:
        yield
    finally:
        if stream is not None:
            lock.unlink(missing_ok=True)
            stream.close()


def _held(lock: Path, result: Path, deadline: float, is_made: Callable[[], bool]) -> IO[str] | None:
    """The locked file, or None where there is no need or no way to wait."""
    waits = False
    while True:
        stream = lock.open("a")
        try:
            fcntl.flock(stream, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if _is_still(lock, stream):
                return stream
            stream.close()  # the process before removed it; whoever comes now locks another file
            continue
        except BlockingIOError:
            stream.close()
            if is_made() or time.monotonic() > deadline:
                return None
        except OSError:
            stream.close()
            return None
        if not waits:
            waits = True
            logger.info("waiting for another process that makes %s", result)
        time.sleep(_TURN_POLL)


def _is_still(path: Path, stream: IO[str]) -> bool:
    """Whether ``path`` names the open file."""
    try:
        return os.path.samestat(path.stat(), os.fstat(stream.fileno()))
    except FileNotFoundError:
        return False


def is_writable(folder: Path) -> bool:
    """Whether a file can be made in ``folder``; permissions alone do not tell it of a mount or a special folder."""
    try:
        with tempfile.TemporaryFile(dir=folder):
            return True
    except OSError:
        return False


def is_out_of_space(error: BaseException | None) -> bool:
    """Whether ``error``, or what it was raised from, says that a disk or a quota is full."""
    while error is not None:
        if isinstance(error, OSError) and error.errno in _FULL:
            return True
        error = error.__cause__
    return False


def allocate(stream: IO[bytes], size: int) -> None:
    """Give a file ``size`` bytes of disk now, so that a full disk is an OSError here and not hours later.

    Where the file system allocates nothing ahead, the file has its length only.
    """
    stream.truncate(size)
    try:
        os.posix_fallocate(stream.fileno(), 0, size)
    except (AttributeError, OSError) as error:
        if is_out_of_space(error):
            raise


def is_full(text: str) -> bool:
    """Whether another program's error output says that a disk is full."""
    return any(f"[Errno {number}]" in text or os.strerror(number) in text for number in _FULL)


def disk_full(folder: Path) -> str:
    """The sentence about a full disk, with its remedy."""
    return f"the disk that holds {folder} is full; {room_remedy(folder)}"


def room_remedy(folder: Path) -> str:
    """What to do where the disk of ``folder`` has no room."""
    return f"free some space, or {_remedy(folder)} on another disk"


def not_writable(folder: Path) -> str:
    """The sentence about a folder that takes no files, with its remedy."""
    return f"{folder} cannot be written; {_remedy(folder)}"


def _reason(error: BaseException, folder: Path) -> str | None:
    if not isinstance(error, OSError):
        return None
    if error.errno in _FULL:
        return disk_full(folder)
    if error.errno == errno.EROFS or _concerns(error.filename, folder):
        return f"{not_writable(folder)} ({error.strerror})"
    return None


def _concerns(name: object, folder: Path) -> bool:
    """Whether the file of an error lies in ``folder``, or is one of the folders above it."""
    if not isinstance(name, (str, os.PathLike)):
        return False
    path = Path(name)
    return path == folder or folder in path.parents or path in folder.parents


def _remedy(folder: Path) -> str:
    cache = env.cache_dir()
    return "set TWOFOLD_CACHE to a folder" if folder == cache or cache in folder.parents else "choose a folder"
