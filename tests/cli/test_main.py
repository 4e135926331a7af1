"""The command itself: help, exit codes, one line per error, any working folder."""

import importlib
import os
import subprocess
import sys
from pathlib import Path

import pytest
import twofold
from twofold import cli
from twofold.cli.parser import CommandParser
from twofold.errors import ConfigError, ModelNotFoundError, RequestError, TwofoldError

ROOT = Path(twofold.__file__).parent


def run(*arguments: str, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "twofold", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, timeout=120)


def test_version() -> None:
    result = run("--version")
    assert (result.returncode, result.stdout.strip()) == (0, f"twofold {twofold.__version__}")


def test_help_lists_every_command(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["--help"])
    assert stop.value.code == 0
    text = capsys.readouterr().out
    for name, summary in cli.COMMANDS.items():
        assert name in text and summary in text


def test_without_a_command_it_says_what_is_missing(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main([])
    assert stop.value.code == 2
    assert "COMMAND" in capsys.readouterr().err


def test_unknown_command_names_the_right_ones(capsys: pytest.CaptureFixture) -> None:
    with pytest.raises(SystemExit) as stop:
        cli.main(["quantise"])
    assert stop.value.code == 2
    error = capsys.readouterr().err
    assert "'quantise'" in error and ", ".join(cli.COMMANDS) in error and "did you mean quantize?" in error


def options_of(parser: CommandParser) -> list:
    found = []
    for action in parser._actions:
        children = getattr(action, "choices", None)
        if isinstance(children, dict):
            for child in children.values():
                found += options_of(child)
        else:
            found.append(action)
    return found


@pytest.mark.parametrize("command", list(cli.COMMANDS))
def test_every_option_of_every_command_has_a_help_line(command: str, capsys: pytest.CaptureFixture) -> None:
    options = options_of(cli.build_parser(command))
    assert [action.dest for action in options if not action.help] == []
    with pytest.raises(SystemExit) as stop:
        cli.main([command, "--help"])
    assert stop.value.code == 0
    assert f"usage: twofold {command}" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("device is wrong"), 2),
        (RequestError("top_p is wrong"), 2),
        (ModelNotFoundError("no such model"), 1),
        (TwofoldError("it failed"), 1),
        (KeyboardInterrupt(), 130),
    ],
)
def test_errors_are_one_line_and_a_code(
    error: BaseException, code: int, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    def fail(args: object) -> int:
        raise error

    monkeypatch.setattr(importlib.import_module("twofold.cli.pull"), "run", fail)
    assert cli.main(["pull"]) == code
    captured = capsys.readouterr()
    assert captured.out == ""
    assert captured.err == (f"twofold pull: {error}\n" if str(error) else "\n")


def test_closed_pipe_is_no_traceback() -> None:
    script = f"{sys.executable} -m twofold pull | true"
    result = subprocess.run(["bash", "-c", script], capture_output=True, text=True, timeout=120)
    assert "Traceback" not in result.stderr and "BrokenPipe" not in result.stderr


def test_a_missing_model_is_one_sentence(tmp_path: Path) -> None:
    result = run("pull", str(tmp_path / "nothing-here"))
    assert result.returncode == 1
    assert len(result.stderr.strip().splitlines()) == 1
    assert "nothing-here" in result.stderr


def test_repository_root_does_not_shadow_other_packages() -> None:
    """The root has folders such as ``kernels``, a name that transformers looks for."""
    script = (
        "import runpy, sys\n"
        "sys.argv = ['twofold', '--version']\n"
        "try:\n    runpy.run_module('twofold', run_name='__main__')\n"
        "except SystemExit as stop:\n    assert not stop.code\n"
        "import importlib.util\n"
        "for name in ('kernels', 'engine', 'server', 'quant', 'platforms', 'cli'):\n"
        "    spec = importlib.util.find_spec(name)\n"
        f"    assert spec is None or not (spec.origin or '').startswith({str(ROOT)!r}), spec\n"
        "from transformers import AutoConfig\n"
        "assert 'kernels' not in sys.modules or not sys.modules['kernels'].__file__.startswith("
        f"{str(ROOT)!r})\n"
    )
    environment = {**os.environ, "PYTHONPATH": ""}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120, env=environment
    )
    assert result.returncode == 0, result.stderr


def test_transformers_imports_with_the_root_on_the_path() -> None:
    """``python -c`` in the root has it first on the path: transformers' look at ``kernels`` then meets our folder."""
    script = (
        "from transformers.utils.import_utils import is_kernels_available\n"
        "assert not is_kernels_available()\n"
        "from transformers import AutoModelForCausalLM\n"
        "from twofold import SamplingParams\n"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, timeout=120)
    assert result.returncode == 0, result.stderr
