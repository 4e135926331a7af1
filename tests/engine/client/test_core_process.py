"""The core's process: how it starts, fails, idles and ends (B086, B087, B094)."""

from __future__ import annotations

import asyncio
import os
import signal
import subprocess
import sys
import textwrap
import time
from pathlib import Path

import pytest
from engine_client import collect, counting_client, until, with_client
from twofold.engine.client import AsyncEngineClient
from twofold.engine.sampling_params import SamplingParams
from twofold.errors import ConfigError, EngineDeadError

SUPPORT = Path(__file__).parents[2] / "support"
FOREVER = SamplingParams(max_tokens=4000, ignore_eos=True)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def cpu_seconds(pid: int) -> float:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@pytest.mark.parametrize(
    ("core", "reason"),
    [("RaisingCore", "ZeroDivisionError: the fifth step"), ("DyingCore", "exit code -9"), ("HangingCore", "busy")],
)
def test_every_open_request_hears_of_a_dead_core(core: str, reason: str) -> None:
    async def check(client: AsyncEngineClient) -> None:
        pid = client.core_pid
        readers = [asyncio.ensure_future(collect(client.generate("a", FOREVER))) for _ in range(5)]
        done, pending = await asyncio.wait(readers, timeout=60)
        assert not pending
        assert all(isinstance(reader.exception(), EngineDeadError) for reader in done)
        assert all(reason in str(reader.exception()) for reader in done)
        assert client.errored and not client.is_ready
        assert client.num_open_requests == 0
        with pytest.raises(EngineDeadError, match=reason):
            await collect(client.generate("a", FOREVER))
        await until(lambda: not is_running(pid))

    with_client(check, core, hang_timeout=0.1 if core == "HangingCore" else 600.0)


def test_outputs_before_the_death_were_delivered() -> None:
    async def check(client: AsyncEngineClient) -> None:
        text = ""
        with pytest.raises(EngineDeadError):
            async for delta in client.generate("a", FOREVER):
                text += delta.text
        assert "bcde".startswith(text) and text

    with_client(check, "RaisingCore")


@pytest.mark.parametrize(
    ("core", "error", "message"),
    [
        ("MisconfiguredCore", ConfigError, "block_size is 3; it must be a power of two"),
        ("BrokenCore", EngineDeadError, "KeyError: 'oops'"),
        ("KilledAtStartCore", EngineDeadError, "exit code -9"),
        ("NoSuchCore", EngineDeadError, "NoSuchCore"),
    ],
)
def test_errors_of_the_start_come_with_their_message(core: str, error: type[Exception], message: str) -> None:
    async def check() -> None:
        client = counting_client(core)
        with pytest.raises(error, match=message):
            await asyncio.wait_for(client.launch(), 100)
        assert client.errored and not client.is_ready
        assert not is_running(client.core_pid)
        await client.shutdown()

    asyncio.run(check())


def test_start_can_be_cancelled() -> None:
    async def check() -> None:
        client = counting_client("SlowStartCore")
        launch = asyncio.ensure_future(client.launch())
        await until(lambda: client.core_pid is not None)
        await asyncio.sleep(0.3)
        launch.cancel()
        with pytest.raises(asyncio.CancelledError):
            await launch
        assert not is_running(client.core_pid)
        await client.shutdown()

    asyncio.run(check())


def test_idle_core_sleeps() -> None:
    async def check(client: AsyncEngineClient) -> None:
        await collect(client.generate("a", SamplingParams(max_tokens=3)))
        before = cpu_seconds(client.core_pid)
        await asyncio.sleep(1.5)
        assert cpu_seconds(client.core_pid) - before < 0.2
        assert client.is_ready

    # Shorter than the idle time, longer than a step on a machine that is busy.
    with_client(check, hang_timeout=1.0)


def test_signals_of_the_group_do_not_end_the_core() -> None:
    async def check(client: AsyncEngineClient) -> None:
        reader = asyncio.ensure_future(collect(client.generate("a", SamplingParams(max_tokens=20))))
        await until(lambda: client.num_open_requests == 1)
        os.kill(client.core_pid, signal.SIGTERM)
        os.kill(client.core_pid, signal.SIGINT)
        assert (await reader)[-1].finish_reason == "length"

    with_client(check, "SlowCore")


def start_script(core: str, end: str) -> tuple[subprocess.Popen, int, Path]:
    """A program with a client and a core; ``end`` is its last statement. Returns it, the core's pid and its folder."""
    script = f"""
        import asyncio, sys, time
        sys.path.insert(0, {str(SUPPORT)!r})
        from engine_client import counting_client

        async def main():
            client = counting_client({core!r})
            launch = asyncio.ensure_future(client.launch())
            while client.core_pid is None:
                await asyncio.sleep(0.01)
            print(client.core_pid, client._handle._directory, flush=True)
            {end}

        if __name__ == "__main__":
            asyncio.run(main())
    """
    process = subprocess.Popen([sys.executable, "-c", textwrap.dedent(script)], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    pid, directory = process.stdout.readline().split()
    return process, int(pid), Path(directory)


@pytest.mark.parametrize("core", ["CountingCore", "SlowStartCore"])
def test_no_orphan_when_the_parent_is_killed(core: str) -> None:
    process, pid, directory = start_script(core, "await asyncio.sleep(60)")
    time.sleep(1.0)
    assert is_running(pid) and directory.is_dir()
    assert directory.stat().st_mode & 0o777 == 0o700
    process.kill()
    process.wait()
    asyncio.run(until(lambda: not is_running(pid)))
    assert not directory.exists()


def test_program_that_forgets_to_shut_down_ends() -> None:
    process, pid, _ = start_script("CountingCore", "await launch")
    assert process.wait(100) == 0
    asyncio.run(until(lambda: not is_running(pid)))
