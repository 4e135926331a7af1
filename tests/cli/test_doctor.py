"""Doctor: complete, honest about wrong kernels, and usable without a compiler or a writable cache."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from twofold import cli, env
from twofold.cli import diagnosis, kernel_check
from twofold.kernels.cases import Source, make_cases
from twofold.kernels.cpu import library
from twofold.kernels.registry import Candidate, Quality


def doctor(capsys: pytest.CaptureFixture, *arguments: str) -> tuple[int, dict]:
    code = cli.main(["doctor", "--device", "cpu", "--json", *arguments])
    return code, json.loads(capsys.readouterr().out)


def test_json_report(capsys: pytest.CaptureFixture) -> None:
    code, report = doctor(capsys)
    assert code == 0 and report["problems"] == []
    assert report["versions"]["torch"] == torch.__version__
    assert report["device"]["spec"]["device_type"] == "cpu"
    names = {row["name"] for row in report["environment"]}
    assert {"TWOFOLD_CACHE", "TWOFOLD_LOG_LEVEL", "CC"} <= names
    rows = report["kernels"]
    cases = {(row["op"], row["problem"]) for row in rows}
    problems = [problem for op, problem in cases if op == "paged_attention"]
    assert any("cache int8" in problem for problem in problems) and any("float8" in problem for problem in problems)
    assert {op for op, _ in cases} >= {"rms_norm", "add_rms_norm", "rope", "silu_and_mul", "linear", "paged_attention"}
    for case in cases:
        statuses = [row["status"] for row in rows if (row["op"], row["problem"]) == case]
        refused = statuses == ["refused"] and "bf16 activations" in case[1]  # what needs AMX
        assert (statuses.count("selected") == 1 and "wrong" not in statuses) or refused
    assert all(row["detail"] for row in rows)


def test_text_report(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    for words in ("versions", "compiler", "TWOFOLD_CACHE", "paged_attention", "selected", "Everything"):
        assert words in text


def test_a_device_that_is_not_there(capsys: pytest.CaptureFixture) -> None:
    if torch.version.hip:
        pytest.skip("this torch is a ROCm build")
    assert cli.main(["doctor", "--device", "rocm", "--json"]) == 1
    assert "--device rocm" in json.loads(capsys.readouterr().out)["problems"][0]


def test_every_environment_variable_is_found() -> None:
    functions = Path(env.__file__).read_text().count("\ndef ")
    rows = diagnosis.environment()
    assert len({row["name"] for row in rows}) == functions
    assert all(row["purpose"] and row["value"] for row in rows)


def test_environment_in_plain_words(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CC", raising=False)
    rows = {row["name"]: row for row in diagnosis.environment()}
    assert rows["CC"]["value"] == "none"
    assert not [row for row in rows.values() if "`" in row["purpose"] or row["value"] == "None"]


def test_keys_are_not_shown(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture) -> None:
    monkeypatch.setenv("TWOFOLD_API_KEY", "very-secret")
    assert cli.main(["doctor", "--device", "cpu", "--json"]) == 0
    assert "very-secret" not in capsys.readouterr().out


def test_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CC", "no-such-compiler")
    assert diagnosis.compiler()["path"] == "none"
    assert "no-such-compiler" in diagnosis.compiler()["note"]


@pytest.fixture
def failing_compiler(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[str]:
    """The message of a compiler that fails, of which a machine without one has no kernels either."""
    script, message = tmp_path / "cc", "error: " + "no such luck " * 20
    script.write_text(f"#!/bin/sh\necho 'x.c:1:2: {message}' >&2; exit 1\n")
    script.chmod(0o755)
    monkeypatch.setenv("CC", str(script))
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "cache"))
    library.load.cache_clear()
    yield message
    library.load.cache_clear()


def test_a_compilers_message_is_printed_once(capsys: pytest.CaptureFixture, failing_compiler: str) -> None:
    assert cli.main(["doctor", "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    assert text.count(failing_compiler) == 1 and text.count("there are no compiled CPU kernels (") > 20
    compiler = text[text.index("\ncompiler\n") : text.index("\ncache\n")]
    assert failing_compiler in compiler and "-march=native" in compiler
    assert max(map(len, text.replace(compiler, "").splitlines())) < 200


def test_a_models_report_has_it_once(
    tiny_model: Callable[..., Path], capsys: pytest.CaptureFixture, failing_compiler: str
) -> None:
    assert cli.main(["doctor", str(tiny_model("llama")), "--device", "cpu"]) == 0
    text = capsys.readouterr().out
    lines = [line for line in text.splitlines() if failing_compiler in line]
    assert len(lines) == 1 and lines[0].startswith("compiler: ")
    assert "mlp.down_proj" in text and "there are no compiled CPU kernels (" in text


def test_a_compilers_message_is_reported_once(capsys: pytest.CaptureFixture, failing_compiler: str) -> None:
    code, report = doctor(capsys)
    assert code == 0 and failing_compiler in report["compiler"]["failure"]
    assert json.dumps(report).count(failing_compiler) == 1


def test_cache_that_cannot_be_written(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "file" / "cache"))
    assert diagnosis.cache()["writable"].startswith("no")
    monkeypatch.setenv("TWOFOLD_CACHE", "/proc/twofold")
    assert diagnosis.cache()["writable"] == "no: /proc cannot be written; set TWOFOLD_CACHE"
    monkeypatch.setenv("TWOFOLD_CACHE", str(tmp_path / "new"))
    assert diagnosis.cache()["writable"] == "yes"


def test_a_wrong_kernel_is_found() -> None:
    source = Source(torch.device("cpu"), torch.float32)
    case = next(case for case in make_cases(source) if case.op == "silu_and_mul")

    def candidate(run: object) -> Candidate:
        return Candidate(op=case.op, name="x", quality=Quality.NATIVE, can_run=lambda spec, problem: None, run=run)

    def right(x: torch.Tensor) -> torch.Tensor:
        gate, up = x.chunk(2, -1)
        return gate / (1 + (-gate).exp()) * up

    assert kernel_check.check(case, candidate(right), 1e-4)[0] == "ready"
    assert kernel_check.check(case, candidate(lambda x: right(x) * 1.01), 1e-4)[0] == "wrong"
    assert kernel_check.check(case, candidate(lambda x: right(x) * float("nan")), 1e-4)[0] == "wrong"
    status, detail = kernel_check.check(case, candidate(lambda x: 1 / 0), 1e-4)
    assert status == "wrong" and "ZeroDivisionError" in detail
