"""Sizing of the KV pool."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from fake_core import FakeModel
from twofold.engine.config import EngineConfig
from twofold.engine.core.kv_cache import allocate_kv_caches, plan_kv_cache, workspace_bytes
from twofold.engine.model_config import RopeConfig
from twofold.errors import ConfigError
from twofold.platforms.cpu import CpuPlatform
from twofold.platforms.interface import MemoryInfo

GIB = 1 << 30


class Machine(CpuPlatform):
    """A CPU with a given amount of free memory."""

    def __init__(self, free: int, device_type: str = "cpu") -> None:
        super().__init__()
        self._free = free
        self.spec = dataclasses.replace(self.spec, device_type=device_type)

    def memory(self) -> MemoryInfo:
        return MemoryInfo(64 * GIB, getattr(self, "_free", 0))


def big_model() -> FakeModel:
    """2 * 32 layers * 16 tokens * 8 heads * 128 * 4 bytes = 4 MiB a block of 16."""
    model = FakeModel(max_position_embeddings=4096)
    model.num_layers, model.kv_heads, model.head_size = 32, 8, 128
    return model


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="m", **options)


def test_bytes_asked_for() -> None:
    plan = plan_kv_cache(config(kv_cache_bytes=400 << 20), big_model(), Machine(400 << 20))
    assert (plan.num_blocks, plan.max_model_len) == (100, 1600)


def test_fraction_of_what_is_free_less_the_workspace() -> None:
    model, options = big_model(), config(memory_fraction=0.5)
    plan = plan_kv_cache(options, model, Machine(20 * GIB, "cuda"))
    assert plan.num_blocks == (10 * GIB - workspace_bytes(options, model)) // (4 << 20)


def test_a_cpu_keeps_to_four_gib_by_default() -> None:
    assert plan_kv_cache(config(), big_model(), Machine(60 * GIB)).num_blocks == 1024
    small = plan_kv_cache(config(), big_model(), Machine(2 * GIB)).num_blocks
    assert 0 < small < 2 * GIB * 0.9 / (4 << 20)


def test_no_more_than_the_rows_can_use() -> None:
    plan = plan_kv_cache(config(max_num_seqs=3, max_model_len=40), big_model(), Machine(60 * GIB))
    assert plan.num_blocks == 9


def test_a_small_pool_lowers_max_model_len_and_says_so(caplog: pytest.LogCaptureFixture) -> None:
    logging.getLogger("twofold").propagate = True
    with caplog.at_level(logging.WARNING):
        plan = plan_kv_cache(config(kv_cache_bytes=40 << 20), big_model(), Machine(GIB))
    logging.getLogger("twofold").propagate = False
    assert plan.max_model_len == 160
    assert "160 tokens" in caplog.text and "4096" in caplog.text and "kv_cache_bytes" in caplog.text


def test_no_memory_for_one_block() -> None:
    with pytest.raises(ConfigError, match=r"1000 bytes.*4194304"):
        plan_kv_cache(config(kv_cache_bytes=1000), big_model(), Machine(0))
    with pytest.raises(ConfigError, match="may take 0 bytes"):
        plan_kv_cache(config(), big_model(), Machine(1))


def test_more_than_is_free_is_refused() -> None:
    options = config(kv_cache_bytes=1 << 40, max_num_seqs=4)  # 4 sequences of 1 GiB are what it comes to
    with pytest.raises(
        ConfigError, match=r"kv_cache_bytes is 1099511627776.*4.00 GiB; 3.00 GiB are free.*ask for less"
    ):
        plan_kv_cache(options, big_model(), Machine(3 * GIB))
    with pytest.raises(ConfigError, match=r"0.00 GiB are free"):
        plan_kv_cache(config(kv_cache_bytes=400 << 20), big_model(), Machine(0))


def test_a_lowered_pool_is_said(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(logging.getLogger("twofold"), "propagate", True)
    with caplog.at_level(logging.INFO):
        plan = plan_kv_cache(config(kv_cache_bytes=1 << 40, max_num_seqs=4), big_model(), Machine(5 * GIB))
    assert plan.num_blocks == 1024
    assert "asks for 1024.00 GiB" in caplog.text and "4.00 GiB at most" in caplog.text
    caplog.clear()
    with caplog.at_level(logging.INFO):
        plan_kv_cache(config(kv_cache_bytes=GIB, max_num_seqs=4), big_model(), Machine(5 * GIB))
    assert "asks for" not in caplog.text


def test_max_model_len_beyond_the_model() -> None:
    with pytest.raises(ConfigError, match=r"5000.*4096"):
        plan_kv_cache(config(max_model_len=5000), big_model(), Machine(GIB * 60))
    model = big_model()
    model.config = dataclasses.replace(model.config, rope=RopeConfig(rotary_size=1, kind="dynamic"))
    assert plan_kv_cache(config(max_model_len=5000), model, Machine(GIB * 60)).max_model_len == 5000


@pytest.mark.skipif(not Path("/proc/self/statm").exists(), reason="reads /proc")
def test_an_unused_pool_takes_no_memory() -> None:
    def resident() -> int:
        return int(Path("/proc/self/statm").read_text().split()[1]) * 4096

    model = big_model()
    plan = plan_kv_cache(config(kv_cache_bytes=GIB), model, Machine(2 * GIB))
    before = resident()
    caches = allocate_kv_caches(plan, model, torch.device("cpu"))
    assert len(caches) == 32 and caches[0].key.shape == (256, 16, 8, 128)
    assert resident() - before < 64 << 20
