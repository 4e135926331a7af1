"""The last layer computes what is read and nothing else; what is read has the bits of the whole computation."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from arithmetic import OTHER_ARITHMETIC
from fake_core import run
from tiny_models import FAMILIES
from twofold.engine.config import EngineConfig
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.core.loading import load_parts
from twofold.engine.layers.output_rows import OutputRows
from twofold.engine.messages import EngineRequest, TokenOutput
from twofold.engine.sampling_params import SamplingParams
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.kv_layout import KVCache

TinyModel = Callable[..., Path]
NO_KERNELS = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")
Outputs = dict[tuple[str, int], TokenOutput]


def core_of(model: Path, **options: Any) -> EngineCore:
    config = EngineConfig(model=str(model), device="cpu", **{"num_threads": 2, "max_num_seqs": 16, **options})
    parts = load_parts(config)
    core = EngineCore.from_parts(config, parts.model, parts.platform, parts.kernels, vocab_size=parts.vocab_size)
    core._pooling = parts.pooling
    return core


def prompt_of(index: int) -> list[int]:
    return [(7 * index + 3 * place) % 256 for place in range((1, 15, 33, 70, 41)[index % 5])]


def generating(index: int, **params: Any) -> EngineRequest:
    options = {"max_tokens": 2 + index, "ignore_eos": True, "seed": index, "temperature": (0.0, 1.0)[index % 2]}
    return EngineRequest(
        request_id=f"g{index}", prompt_token_ids=prompt_of(index), params=SamplingParams(**{**options, **params})
    )


def pooling(kind: str, index: int) -> EngineRequest:
    tokens = [1, 2] if kind == "score" else []
    return EngineRequest(
        request_id=kind,
        prompt_token_ids=prompt_of(index),
        params=SamplingParams(),
        pooling=kind,
        score_tokens=tokens,
    )


def everything() -> list[EngineRequest]:
    """All that reads hidden states, in chunks beside each other: draws, each pooling, log-probabilities of a prompt."""
    plain = [generating(index) for index in range(5)]
    told = generating(7, prompt_logprobs=2, logprobs=1)
    return [*plain, told, generating(8, n=2), *(pooling(kind, 3) for kind in ("last", "mean", "cls", "score"))]


def contents(caches: list[KVCache]) -> list[torch.Tensor]:
    return [part.clone(memory_format=torch.contiguous_format) for cache in caches for part in cache.tensors]


def compare_with_whole(core: EngineCore) -> list[tuple[int, int]]:
    """Compute each step whole as well; the (rows that are read, rows) of each."""
    forward, seen = core._model.forward, []

    def both(ids: torch.Tensor, positions: torch.Tensor, caches: list[KVCache], batch: Any, outputs: Any = None) -> Any:
        hidden = forward(ids, positions, caches, batch, outputs)
        if not isinstance(outputs, OutputRows):
            seen.append((len(ids), len(ids)))
            return hidden
        written = contents(caches)
        whole = forward(ids, positions, caches, batch)
        assert torch.equal(hidden, whole[outputs.index])
        for before, after in zip(written, contents(caches), strict=True):
            assert torch.equal(before.view(torch.uint8), after.view(torch.uint8))
        seen.append((len(hidden), len(ids)))
        return hidden

    core._model.forward = both  # type: ignore[method-assign]
    return seen


@NO_KERNELS
@pytest.mark.parametrize("family", FAMILIES)
def test_the_bits_of_each_family(tiny_model: TinyModel, family: str) -> None:
    core = core_of(tiny_model(family), dtype="float32", max_num_batched_tokens=24)
    seen = compare_with_whole(core)
    run(core, *everything())
    assert any(0 < read < rows for read, rows in seen), "some rows"
    assert any(read == rows for read, rows in seen), "all rows"


@NO_KERNELS
@pytest.mark.parametrize("options", OTHER_ARITHMETIC)
def test_the_bits_of_other_arithmetic(tiny_model: TinyModel, options: dict[str, str]) -> None:
    core = core_of(tiny_model("llama"), dtype="float32", max_num_batched_tokens=24, **options)
    seen = compare_with_whole(core)
    run(core, *everything())
    assert any(0 < read < rows for read, rows in seen)


def test_in_torchs_operations(tiny_model: TinyModel) -> None:
    """In float16 torch computes, whose sums may follow the number of rows in their last bits."""
    model = tiny_model("llama")
    core = core_of(model, dtype="float16", max_num_batched_tokens=24)
    forward, differences = core._model.forward, []

    def both(*args: Any) -> torch.Tensor:
        hidden = forward(*args)
        if len(args) == 5 and args[4] is not None and len(hidden):
            differences.append(float((hidden - forward(*args[:4])[args[4].index]).abs().max()))
        return hidden

    core._model.forward = both  # type: ignore[method-assign]
    run(core, *everything())
    assert differences and max(differences) < 2e-2


def count_calls(core: EngineCore) -> dict[str, list[int]]:
    """The rows of each call of the parts of the last layer and of the final norm."""
    layer, norm = core._model._layers[-1], core._model._norm  # type: ignore[attr-defined]
    calls: dict[str, list[int]] = {"attention": [], "mlp": [], "norm": []}

    def counted(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
        def call(first: Any, *args: Any) -> Any:
            calls[name].append(first.shape[0])
            return function(first, *args)

        return call

    layer._mlp = counted("mlp", layer._mlp)
    layer._attention._attend = counted("attention", layer._attention._attend)
    norm.add = counted("norm", norm.add)
    return calls


def test_chunks_that_draw_nothing_end_with_their_last_keys(tiny_model: TinyModel) -> None:
    core = core_of(tiny_model("qwen3"), dtype="float32", max_num_batched_tokens=16, enforce_eager=True)
    calls = count_calls(core)
    core.add_request(generating(3, max_tokens=3))  # 70 tokens: four chunks and a rest of 6
    for _ in range(4):
        assert core.step() == []
    assert calls == {"attention": [], "mlp": [], "norm": []}
    core.step()
    assert calls == {"attention": [1], "mlp": [1], "norm": [1]}
    core.step()
    assert calls == {"attention": [1, 1], "mlp": [1, 1], "norm": [1, 1]}


@pytest.mark.parametrize(
    ("kind", "rows"), [("last", [1]), ("score", [1]), ("cls", [1]), ("mean", [16, 16, 1]), (None, [16, 16, 1])]
)
def test_rows_of_poolings_and_of_prompt_logprobs(tiny_model: TinyModel, kind: str | None, rows: list[int]) -> None:
    """Of a prompt of 33 tokens in chunks of 16."""
    core = core_of(tiny_model("llama"), dtype="float32", max_num_batched_tokens=16)
    calls = count_calls(core)
    run(core, generating(2, max_tokens=1, prompt_logprobs=0) if kind is None else pooling(kind, 2))
    assert calls["mlp"] == calls["norm"] == rows


def test_steps_in_which_all_rows_draw_pay_nothing(tiny_model: TinyModel) -> None:
    core = core_of(tiny_model("llama"), dtype="float32", enforce_eager=True)
    given: list[object] = []
    forward = core._model.forward

    def noting(*args: Any) -> torch.Tensor:
        given.append(args[4])
        return forward(*args)

    core._model.forward = noting  # type: ignore[method-assign]
    run(core, *(generating(index, max_tokens=4) for index in range(1, 5)))
    assert isinstance(given[0], OutputRows) and given[1:] == [None] * 3


def test_answers_do_not_show_it(tiny_model: TinyModel) -> None:
    model = tiny_model("gemma2")
    narrowed = run(core_of(model, dtype="float32", max_num_batched_tokens=24), *everything())
    whole_core = core_of(model, dtype="float32", max_num_batched_tokens=24)
    forward = whole_core._model.forward

    def whole(*args: Any) -> torch.Tensor:
        hidden = forward(*args[:4])
        return hidden if len(args) < 5 or args[4] is None else hidden[args[4].index]

    whole_core._model.forward = whole  # type: ignore[method-assign]
    expected: Outputs = run(whole_core, *everything())
    assert narrowed.keys() == expected.keys()
    for key, output in narrowed.items():
        other = expected[key]
        assert (output.token_ids, output.embedding) == (other.token_ids, other.embedding), key
        assert (output.logprobs, output.prompt_logprobs) == (other.logprobs, other.prompt_logprobs), key
