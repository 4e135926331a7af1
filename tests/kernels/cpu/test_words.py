"""Words of checkpoints rearranged in C: the same as torch makes of them, and as the codes one by one say."""

from __future__ import annotations

import pytest
import torch
from twofold.kernels.cpu import words
from twofold.kernels.cpu.library import unavailable
from twofold.quant import conversions
from twofold.quant.formats import awq_packing
from twofold.quant.packing import pack, unpack

pytestmark = pytest.mark.skipif(unavailable() is not None, reason=f"no compiled kernels: {unavailable()}")
GENERATOR = torch.Generator().manual_seed(11)


def random_words(rows: int, columns: int) -> torch.Tensor:
    return torch.randint(-(2**31), 2**31, (rows, columns), generator=GENERATOR).to(torch.int32)


@pytest.mark.parametrize(("rows", "columns"), [(8, 1), (64, 33), (16, 16), (8 * 70, 130), (0, 4)])
def test_interleaved_words(rows: int, columns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    stored = random_words(rows, columns)
    monkeypatch.setattr(conversions, "_offered", {})
    expected = awq_packing.stream_of_interleaved(stored)
    found = words.stream_of_interleaved(stored)
    assert found is not None and torch.equal(found, expected)
    if rows:
        codes = awq_packing.unpack_interleaved(stored)
        stream = found.T.clone(memory_format=torch.contiguous_format)
        assert torch.equal(unpack(stream, 4, rows), codes.T)


@pytest.mark.parametrize("bits", [2, 4, 8])
@pytest.mark.parametrize(("count", "columns"), [(64, 40), (32, 1), (37, 17), (4096, 70)])
def test_codes_in_another_order(bits: int, count: int, columns: int) -> None:
    codes = torch.randint(0, 2**bits, (columns, count), generator=GENERATOR).to(torch.uint8)
    order = torch.randperm(count, generator=GENERATOR).to(torch.int32)
    found = words.gather_codes(pack(codes, bits).T, order, bits)
    assert found is not None and torch.equal(found.T, pack(codes[:, order.long()], bits))


def test_what_c_does_not_do_is_left_to_torch() -> None:
    assert words.gather_codes(random_words(3, 4), torch.arange(32), 3) is None
    assert words.stream_of_interleaved(random_words(8, 4).to("meta")) is None
    assert conversions.convert("no such conversion", random_words(8, 4)) is None
