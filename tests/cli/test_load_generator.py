"""The load generator: how much it sends, when, and that its figures follow from what arrived."""

import itertools
import json
import math
import time
from pathlib import Path

import pytest
from sse_server import scripted_server
from twofold import cli
from twofold.cli.load_generator import Load, Outcome, Report, calibrate, make_jobs, run_load
from twofold.cli.openai_client import OpenAIClient


def test_jobs_are_seeded_and_within_the_range() -> None:
    load = Load(num_requests=50, input_len=100, output_len=40, range_ratio=0.25, rate=10.0)
    jobs = make_jobs(load, words_per_token=1.0)
    assert jobs == make_jobs(load, words_per_token=1.0)
    assert all(75 - 4 <= len(job.prompt.split()) <= 125 for job in jobs)
    assert all(30 <= job.output_len <= 50 for job in jobs)
    assert len({job.prompt.split(":")[0] for job in jobs}) == 50
    gaps = [later.due - earlier.due for earlier, later in itertools.pairwise(jobs)]
    assert min(gaps) > 0 and 0.05 < sum(gaps) / len(gaps) < 0.2


def test_without_a_rate_everything_is_due_at_once() -> None:
    assert {job.due for job in make_jobs(Load(num_requests=5), 1.0)} == {0.0}


def test_calibration_counts_words_per_token() -> None:
    with scripted_server() as server:
        # The scripted server counts a word as a token.
        assert calibrate(OpenAIClient(server.url), "scripted") == 1.0


@pytest.mark.parametrize("usage", [True, False])
def test_closed_loop(usage: bool) -> None:
    with scripted_server(pause=0.05, usage=usage) as server:
        jobs = make_jobs(Load(num_requests=9, input_len=10, output_len=5), 1.0)
        report = run_load(OpenAIClient(server.url), "scripted", jobs, 3, {"ignore_eos": True}).as_dict()
        assert server.max_open == 3
        assert all(body["ignore_eos"] and body["max_tokens"] == 5 for body in server.bodies)
    assert (report["num_requests"], report["num_failed"], report["output_tokens"]) == (9, 0, 45)
    assert report["output_tokens_per_second"] == pytest.approx(45 / report["seconds"])
    assert report["itl_ms"]["p50"] > 45
    assert report["seconds"] > 3 * 5 * 0.05


def test_open_loop_waits_until_a_request_is_due() -> None:
    load = Load(num_requests=4, input_len=8, output_len=1, rate=20.0, seed=3)
    jobs = make_jobs(load, 1.0)
    began = time.perf_counter()
    with scripted_server() as server:
        report = run_load(OpenAIClient(server.url), "scripted", jobs, 4, {})
    for job, started in zip(jobs, sorted(outcome.started for outcome in report.outcomes), strict=True):
        assert started - began >= job.due


def test_figures_of_a_hand_made_run() -> None:
    outcomes = [
        Outcome(started=10.0, arrivals=[10.5, 10.6, 10.8], num_prompt_tokens=7, num_output_tokens=4),
        Outcome(started=11.0, arrivals=[11.1], num_prompt_tokens=5, num_output_tokens=1),
        Outcome(started=12.0, error="it broke"),
    ]
    figures = Report(outcomes=outcomes, seconds=2.0).as_dict()
    assert figures["num_failed"] == 1 and figures["first_error"] == "it broke"
    assert (figures["prompt_tokens"], figures["output_tokens"]) == (12, 5)
    assert figures["ttft_ms"]["mean"] == pytest.approx(300)
    assert figures["itl_ms"]["mean"] == pytest.approx(150)
    assert figures["tpot_ms"]["p50"] == pytest.approx(100)
    assert figures["total_tokens_per_second"] == pytest.approx(8.5)


def test_command_prints_a_table_and_writes_json(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    target = tmp_path / "figures.json"
    with scripted_server() as server:
        arguments = f"bench serve --url {server.url} --num-requests 4 --concurrency 2 --output-len 3 --json {target}"
        assert cli.main(arguments.split()) == 0
    out = capsys.readouterr().out
    assert "time to first token, ms" in out and "4 of 4" in out
    figures = json.loads(target.read_text())
    assert figures["model"] == "scripted" and figures["output_tokens"] == 12
    assert not math.isnan(figures["ttft_ms"]["p99"])


def test_failed_requests_fail_the_command(capsys: pytest.CaptureFixture) -> None:
    with scripted_server(fail_from=3) as server:
        assert cli.main(f"bench serve --url {server.url} --num-requests 3 --json -".split()) == 1
    figures = json.loads(capsys.readouterr().out)
    assert figures["num_failed"] == 2 and "scripted failure" in figures["first_error"]


def test_wrong_options(capsys: pytest.CaptureFixture) -> None:
    assert cli.main(["bench", "serve", "--extra-body", "[1]"]) == 2
    assert "JSON object" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "serve", "--concurrncy", "3"])
    assert "did you mean --concurrency?" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        cli.main(["bench", "latncy"])
    assert "did you mean latency?" in capsys.readouterr().err
