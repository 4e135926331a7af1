"""What judges a form token by token."""

from __future__ import annotations

from pathlib import Path

import pytest
from chain_model import ChainTokenizer
from structured_models import Acceptor, vocabulary_of


@pytest.fixture(scope="module")
def acceptor(tmp_path_factory: pytest.TempPathFactory) -> Acceptor:
    folder: Path = tmp_path_factory.mktemp("bytes")
    tokenizer = ChainTokenizer()
    tokenizer.save(folder)
    return Acceptor(vocabulary_of(folder), tokenizer.eos)
