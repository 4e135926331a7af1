"""Folders that cannot be written and full disks become one sentence with a remedy, and nothing is left behind."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from twofold import env, storage
from twofold.errors import ConfigError, TwofoldError
from twofold.storage import StorageError, writing


@pytest.mark.parametrize("below", ["", "deep/er"])
def test_a_file_in_the_way(tmp_path: Path, below: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "file").write_text("x")
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "file"))
    with pytest.raises(StorageError, match="cannot be written; set TWOFOLD_CACHE"), writing(tmp_path / "file" / below):
        pass
    assert (tmp_path / "file").read_text() == "x"


@pytest.mark.parametrize("number", [errno.EROFS, errno.EACCES, errno.EPERM])
def test_refused_while_writing(tmp_path: Path, number: int) -> None:
    folder = tmp_path / "a" / "b"
    with pytest.raises(StorageError, match="cannot be written; choose a folder"), writing(folder):
        raise OSError(number, os.strerror(number), str(folder / "partial"))
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EDQUOT])
def test_full_disk_leaves_only_what_was_there(tmp_path: Path, number: int) -> None:
    (tmp_path / "a").mkdir()
    with (
        pytest.raises(StorageError, match=r"the disk that holds .*/a/b/c is full"),
        writing(tmp_path / "a" / "b" / "c"),
    ):
        raise OSError(number, os.strerror(number))
    assert list(tmp_path.rglob("*")) == [tmp_path / "a"]


def test_other_errors_pass(tmp_path: Path) -> None:
    for error in (FileNotFoundError(2, "no", "/elsewhere/model"), OSError("odd"), ValueError("x"), TwofoldError("y")):
        with pytest.raises(type(error)) as caught, writing(tmp_path / "new"):
            raise error
        assert caught.value is error and not (tmp_path / "new").exists()
    with writing(tmp_path / "new"):
        (tmp_path / "new" / "kept").write_text("")
    assert (tmp_path / "new" / "kept").is_file()


def test_is_writable(tmp_path: Path) -> None:
    assert storage.is_writable(tmp_path) and list(tmp_path.iterdir()) == []
    assert not storage.is_writable(Path("/proc")) and not storage.is_writable(tmp_path / "nothing")


def test_unknown_home(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TWOFOLD_CACHE", "~no-such-user-here/cache")
    with pytest.raises(ConfigError, match=r"no-such-user-here.*set TWOFOLD_CACHE"):
        env.cache_dir()


def test_log_level(monkeypatch: pytest.MonkeyPatch) -> None:
    for given, level in (("debug", "DEBUG"), ("", "INFO"), ("CRITICAL", "CRITICAL")):
        monkeypatch.setenv("TWOFOLD_LOG_LEVEL", given)
        assert env.log_level() == level
    command = [sys.executable, "-m", "twofold", "pull"]
    environment = {**os.environ, "TWOFOLD_LOG_LEVEL": "FOO"}
    result = subprocess.run(command, capture_output=True, text=True, timeout=60, env=environment)
    assert result.returncode == 2 and result.stdout == ""
    levels = "DEBUG, INFO, WARNING, ERROR, CRITICAL"
    assert result.stderr == f"twofold: TWOFOLD_LOG_LEVEL is 'FOO'; it must be one of {levels}\n"


def test_one_at_a_time_has_its_turn(tmp_path: Path) -> None:
    """Each takes the lock's file away with its turn: who waits for the old file must not work beside a new one."""
    inside: list[int] = []
    most: list[int] = []

    def work(number: int) -> None:
        with storage.turn(tmp_path / "lock", tmp_path / "never"):
            inside.append(number)
            most.append(len(inside))
            time.sleep(0.02)
            inside.remove(number)

    with ThreadPoolExecutor(5) as pool:
        list(pool.map(work, range(5)))
    assert most == [1] * 5 and list(tmp_path.iterdir()) == []


def test_nobody_waits_for_a_result_that_is_there(tmp_path: Path) -> None:
    with storage.turn(tmp_path / "lock", tmp_path / "result"):
        (tmp_path / "result").touch()
        with storage.turn(tmp_path / "lock", tmp_path / "result"):
            assert (tmp_path / "lock").exists()
    assert not (tmp_path / "lock").exists()


def test_room_is_taken_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with (tmp_path / "file").open("w+b") as stream:
        storage.allocate(stream, 1 << 20)
        status = os.fstat(stream.fileno())
        assert status.st_size == 1 << 20 and status.st_blocks * 512 >= 1 << 20

        def failing(number: int) -> None:
            def fail(*_: object) -> None:
                raise OSError(number, os.strerror(number))

            monkeypatch.setattr(os, "posix_fallocate", fail)

        failing(errno.EOPNOTSUPP)
        storage.allocate(stream, 2 << 20)  # a file system that takes no room ahead
        assert os.fstat(stream.fileno()).st_size == 2 << 20
        failing(errno.ENOSPC)
        with pytest.raises(OSError) as full:
            storage.allocate(stream, 3 << 20)
    error = storage.StorageError("the disk is full")
    error.__cause__ = full.value
    assert storage.is_out_of_space(full.value) and storage.is_out_of_space(error)
    assert not storage.is_out_of_space(OSError(errno.EROFS, "")) and not storage.is_out_of_space(None)
