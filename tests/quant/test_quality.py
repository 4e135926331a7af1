"""The quality card: what it says, where it is written, and when the models are not run."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

import pytest
from huggingface_hub import ModelCard
from twofold.cli import main
from twofold.quant import QuantizeReport, quantize_model
from twofold.quant import quality as quality_module
from twofold.quant.evaluation import EvaluationSpec
from twofold.quant.quality import Quality, measure_quality
from twofold.quant.quality_card import write_quality_card
from twofold.quant.quality_plot import can_plot

TinyModel = Callable[..., Path]
FEW = EvaluationSpec(num_windows=2, length=64)
README = "---\nlicense: mit\ntags: [other]\n---\n\n# The original\n"


def copied(source: Path, folder: Path, readme: str | None = None) -> Path:
    folder.mkdir()
    for path in source.iterdir():
        (folder / path.name).write_bytes(path.read_bytes())
    if readme is not None:
        (folder / "README.md").write_text(readme)
    return folder


@pytest.fixture(scope="module")
def made(tiny_model: TinyModel, tmp_path_factory: pytest.TempPathFactory) -> Quality:
    folder = tmp_path_factory.mktemp("card")
    source = copied(tiny_model("llama"), folder / "tiny-model")
    return measure_quality(quantize_model(str(source), "rtn:4:64", folder / "out"), FEW, device="cpu")


def test_figures(made: Quality) -> None:
    result = made.evaluation
    assert result is not None and made.reason == "" and made.seconds > 0
    assert result.divergence is not None and result.same_top is not None and result.reference_perplexity is not None
    assert 0 < result.divergence < 1 and 0 < result.same_top < 1
    words = dict(made.rows())
    assert words["divergence"].startswith(f"{result.divergence:.5f}") and "2 x 64 tokens" in words["evaluated in"]


def test_card(made: Quality) -> None:
    files = write_quality_card(made)
    report = made.report
    assert [path.name for path in files][:2] == ["README.md", "quality.json"]
    card = ModelCard.load(report.output / "README.md")
    assert card.data.base_model == "tiny-model" and card.data.license is None
    assert {"twofold", "rtn", "gptq_v2"} <= set(card.data.tags)
    assert made.evaluation is not None
    for figure in (made.evaluation.perplexity, made.evaluation.reference_perplexity):
        assert f"| {figure:.4f} |" in card.text
    assert f"{report.linear_bits:.3f} over all linear layers" in card.text
    assert "`model.layers.0.mlp.down_proj` stays plain: 96 input features" in card.text
    errors = [error.relative_rms for error in report.errors if ".layers.1." in error.module]
    assert f"| 1 | {sum(errors) / len(errors):.4f} |" in card.text


def test_json_has_every_module_and_no_folder_of_this_machine(made: Quality) -> None:
    write_quality_card(made)
    text = (made.report.output / "quality.json").read_text()
    figures = json.loads(text)
    assert len(figures["report"]["errors"]) == len(made.report.errors) == 12
    assert figures["report"]["peak_memory"] > 50 << 20 and figures["evaluation"]["perplexity"] > 1
    readme = (made.report.output / "README.md").read_text()
    assert str(made.report.output.parent) not in text + readme and figures["report"]["model"] == "tiny-model"


def test_the_readme_of_the_source_stays(tiny_model: TinyModel, tmp_path: Path) -> None:
    """B109: side files are carried over byte for byte; our card stands beside, with the licence of the source's."""
    source = copied(tiny_model("llama"), tmp_path / "source", README)
    report = quantize_model(str(source), "rtn:4:32", tmp_path / "out")
    files = write_quality_card(Quality(report=report, text=FEW, reason="a test"))
    assert files[0].name == "QUANTIZATION.md" and (tmp_path / "out" / "README.md").read_text() == README
    card = ModelCard.load(files[0])
    assert card.data.license == "mit" and "Not measured: a test." in card.text


def test_a_card_that_cannot_be_read_has_no_licence(tiny_model: TinyModel, tmp_path: Path) -> None:
    source = copied(tiny_model("llama"), tmp_path / "source", "---\nlicense: [\n---\n")
    report = quantize_model(str(source), "rtn:4:32", tmp_path / "out")
    (card, *_) = write_quality_card(Quality(report=report, text=FEW, reason="a test"))
    assert ModelCard.load(card).data.license is None


def test_a_model_that_does_not_fit_is_not_run(made: Quality, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quality_module, "SPARE_BYTES", 1 << 60)
    result = measure_quality(made.report, FEW, device="cpu")
    assert result.evaluation is None and "are free; run twofold eval" in result.reason
    assert dict(result.rows())["quality"].startswith("not measured: the original needs about")


def test_a_failure_is_a_reason(made: Quality) -> None:
    result = measure_quality(made.report, EvaluationSpec(num_windows=2, length=64), device="cuda")
    assert result.evaluation is None and result.reason


def test_plot(made: Quality) -> None:
    pytest.importorskip("matplotlib")
    write_quality_card(made)
    data = (made.report.output / "quality.png").read_bytes()
    assert data[:8] == b"\x89PNG\r\n\x1a\n" and "(quality.png)" in (made.report.output / "README.md").read_text()


class TestCommand:
    @pytest.fixture
    def few(self, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quality_module, "DEFAULT_TEXT", FEW)

    def run(self, source: Path, out: Path, *options: str) -> None:
        assert main(["quantize", str(source), "--output", str(out), *options]) == 0

    def test_on_by_default(
        self, tiny_model: TinyModel, tmp_path: Path, few: None, capsys: pytest.CaptureFixture[str]
    ) -> None:
        self.run(tiny_model("llama"), tmp_path / "out", "--json", str(tmp_path / "report.json"))
        printed = capsys.readouterr().out
        lines = dict(line.split("  ", 1) for line in printed.splitlines() if "  " in line)
        assert "README.md, quality.json" in lines["quality card"] and "nats a token" in lines["divergence"]
        assert ("matplotlib is not installed" in printed) != can_plot()
        figures = json.loads((tmp_path / "report.json").read_text())
        assert figures["evaluation"]["perplexity"] > 1 and figures["format"] == "gptq_v2"

    def test_left_out(self, tiny_model: TinyModel, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(quality_module, "evaluate", lambda *_, **__: pytest.fail("was evaluated"))
        self.run(tiny_model("llama"), tmp_path / "out", "--no-card")
        assert not {"README.md", "quality.json"} & {path.name for path in (tmp_path / "out").iterdir()}


def test_the_report_names_what_was_done(tiny_model: TinyModel, tmp_path: Path) -> None:
    report: QuantizeReport = quantize_model(str(tiny_model("llama")), "rtn:4:32:sym", tmp_path / "out")
    rows = dict(report.rows())
    assert rows["format"] == "gptq" and report.calibration is None
    assert rows["peak memory"].endswith("B")
