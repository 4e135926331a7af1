"""One rule for every command: 2 where what was typed can never work, 1 where it failed."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import textwrap
from collections.abc import Callable
from pathlib import Path

import pytest
from twofold import cli

TinyModel = Callable[..., Path]
COMMANDS = {"doctor": [], "plan": [], "eval": [], "quantize": ["--output", "out"]}
WRONG = [
    (["doctor", "plan"], ["--arch", "gfx9"], 2),
    (["doctor", "plan"], ["--arch", "gfx9999"], 2),
    (["doctor", "plan"], ["--block-size", "3"], 2),
    (["doctor", "plan", "eval"], ["--device", "rocm"], 1),
    (["eval"], ["--quantize", "foo:4"], 2),
    (["eval"], ["--quantize", "rtn:4:32", "--quantization", "int8"], 2),
]


@pytest.mark.parametrize(
    ("command", "options", "code"), [(name, options, code) for names, options, code in WRONG for name in names]
)
def test_wrong_options(
    command: str, options: list[str], code: int, tiny_model: TinyModel, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main([command, str(tiny_model("llama")), *options]) == code
    said = capsys.readouterr()
    assert "Traceback" not in said.err and options[1].partition(":")[0] in said.out + said.err


@pytest.mark.parametrize("command", COMMANDS)
@pytest.mark.parametrize(
    ("change", "code", "said"),
    [
        ({"num_attention_heads": 7}, 2, "num_attention_heads 7"),
        ({"architectures": ["MambaForCausalLM"]}, 1, "MambaForCausalLM"),
        (None, 1, "there is no file or folder"),
    ],
)
def test_wrong_models(
    command: str,
    change: dict[str, object] | None,
    code: int,
    said: str,
    tiny_model: TinyModel,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    model = tmp_path / "model"
    if change is not None:
        shutil.copytree(tiny_model("llama"), model)
        config = json.loads((model / "config.json").read_text()) | change
        (model / "config.json").write_text(json.dumps(config))
    assert cli.main([command, str(model), *COMMANDS[command]]) == code
    printed = capsys.readouterr()
    assert said in printed.out + printed.err and not (tmp_path / "out").exists()


def test_sigterm_unwinds_a_command(tmp_path: Path) -> None:
    """Temporary folders go, as with Ctrl-C; the code is a shell's for SIGTERM."""
    script = textwrap.dedent("""
        import sys, tempfile, time
        from twofold import cli
        from twofold.cli import pull
        def run(args):
            with tempfile.TemporaryDirectory():
                print("ready", flush=True)
                time.sleep(600)
        pull.run = run
        sys.exit(cli.main(["pull"]))
    """)
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    process = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True, env=environment)
    try:
        assert process.stdout is not None and process.stdout.readline() == "ready\n"
        assert len(list(tmp_path.iterdir())) == 1
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == cli.EXIT_TERMINATED == 143
    finally:
        process.kill()
    assert list(tmp_path.iterdir()) == []
