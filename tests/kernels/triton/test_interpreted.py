"""Starts the process in which the kernels run under triton's interpreter."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent / "interpreted"


def run_folder(*arguments: str) -> subprocess.CompletedProcess[str]:
    environment = {**os.environ, "TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", str(FOLDER), *arguments]
    root = Path(__file__).parents[3]
    return subprocess.run(command, env=environment, cwd=root, capture_output=True, text=True)


@pytest.mark.timeout(1500)  # hundreds of tests in one process
def test_kernels_match_the_reference() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    result = run_folder()
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_kernels_match_the_reference_on_many_random_shapes() -> None:
    pytest.importorskip("triton", reason="triton is not installed")
    result = run_folder("-m", "slow")
    assert result.returncode == 0, result.stdout[-8000:] + result.stderr[-2000:]
