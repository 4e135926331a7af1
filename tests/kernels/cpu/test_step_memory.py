"""Memory of large steps: places taken in turn, pages given back, and no more of it than must be there at once."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from fake_core import run
from twofold.engine.config import EngineConfig
from twofold.engine.core.engine_core import EngineCore
from twofold.engine.core.loading import load_parts
from twofold.engine.messages import EngineRequest
from twofold.engine.sampling_params import SamplingParams
from twofold.kernels.cpu import step_memory
from twofold.kernels.cpu.arena import Arena
from twofold.kernels.cpu.library import unavailable
from twofold.kernels.cpu.tape import TapeRecorder

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")

_LARGE = (1 << 20,)  # float32: two large pages


@pytest.fixture(autouse=True)
def own_arena(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(step_memory, "_own", step_memory._Thread())
    yield


def test_places_are_taken_in_turn_and_may_outlive_the_step() -> None:
    with step_memory.step():
        first = step_memory.empty(_LARGE)
        place, part = first.data_ptr(), first[5:]
        del first
        kept = step_memory.empty(_LARGE).fill_(3.0)
        assert kept.data_ptr() != place, "a view of it is left"
        del part
        assert step_memory.empty(_LARGE).data_ptr() == place
    with step_memory.step():
        step_memory.empty((3, *_LARGE), torch.uint8).fill_(9)
        step_memory.empty(_LARGE).fill_(4.0)
    assert bool((kept == 3.0).all())


def test_small_results_and_those_outside_a_step_are_torchs() -> None:
    step_memory.empty(_LARGE)
    with step_memory.step():
        step_memory.empty((8, 8))
        assert step_memory._own.arena is None
        step_memory.empty(_LARGE)
        assert step_memory._own.arena is not None
        seen: list[object] = []
        other = threading.Thread(target=lambda: seen.append((step_memory._own.is_open, step_memory._own.arena)))
        other.start()
        other.join()
        assert seen == [(False, None)], "another thread's steps have their own"


def test_types() -> None:
    with step_memory.step():
        for dtype in (torch.float32, torch.uint8, torch.bfloat16, torch.int32):
            tensor = step_memory.empty((1024, 512), dtype)
            assert tensor.shape == (1024, 512) and tensor.dtype is dtype and tensor.is_contiguous()
            tensor.fill_(1)


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="resident memory is read from /proc")
def test_pages_of_free_places_go_back() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    with step_memory.step():
        kept, gone = step_memory.empty(_LARGE).fill_(7.0), step_memory.empty((64 << 20,), torch.uint8).fill_(1)
    before = resident()
    del gone
    step_memory.give_back_pages()
    assert before - resident() > 60 << 20
    assert bool((kept == 7.0).all())


def test_a_prompt_takes_what_must_be_there_at_once(
    tiny_model: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The widest moment of a layer: what became of gates and ups, and hidden states before, beside and after."""
    tokens, hidden, inner = 1024, 128, 384
    model = tiny_model("llama", hidden_size=hidden, intermediate_size=inner, max_position_embeddings=2048)
    options = {"model": str(model), "device": "cpu", "dtype": "float32", "num_threads": 1}
    config = EngineConfig(**options, enforce_eager=True)
    parts = load_parts(config)
    core = EngineCore.from_parts(config, parts.model, parts.platform, parts.kernels, vocab_size=parts.vocab_size)
    highest, take = [0], Arena._take

    def taken(arena: Arena, num_bytes: int) -> tuple[int, int, int]:
        place = take(arena, num_bytes)
        highest[0] = max(highest[0], place[2])
        return place

    monkeypatch.setattr(Arena, "_take", taken)
    prompt = [(3 * place) % 256 for place in range(tokens)]
    run(core, EngineRequest(request_id="p", prompt_token_ids=prompt, params=SamplingParams(max_tokens=1)))
    least = 4 * tokens * (inner + 3 * hidden)
    assert least <= highest[0] <= least + 4 * tokens * hidden, "more than one hidden state that nobody needs"
    monkeypatch.undo()
    recorder = TapeRecorder()
    monkeypatch.setattr(parts.platform, "graphs", lambda: recorder)
    EngineCore.from_parts(EngineConfig(**options), parts.model, parts.platform, parts.kernels)._prompt_graphs.prepare(1)
    assert least <= recorder._sized_arena.num_bytes <= least + 4 * tokens * hidden, "and none where it is recorded"
