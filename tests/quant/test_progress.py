"""Progress where the stream is no terminal: plain lines, and none before work starts."""

from __future__ import annotations

import pytest
from twofold.quant import progress as module
from twofold.quant.progress import layer_progress


def test_nothing_before_the_first_call(capsys: pytest.CaptureFixture[str]) -> None:
    with layer_progress("quantizing m"):
        pass
    assert capsys.readouterr().err == ""


def test_first_and_last_line_once(capsys: pytest.CaptureFixture[str]) -> None:
    with layer_progress("quantizing m") as progress:
        for done in (0, 1, 2, 3, 3):
            progress(done, 3)
    lines = capsys.readouterr().err.splitlines()
    assert [line.split(": ")[1].split(" layers")[0] for line in lines] == ["0/3", "3/3"]


def test_a_line_every_few_seconds(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    clock = iter(range(0, 100, 2))
    monkeypatch.setattr(module.time, "monotonic", lambda: float(next(clock)))
    with layer_progress("quantizing m") as progress:
        for done in range(8):
            progress(done, 30)
    shown = [line.split(": ")[1] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["0/30 layers, 2 s", "3/30 layers, 8 s", "6/30 layers, 14 s"]


def test_a_bar_in_a_terminal(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module.Console, "is_terminal", True)
    with layer_progress("quantizing m"):
        pass
    assert capsys.readouterr().err == ""
    with layer_progress("quantizing m") as progress:
        progress(0, 2)
        progress(2, 2)
    assert "2/2" in capsys.readouterr().err
