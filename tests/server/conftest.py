"""Servers that the tests of this folder share: a scripted model, a random model, and no model at all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from chain_model import EOS, ChainTokenizer, build_chain_model
from http_server import RunningServer, counting_server, running_server

SECOND_EOS = "<|eot|>"
SPECIAL_STOP = "<|stop|>"
FAMILY = "👨‍👩‍👧"
# The family's bytes in tokens that cut its characters anywhere, for no token may appear twice in a script.
FAMILY_TOKENS = [b"\xf0\x9f\x91", b"\xa8\xe2\x80\x8d\xf0", b"\x9f\x91\xa9\xe2", b"\x80\x8d\xf0\x9f", b"\x91\xa7"]

SCRIPTS: list[list[bytes | str]] = [
    ["w", *"xySTOPz"],
    ["e", *"abcd"],
    ["f", *"klm", SPECIAL_STOP, "n"],
    ["U", *(bytes([value]) for value in "é你😀".encode()), *FAMILY_TOKENS],
    ["g", b"\xf3", "h"],
    ["i", b"\xff", "j"],
    [*"0123456789", "0"],
]


@pytest.fixture(scope="session")
def chain_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> ChainTokenizer:
    """Ids of the scripted model's tokens; its folder is ``chain_folder``."""
    folder = tmp_path_factory.getbasetemp() / "chain"
    return build_chain_model(
        folder, SCRIPTS, specials=(SECOND_EOS, SPECIAL_STOP), eos_tokens=(EOS, SECOND_EOS), max_position_embeddings=256
    )


@pytest.fixture(scope="session")
def chain(chain_tokenizer: ChainTokenizer, tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    """The scripted model, greedy or not: its next token is certain. Prompts outside the scripts end at once."""
    with running_server(tmp_path_factory.getbasetemp() / "chain", num_threads=1) as server:
        yield server


@pytest.fixture(scope="session")
def tiny(tiny_model: Callable[..., Path]) -> Iterator[RunningServer]:
    """A small random model with steps small enough to chunk a prompt of 40 tokens."""
    with running_server(tiny_model("llama"), num_threads=1, max_num_batched_tokens=16, max_num_seqs=16) as server:
        yield server


@pytest.fixture(scope="session")
def counting() -> Iterator[RunningServer]:
    """No model: counts upwards from the prompt's last byte."""
    with counting_server() as server:
        yield server
