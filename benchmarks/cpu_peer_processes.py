"""Starts and stops what cpu_peers.py compares; every peer answers ``run(workload) -> [Trace]``."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import time
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

from cpu_peer_rows import Peer
from engines import Trace
from other_work import process_tree
from workloads import Workload


class PeerError(Exception):
    """A peer did not start, ended, or made other than what was asked for."""


class Running:
    """A started peer. ``start_s`` is the time from the command to the end of its first request."""

    def __init__(self, peer: Peer, cores: set[int], first: Workload, log: str = os.devnull) -> None:
        self._peer = peer
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            port = probe.getsockname()[1]
        self._url = f"http://127.0.0.1:{port}"
        asked = {"OMP_NUM_THREADS": str(len(cores)), "TOKENIZERS_PARALLELISM": "false", **peer.environment}
        environment = {name: word for name, word in {**os.environ, **asked}.items() if word is not None}
        pipe = None if peer.http else subprocess.PIPE
        os.sched_setaffinity(0, cores)  # inherited
        start = time.perf_counter()
        with open(log, "a") as errors:
            self._process = subprocess.Popen(
                [word.replace("{port}", str(port)) for word in peer.command],
                stdin=pipe,
                stdout=pipe or errors,
                stderr=errors,
                text=True,
                env=environment,
                start_new_session=True,
            )
        try:
            self._model = self._wait() if peer.http else ""
            self.run(first)
        except BaseException:
            self.stop()
            raise
        self.start_s = time.perf_counter() - start

    def _wait(self) -> str:
        from twofold.cli.openai_client import OpenAIClient
        from twofold.errors import TwofoldError

        client, limit = OpenAIClient(self._url), time.monotonic() + self._peer.start_limit_s
        while time.monotonic() < limit and self._process.poll() is None:
            try:
                return client.model_names()[0]
            except (TwofoldError, IndexError):
                time.sleep(0.1)
        raise PeerError(f"{self._peer.name} did not get ready; look at its log with --log FILE")

    def run(self, workload: Workload) -> list[Trace]:
        """Complete all requests of a workload; traces in no particular order."""
        if self._peer.http:
            return self._over_http(workload)
        assert self._process.stdin and self._process.stdout
        answer = ""
        with suppress(BrokenPipeError):
            print(json.dumps(asdict(workload)), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        if not answer:
            raise PeerError(f"{self._peer.name} ended; look at its log with --log FILE")
        traces = [Trace(**trace) for trace in json.loads(answer)]
        self._check(workload, sum(len(trace.arrivals) for trace in traces))
        return traces

    def _over_http(self, workload: Workload) -> list[Trace]:
        from twofold.cli.load_generator import Job, run_load
        from twofold.cli.openai_client import OpenAIClient

        jobs = [Job(prompt=request.prompt, output_len=request.num_output) for request in workload.requests]
        report = run_load(OpenAIClient(self._url), self._model, jobs, workload.concurrency, self._peer.extra)
        for outcome in report.outcomes:
            if outcome.error:
                raise PeerError(f"{self._peer.name}: {outcome.error}")
        self._check(
            workload,
            sum(outcome.num_output_tokens for outcome in report.outcomes),
            sum(outcome.num_prompt_tokens for outcome in report.outcomes),
        )
        return [Trace(outcome.started, outcome.arrivals) for outcome in report.outcomes]

    def _check(self, workload: Workload, num_made: int, num_read: int = 0) -> None:
        """Refuse other lengths than were asked for; what a peer read is 0 where it does not tell."""
        asked = sum(request.num_output for request in workload.requests)
        if num_made != asked:
            raise PeerError(f"{self._peer.name} made {num_made} tokens of the {asked} that {workload.name} asks for")
        sent = sum(len(request.prompt) for request in workload.requests)
        if num_read not in (0, sent):
            raise PeerError(f"{self._peer.name} read {num_read} tokens of the {sent} that {workload.name} has")

    def pids(self) -> list[int]:
        """Of all its processes."""
        return process_tree(self._process.pid)

    def peak_bytes(self) -> int:
        """Sum of the processes' highest resident memory so far."""
        return sum(_high_water(pid) for pid in self.pids())

    def stop(self) -> None:
        """End it and all that it started, those too that made a session of their own."""
        started = self.pids()
        for sent in (signal.SIGTERM, signal.SIGKILL):
            if self._process.poll() is None:
                os.killpg(self._process.pid, sent)
                try:
                    self._process.wait(timeout=15)
                except subprocess.TimeoutExpired:
                    continue
        with suppress(ProcessLookupError):  # what outlived the first one
            os.killpg(self._process.pid, signal.SIGKILL)
        for pid in started[1:]:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)


def _high_water(pid: int) -> int:
    try:
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith("VmHWM:"))
