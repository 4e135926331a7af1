"""Numbers of the Triton kernels, run by triton's interpreter on the CPU.

The interpreter is chosen when triton is imported, so these tests need a process that has TRITON_INTERPRET=1 from the
start: ``test_interpreted.py``, one folder up, starts it. Anywhere else this folder is empty.

The interpreter is slow. Of a test with several parameters a part runs that has every value of every parameter; the
other combinations are marked ``slow``.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

if os.environ.get("TRITON_INTERPRET") == "1" and importlib.util.find_spec("triton") is not None:
    import triton_interpreter

    triton_interpreter.repair()
else:
    collect_ignore_glob = ["test_*.py"]

# (names, values) of each parametrization.
Values = frozenset[tuple[str, str]]


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Before pytest leaves out what is marked."""
    by_test: dict[str, dict[pytest.Item, Values]] = {}
    for item in items:
        callspec = getattr(item, "callspec", None)
        if callspec is not None and Path(__file__).parent in item.path.parents:
            by_test.setdefault(item.nodeid.split("[")[0], {})[item] = _values(item, callspec.params)
    for cases in by_test.values():
        for item in cases.keys() - set(representatives(cases)):
            item.add_marker(pytest.mark.slow)


def _values(item: pytest.Item, params: dict[str, Any]) -> Values:
    found = []
    for mark in item.iter_markers("parametrize"):
        names = mark.args[0].split(",") if isinstance(mark.args[0], str) else list(mark.args[0])
        found.append((str(names), repr([params[name.strip()] for name in names])))
    return frozenset(found)


def representatives(cases: dict[pytest.Item, Values]) -> Iterable[pytest.Item]:
    """Few cases that have every value of every parameter together: always the one with the most new values."""
    missing = frozenset[tuple[str, str]]().union(*cases.values())
    while missing:
        best = max(cases, key=lambda item: len(cases[item] & missing))
        missing -= cases[best]
        yield best
