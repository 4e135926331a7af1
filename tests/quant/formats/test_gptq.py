"""The GPTQ reader on tensors written from the format's definition, with ugly shapes and ugly maps."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from gptq_oracle import encode_linear
from hypothesis import given, settings
from hypothesis import strategies as st
from stored_tensors import StoredTensors
from twofold.errors import CheckpointError, ConfigError, UnsupportedError
from twofold.quant.canonical import DenseWeight, PackedWeight, dequantize
from twofold.quant.formats import GPTQFormat

CONFIG: dict[str, Any] = {"quant_method": "gptq", "bits": 4, "group_size": 16, "desc_act": False, "sym": True}


class Example:
    """A random linear by the definition: ``matrix`` [N, K] and the tensors that store it."""

    def __init__(
        self,
        columns: int = 64,
        rows: int = 32,
        bits: int = 4,
        group_size: int = 16,
        *,
        symmetric: bool = False,
        version: int = 2,
        g_idx: np.ndarray | None = None,
        seed: int = 0,
    ) -> None:
        random = np.random.default_rng(seed)
        size = columns if group_size == -1 else group_size
        group = np.arange(columns) // size if g_idx is None else g_idx
        groups = -(-columns // size)
        self.codes = random.integers(0, 2**bits, (columns, rows))
        lowest = 2 - version
        self.zeros = random.integers(lowest, 2**bits, (groups, rows))
        if symmetric:
            self.zeros[:] = 2 ** (bits - 1)
        self.scales = random.normal(size=(groups, rows)).astype(np.float16)
        self.matrix = ((self.codes - self.zeros[group]) * self.scales[group].astype(np.float64)).T
        self.tensors = encode_linear(self.codes, self.zeros, self.scales, g_idx, bits, version)
        self.config = {**CONFIG, "bits": bits, "group_size": group_size, "sym": symmetric}
        self.config["checkpoint_format"] = "gptq" if version == 1 else "gptq_v2"

    def source(self, module: str = "m", **extra: torch.Tensor) -> StoredTensors:
        return StoredTensors({f"{module}.{part}": tensor for part, tensor in {**self.tensors, **extra}.items()})

    def load(self, **config: Any) -> PackedWeight:
        weight = GPTQFormat({**self.config, **config}).load(self.source(), "m", torch.float32)
        assert isinstance(weight, PackedWeight)
        return weight


def agree(weight: PackedWeight | DenseWeight, matrix: np.ndarray) -> bool:
    return np.allclose(dequantize(weight, torch.float64).numpy(), matrix, rtol=1e-6, atol=1e-6)


@settings(deadline=None, max_examples=60)
@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    group_size=st.sampled_from([-1, 16, 32, 40, 96, 128]),
    symmetric=st.booleans(),
    version=st.sampled_from([1, 2]),
    order=st.sampled_from(["absent", "plain", "shuffled", "uneven"]),
    columns=st.sampled_from([32, 64, 96, 160]),
    seed=st.integers(0, 1000),
)
def test_any_checkpoint(
    bits: int, group_size: int, symmetric: bool, version: int, order: str, columns: int, seed: int
) -> None:
    size = columns if group_size == -1 else group_size
    random = np.random.default_rng(seed)
    plain = np.arange(columns) // size
    g_idx = {
        "absent": None,
        "plain": plain,
        "shuffled": random.permutation(plain),
        "uneven": random.integers(0, plain[-1] + 1, columns),
    }[order]
    example = Example(columns, 32, bits, group_size, symmetric=symmetric, version=version, g_idx=g_idx, seed=seed)
    weight = example.load()
    assert agree(weight, example.matrix)
    assert weight.scheme.bits == bits
    assert (weight.zeros is None) == (symmetric or bool((example.zeros == 2 ** (bits - 1)).all()))


class TestGroupIndex:
    """B019: g_idx is the definition of a row's group, whatever desc_act says."""

    def test_one_group_needs_no_index(self) -> None:
        absent = Example(rows=16, group_size=-1)
        zero = Example(rows=16, group_size=-1, g_idx=np.zeros(64, dtype=np.int64))
        first, second = absent.load(), zero.load(desc_act=True)
        assert torch.equal(dequantize(first), dequantize(second))
        assert first.scales.shape == (16, 1) and second.perm is None
        assert str(second.scheme) == "w4 channel asym"

    def test_plain_index_needs_no_gather(self) -> None:
        plain = Example(rows=16, g_idx=np.arange(64) // 16)
        assert plain.load(desc_act=True).perm is None
        assert torch.equal(dequantize(plain.load()), dequantize(Example(rows=16).load()))

    def test_permuted_index(self) -> None:
        g_idx = np.random.default_rng(5).permutation(np.arange(64) // 16)
        example = Example(rows=16, g_idx=g_idx)
        weight = example.load()
        assert weight.perm is not None and weight.scheme.act_order and weight.group_size == 16
        assert agree(weight, example.matrix)

    def test_an_empty_index_counts_as_none(self) -> None:
        example = Example()
        source = example.source(g_idx=torch.empty(0, dtype=torch.int32))
        weight = GPTQFormat(example.config).load(source, "m", torch.float32)
        assert agree(weight, example.matrix)

    def test_an_index_out_of_range_is_named(self) -> None:
        example = Example()
        source = example.source(g_idx=torch.full((64,), 9, dtype=torch.int32))
        with pytest.raises(CheckpointError, match=r"m\.g_idx.*0\.\.3"):
            GPTQFormat(example.config).load(source, "m", torch.float32)


def test_ragged_last_group() -> None:
    example = Example(columns=352, rows=64, group_size=128, symmetric=True, version=1, g_idx=np.arange(352) // 128)
    weight = example.load()
    assert weight.num_groups == 3 and weight.group_size == 128
    assert agree(weight, example.matrix)


class TestVersionOneZeros:
    """A zero of 0 borrows over the word when written as GPTQModel does, and the reader's addition carries back."""

    @pytest.mark.parametrize("bits", [2, 4, 8])
    def test_whole_word_arithmetic(self, bits: int) -> None:
        example = Example(bits=bits, version=2)
        example.zeros[:, ::3] = 0
        matrix = ((example.codes - example.zeros[np.arange(64) // 16]) * example.scales[np.arange(64) // 16]).T
        words = encode_linear(example.codes, example.zeros, example.scales, None, bits, 2)["qzeros"].long()
        ones = sum(1 << shift for shift in range(0, 32, bits))
        lowered = (words - ones) % (1 << 32)
        example.tensors["qzeros"] = torch.where(lowered >= 1 << 31, lowered - (1 << 32), lowered).to(torch.int32)
        assert agree(example.load(checkpoint_format="gptq"), matrix.astype(np.float64))

    def test_symmetric_zeros_are_recognized_by_value(self) -> None:
        example = Example(symmetric=True, version=1)
        assert example.tensors["qzeros"].unique().tolist() == [0x77777777]
        assert example.load(sym=False).zeros is None


class TestStoredTensorsDecide:
    def test_a_heads_bits_and_groups_come_from_the_shapes(self) -> None:
        """GPTQModel's head has 8 bits and groups of 32 in a model of 4 bits, with or without a rule that says so."""
        example = Example(bits=8, group_size=32)
        layout = GPTQFormat({**example.config, "bits": 4, "group_size": 16, "lm_head": True})
        weight = layout.load(example.source("lm_head"), "lm_head", torch.float32)
        assert isinstance(weight, PackedWeight) and weight.scheme.bits == 8 and agree(weight, example.matrix)

    def test_a_plain_module(self) -> None:
        plain = torch.randn(8, 64)
        weight = GPTQFormat(CONFIG).load(StoredTensors({"m.weight": plain}), "m", torch.float32)
        assert isinstance(weight, DenseWeight) and torch.equal(weight.weight, plain)

    def test_twice_is_an_error(self) -> None:
        source = Example().source(weight=torch.randn(32, 64))
        with pytest.raises(CheckpointError, match="stored twice"):
            GPTQFormat(CONFIG).load(source, "m", torch.float32)

    @pytest.mark.parametrize("part", ["qweight", "qzeros", "scales"])
    def test_a_missing_tensor_is_named(self, part: str) -> None:
        example = Example()
        del example.tensors[part]
        with pytest.raises(CheckpointError, match=rf"m\.{part}"):
            example.load()

    def test_tensors_that_do_not_fit(self) -> None:
        example = Example()
        example.tensors["scales"] = example.tensors["scales"][:3]
        with pytest.raises(CheckpointError, match="fit no GPTQ layout"):
            example.load()

    def test_every_tensor_is_taken(self) -> None:
        example = Example(g_idx=np.arange(64) // 16)
        source = example.source()
        layout = GPTQFormat(example.config)
        layout.load(source, "m", torch.float32)
        assert set(source.taken) == source.names <= set(layout.tensor_names("m"))


class TestBias:
    """B031: an absent and an all-zero bias are the same; any other is used."""

    def test_zero_and_absent(self) -> None:
        layout = GPTQFormat(CONFIG)
        assert layout.load_bias(StoredTensors({}), "m", torch.float32) is None
        assert layout.load_bias(StoredTensors({"m.bias": torch.zeros(8)}), "m", torch.float32) is None

    def test_real(self) -> None:
        bias = torch.randn(8).half()
        loaded = GPTQFormat(CONFIG).load_bias(StoredTensors({"m.bias": bias}), "m", torch.float32)
        assert loaded is not None and torch.equal(loaded, bias.float())


class TestConfig:
    def test_dynamic_rules_and_a_quantized_head(self) -> None:
        """B026: the first rule that matches from the start of the module's name wins."""
        rules = {"+:.*layers\\.1\\..*": {"bits": 8, "group_size": 64}, "-:.*o_proj": {}, ".*q_proj": {"sym": False}}
        layout = GPTQFormat({**CONFIG, "group_size": 32, "lm_head": True, "dynamic": rules})
        schemes = {
            module: str(layout.scheme(module))
            for module in (
                "lm_head",
                "model.layers.0.self_attn.o_proj",
                "model.layers.1.self_attn.o_proj",
                "model.layers.0.self_attn.q_proj",
                "model.layers.0.mlp.up_proj",
            )
        }
        assert list(schemes.values()) == ["w4g32 sym", "dense", "w8g64 sym", "w4g32 asym", "w4g32 sym"]

    def test_the_head_is_plain_by_default(self) -> None:
        assert str(GPTQFormat(CONFIG).scheme("lm_head")) == "dense"

    def test_lists_of_blocks(self) -> None:
        layout = GPTQFormat({**CONFIG, "modules_in_block_to_quantize": [["self_attn.q_proj"], ["mlp.up_proj"]]})
        assert str(layout.scheme("model.layers.0.self_attn.q_proj")) == "w4g16 sym"
        assert str(layout.scheme("model.layers.0.self_attn.k_proj")) == "dense"

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"bits": 5}, "5 is not one of 2, 3, 4, 8"),
            ({"group_size": 0}, "group_size 0"),
            ({"dynamic": {"+:(": {}}}, "not a regular expression"),
        ],
    )
    def test_wrong_values(self, change: dict[str, Any], text: str) -> None:
        with pytest.raises(ConfigError, match=text):
            GPTQFormat({**CONFIG, **change})

    @pytest.mark.parametrize(
        ("change", "text"),
        [
            ({"checkpoint_format": "marlin"}, "'marlin' is not served"),
            ({"is_marlin_format": True}, "'marlin' is not served"),
            ({"pack_dtype": "int8"}, "pack_dtype 'int8'"),
        ],
    )
    def test_variants_that_are_not_served(self, change: dict[str, Any], text: str) -> None:
        with pytest.raises(UnsupportedError, match=text):
            GPTQFormat({**CONFIG, **change})

    def test_synonyms_of_old_tools(self) -> None:
        layout = GPTQFormat({"w_bit": 4, "q_group_size": 128, "desc_act": True})
        assert str(layout.scheme("m")) == "w4g128 sym act-order"
