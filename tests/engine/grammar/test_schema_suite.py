"""The script that runs a public JSON-schema suite judges as the suite says."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import twofold

SCRIPT = Path(twofold.__file__).parent / "benchmarks" / "schema_suite.py"
SUITE = [
    {
        "description": "a pair",
        "schema": {"type": "object", "properties": {"a": {"type": "integer"}, "b": {}}, "required": ["a"]},
        "tests": [
            {"description": "whole", "data": {"b": [1], "a": 2}, "valid": True},
            {"description": "wrong type", "data": {"a": "2"}, "valid": False},
            {"description": "judged falsely by this suite", "data": {"a": 3}, "valid": False},
            {"description": "judged falsely as well", "data": {"b": 3}, "valid": True},
        ],
    },
    {"description": "not served", "schema": {"not": {}}, "tests": [{"description": "x", "data": 1, "valid": False}]},
]


def test_verdicts(tmp_path: Path) -> None:
    (tmp_path / "mixed.json").write_text(json.dumps(SUITE))
    command = [sys.executable, str(SCRIPT), str(tmp_path)]
    result = subprocess.run(command, capture_output=True, text=True, check=True, timeout=60)
    lines = result.stdout.splitlines()
    assert (
        lines[1].split() == ["mixed", "2", "1", "|", "4", "2", "1", "1"]
        and lines[1].split()[1:] == lines[2].split()[1:]
    )
    assert lines[3:] == ["taken though invalid: mixed: a pair: judged falsely by this suite"]
