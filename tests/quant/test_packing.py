"""The bit stream, against whole-number arithmetic."""

from __future__ import annotations

import pytest
import torch
from gptq_oracle import read_stream, write_stream
from hypothesis import given
from hypothesis import strategies as st
from twofold.quant.packing import num_words, pack, unpack


@given(st.data(), st.integers(2, 8), st.integers(1, 150))
def test_words_are_the_little_endian_stream(data: st.DataObject, bits: int, count: int) -> None:
    codes = data.draw(st.lists(st.integers(0, 2**bits - 1), min_size=count, max_size=count))
    words = pack(torch.tensor([codes], dtype=torch.int64), bits)
    assert words.dtype is torch.int32 and words.shape == (1, num_words(count, bits))
    assert words[0].tolist() == write_stream(codes, bits)
    assert unpack(words, bits, count)[0].tolist() == codes


@given(st.data(), st.integers(2, 8), st.integers(1, 12))
def test_unpack_reads_any_words(data: st.DataObject, bits: int, length: int) -> None:
    words = data.draw(st.lists(st.integers(-(2**31), 2**31 - 1), min_size=length, max_size=length))
    count = length * 32 // bits
    assert unpack(torch.tensor([words], dtype=torch.int32), bits, count)[0].tolist() == read_stream(words, bits, count)


@pytest.mark.parametrize(("columns", "words"), [(128, 12), (160, 15)])
def test_three_bits_fill_three_words_with_32_values(columns: int, words: int) -> None:
    """B020: not 32 // 3 values to a word."""
    codes = torch.randint(0, 8, (4, columns))
    packed = pack(codes, 3)
    assert packed.shape == (4, words)
    assert torch.equal(unpack(packed, 3, columns).long(), codes)


@pytest.mark.parametrize(("index", "low_word", "low_bits"), [(10, 0, 2), (21, 1, 1)])
def test_three_bit_values_straddle_words(index: int, low_word: int, low_bits: int) -> None:
    codes = torch.zeros(1, 32, dtype=torch.uint8)
    codes[0, index] = 7
    words = [word & 0xFFFFFFFF for word in pack(codes, 3)[0].tolist()]
    assert [word.bit_count() for word in words[low_word : low_word + 2]] == [low_bits, 3 - low_bits]
    assert words[low_word] >> (32 - low_bits) == (1 << low_bits) - 1
    assert words[low_word + 1] == (1 << (3 - low_bits)) - 1


def test_a_transposed_view_packs_like_its_copy() -> None:
    codes = torch.randint(0, 16, (40, 6), dtype=torch.uint8)
    assert torch.equal(pack(codes.T, 4), pack(codes.T.contiguous(), 4))
