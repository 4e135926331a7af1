"""Sizing of the KV pool from the memory that is really free, and its tensors."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from ...errors import ConfigError
from ...kernels.kv_layout import KVCache, allocate_kv_cache, kv_block_bytes
from ...kernels.problems import dtype_name
from ...log import get_logger
from ...platforms import Platform
from ..config import EngineConfig
from ..model_config import allowed_model_len

if TYPE_CHECKING:
    from ..models.model import Model

_CPU_DEFAULT_BYTES = 4 << 30  # on a CPU the rest of the machine wants memory too; kv_cache_bytes asks for more
_GIB = 1 << 30

logger = get_logger("twofold.core")


@dataclass(frozen=True, slots=True, kw_only=True)
class KVPlan:
    """The pool's size: ``num_blocks`` blocks of ``block_size`` tokens, and the longest sequence that is served."""

    num_blocks: int
    block_size: int
    max_model_len: int

    def __post_init__(self) -> None:
        assert self.max_model_len <= self.num_blocks * self.block_size, "the longest sequence must fit the pool"


def plan_kv_cache(config: EngineConfig, model: Model, platform: Platform) -> KVPlan:
    """Size the pool once the weights are loaded.

    ConfigError where not even one block fits, or where ``kv_cache_bytes`` asks for more than is free. The pool never
    exceeds what ``max_num_seqs`` sequences of full length can use. A pool too small for one such sequence lowers
    ``max_model_len``, so that any prompt that is admitted can also be answered.
    """
    max_model_len = wanted_model_len(config, model)
    size, block_bytes = config.block_size, model_block_bytes(config.block_size, model)
    free = platform.memory().free
    budget = kv_budget(config, model, free, platform.spec.device_type)
    num_blocks = min(budget // block_bytes, useful_blocks(config, model))
    if num_blocks < 1:
        raise ConfigError(
            f"the KV cache may take {budget} bytes and one block of {size} tokens takes {block_bytes}; "
            "free memory, lift a limit of the address space (ulimit -v), raise kv_cache_bytes or memory_fraction, "
            "or take a smaller model"
        )
    check_asked_bytes(config, num_blocks * block_bytes, free)
    if config.kv_cache_bytes is not None and num_blocks < budget // block_bytes:
        logger.info(
            "kv_cache_bytes asks for %.2f GiB; max_num_seqs %d sequences of max_model_len %d tokens use "
            "%.2f GiB at most, and the KV cache takes that",
            budget / _GIB, config.max_num_seqs, max_model_len, num_blocks * block_bytes / _GIB,
        )  # fmt: skip
    if num_blocks * size < max_model_len:
        logger.warning(
            "the KV cache of %d blocks holds %d tokens, less than max_model_len %d: "
            "serving up to %d tokens a sequence; raise kv_cache_bytes for more",
            num_blocks,
            num_blocks * size,
            max_model_len,
            num_blocks * size,
        )
    total = num_blocks * block_bytes / _GIB
    logger.info("KV cache: %d blocks of %d tokens in %s, %.2f GiB", num_blocks, size, dtype_name(model.kv_dtype), total)
    return KVPlan(num_blocks=num_blocks, block_size=size, max_model_len=min(max_model_len, num_blocks * size))


def allocate_kv_caches(plan: KVPlan, model: Model, device: torch.device) -> list[KVCache]:
    """The cache of each layer. CheckpointError where calibrated scales do not fit the heads."""
    shape = (plan.num_blocks, plan.block_size, model.kv_heads, model.head_size, model.kv_dtype, device)
    caches = []
    for layer in range(model.num_layers):
        scales = model.kv_scales.get(layer)
        given = None if scales is None else scales.tensors(model.kv_dtype, model.kv_heads, layer)
        caches.append(allocate_kv_cache(*shape, static_scales=given))
    return caches


def model_block_bytes(block_size: int, model: Model) -> int:
    """Bytes of one block of ``block_size`` tokens in all layers."""
    static = [layer in model.kv_scales for layer in range(model.num_layers)]
    sizes = {
        given: kv_block_bytes(block_size, model.kv_heads, model.head_size, model.kv_dtype, static_scales=given)
        for given in set(static)
    }
    return sum(sizes[given] for given in static)


def workspace_bytes(config: EngineConfig, model: Model) -> int:
    """What one step needs beside weights and KV cache: activations of its tokens, logits and copies of them."""
    shape = model.config
    width = 4 * shape.hidden_size + 3 * shape.mlp_width + 2 * shape.num_heads * shape.head_size
    if shape.experts is not None:  # a row of input and of output for each choice
        width += 2 * shape.experts.top_k * shape.hidden_size
    activations = config.max_num_batched_tokens * width * model.dtype.itemsize
    logits = 3 * max(config.max_num_seqs, 128) * shape.vocab_size * 4
    return activations + logits


def wanted_model_len(config: EngineConfig, model: Model) -> int:
    """Longest sequence if memory allows; ConfigError where the model has no positions for it."""
    return allowed_model_len(config.max_model_len, model.config)


def useful_blocks(config: EngineConfig, model: Model) -> int:
    """Blocks that ``max_num_seqs`` sequences of full length take: a larger pool would never be used."""
    return config.max_num_seqs * -(-wanted_model_len(config, model) // config.block_size)


def check_asked_bytes(config: EngineConfig, pool_bytes: int, free: int) -> None:
    """ConfigError where the user asked for a pool, and the ``pool_bytes`` it comes to exceed the ``free`` ones."""
    if config.kv_cache_bytes is not None and pool_bytes > free:
        raise ConfigError(
            f"kv_cache_bytes is {config.kv_cache_bytes}, of which the KV cache would take {pool_bytes / _GIB:.2f} GiB; "
            f"{free / _GIB:.2f} GiB are free beside the weights; ask for less, leave it out to take what fits, "
            "or lower max_num_seqs or max_model_len"
        )


def kv_budget(config: EngineConfig, model: Model, free: int, device_type: str) -> int:
    """Bytes for the pool where ``free`` ones are left beside the weights."""
    if config.kv_cache_bytes is not None:
        return config.kv_cache_bytes
    budget = int(free * config.memory_fraction) - workspace_bytes(config, model)
    if device_type == "cpu":
        budget = min(budget, _CPU_DEFAULT_BYTES)
    return max(budget, 0)
