"""auto-gptq's damaged zero points: told apart from zeros of 0 that others wrote, in its own files and in made ones."""

from __future__ import annotations

import pytest
import torch
from real_checkpoints import CHECKPOINTS
from safetensors.torch import load_file
from twofold.quant.formats.gptq import _is_damaged
from twofold.quant.formats.gptq_writer import encode_zeros


@pytest.mark.skipif(not CHECKPOINTS.is_dir(), reason="no ../shared/checkpoints beside the repository")
@pytest.mark.parametrize(
    ("pattern", "damaged"),
    [
        ("autogptq-w4-g32-actorder-asym-llama-pos", True),
        ("autogptq-w4-g32-asym-qwen2", False),
        ("gptqmodel-gptq-gptq-w4-g32-asym-llama-pos", False),
        ("autogptq-w4-g128-llama-untied", False),
    ],
)
def test_real_files(pattern: str, damaged: bool) -> None:
    found = False
    for path in (CHECKPOINTS / pattern).glob("*.safetensors"):
        for name, words in load_file(path).items():
            if name.endswith(".qzeros"):
                found |= _is_damaged(words, 4, words.shape[1] * 8)
    assert found == damaged


def test_a_writer_that_borrows_is_not_damaged() -> None:
    """GPTQModel subtracts 1 from each field of a whole word: a zero of 0 borrows from the next field."""
    zeros = torch.randint(0, 16, (64, 64), generator=torch.Generator().manual_seed(0), dtype=torch.int64)
    words = (zeros.unflatten(1, (-1, 8)) << (4 * torch.arange(8))).sum(-1) - 0x11111111
    words = torch.where(words >= 2**31, words - 2**32, words).to(torch.int32)
    assert bool((zeros == 0).any()) and not _is_damaged(words, 4, 64)
    whole = encode_zeros(zeros.clamp(min=1), 4, zeros_minus_one=True)
    assert not _is_damaged(whole, 4, 64)
