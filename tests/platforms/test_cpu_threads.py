"""How many threads may be asked for."""

from __future__ import annotations

import logging

import pytest
from twofold.errors import ConfigError
from twofold.platforms.cpu_threads import check_num_threads


@pytest.mark.parametrize("count", [None, 1, 2])
def test_up_to_the_cores(count: int | None, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("twofold"), "propagate", True)
    check_num_threads(count, 2)
    assert not caplog.text


def test_more_than_cores_warns(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("twofold"), "propagate", True)
    check_num_threads(8, 2)
    assert "num_threads is 8" in caplog.text and "2 cores" in caplog.text


def test_far_more_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"10000.*2 cores.*\(8\).*leave it out"):
        check_num_threads(10000, 2)
