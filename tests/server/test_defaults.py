"""Sampling defaults of the API: OpenAI's, the model's own over them unless the server is told otherwise."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from counting_server import ChatByteTokenizer
from http_server import RunningServer, counting_server
from twofold.engine.client import AsyncEngineClient
from twofold.errors import ConfigError
from twofold.server.config import ServerConfig

GENERATION = {"temperature": 0.3, "top_p": 0.9, "top_k": 20, "repetition_penalty": 1.1, "max_length": 20}


class Recorded(list):
    """The SamplingParams of every request that was made."""


@pytest.fixture(scope="module", params=["auto", "none"])
def recorded(request: pytest.FixtureRequest) -> Iterator[tuple[str, RunningServer, Recorded]]:
    calls = Recorded()
    make_request = AsyncEngineClient.make_request

    async def record(self: AsyncEngineClient, prompt: str, params: object, **options: object) -> object:
        calls.append(params)
        return await make_request(self, prompt, params, **options)  # type: ignore[arg-type]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(AsyncEngineClient, "make_request", record)
        client = {"generation": GENERATION, "tokenizer": ChatByteTokenizer()}
        with counting_server(client=client, server={"generation_config": request.param}) as server:
            yield request.param, server, calls


def test_defaults(recorded: tuple[str, RunningServer, Recorded]) -> None:
    kind, server, calls = recorded
    server.complete("a")
    server.chat("a", temperature=None)
    for params in calls[-2:]:
        found = (params.temperature, params.top_p, params.top_k, params.repetition_penalty)
        assert found == ((0.3, 0.9, 20, 1.1) if kind == "auto" else (1.0, 1.0, 0, 1.0))
    assert [params.max_tokens for params in calls[-2:]] == [16, None]


def test_the_client_has_the_last_word(recorded: tuple[str, RunningServer, Recorded]) -> None:
    _, server, calls = recorded
    server.complete("a", temperature=0, top_p=1, top_k=-1, repetition_penalty=1.0, max_tokens=2)
    params = calls[-1]
    assert (params.temperature, params.top_p, params.top_k, params.repetition_penalty) == (0, 1, -1, 1.0)


@pytest.mark.parametrize(
    "options",
    [
        {"port": 70_000},
        {"generation_config": "x"},
        {"grace_seconds": -1},
        {"max_body_bytes": 0},
        {"api_keys": ("",)},
        {"served_model_names": ("",)},
    ],
)
def test_wrong_options(options: dict) -> None:
    with pytest.raises(ConfigError):
        ServerConfig(**options)
