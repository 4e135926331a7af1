"""The models that the shared checkpoints were made of, against transformers in float32."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from paged_runner import greedy_together, load, logits_of
from stored_tensors import SHARED
from tiny_models import judge, judge_greedy, judge_logits

FOLDERS = sorted(path for path in (SHARED / "base-models").glob("*") if (path / "config.json").is_file())

pytestmark = pytest.mark.skipif(not FOLDERS, reason="no ../shared/base-models beside the repository")


@pytest.mark.parametrize("folder", FOLDERS, ids=lambda path: path.name)
def test_logits_and_greedy_tokens(folder: Path) -> None:
    rng = random.Random(3)
    model, reference = load(folder), judge(folder)
    prompts = [[rng.randrange(3, 512) for _ in range(length)] for length in (90, 1, 17, 40)]
    for prompt in prompts:
        torch.testing.assert_close(logits_of(model, prompt), judge_logits(reference, prompt), atol=1e-4, rtol=0)
    together = greedy_together(model, prompts, 8)
    assert together == [judge_greedy(reference, prompt, 8) for prompt in prompts]
