"""The streaming client against a scripted server."""

import time

import pytest
from sse_server import scripted_server
from twofold.cli.openai_client import OpenAIClient
from twofold.errors import ConfigError, RequestError, TwofoldError

BODY = {"model": "scripted", "prompt": "one two", "max_tokens": 3}


def texts(client: OpenAIClient, body: dict) -> list[str]:
    return [event["choices"][0]["text"] for _, event in client.stream("/v1/completions", body)]


@pytest.mark.parametrize("suffix", ["", "/", "/v1", "/v1/"])
def test_streams_every_piece(suffix: str) -> None:
    with scripted_server() as server:
        client = OpenAIClient(server.url + suffix, api_key="secret")
        assert client.model_names() == ["scripted"]
        assert texts(client, BODY) == ["w0 ", "w1 ", "w2 "]
        assert server.bodies[0]["stream"] is True
        assert server.headers[0]["Authorization"] == "Bearer secret"


def test_pieces_arrive_one_by_one() -> None:
    """The client has the first one while the server, which pauses for a minute in all, still writes."""
    with scripted_server(pause=0.03) as server:
        stream = OpenAIClient(server.url).stream("/v1/completions", {**BODY, "max_tokens": 2000})
        arrivals = [next(stream)[0] for _ in range(3)]
        assert server.num_open == 1 and arrivals == sorted(arrivals)
        stream.close()


def test_closing_the_stream_hangs_up() -> None:
    with scripted_server(pause=0.02) as server:
        stream = OpenAIClient(server.url).stream("/v1/completions", {**BODY, "max_tokens": 4000})
        next(stream)
        stream.close()
        limit = time.monotonic() + 60
        while not server.num_hung_up and time.monotonic() < limit:
            time.sleep(0.02)
        assert server.num_hung_up == 1


def test_errors() -> None:
    with scripted_server(fail_from=3) as server:
        client = OpenAIClient(server.url)
        with pytest.raises(RequestError, match="HTTP 404: no model other"):
            texts(client, {**BODY, "model": "other"})
        server.break_after = 2
        with pytest.raises(TwofoldError, match="scripted break"):
            texts(client, BODY)
        with pytest.raises(TwofoldError, match="HTTP 500: scripted failure"):
            texts(client, BODY)
    with pytest.raises(TwofoldError, match=r"cannot be used: .*refused"):
        client.model_names()
    for url in ("ftp://somewhere", "http://", ""):
        with pytest.raises(ConfigError, match="must look like"):
            OpenAIClient(url)


def test_keys_beyond_ascii_are_sent_as_utf8() -> None:
    with scripted_server() as server:
        texts(OpenAIClient(server.url, api_key="s\xe9cret\u9375"), BODY)
        assert server.headers[0]["Authorization"].encode("latin-1").decode() == "Bearer s\xe9cret\u9375"
    with pytest.raises(ConfigError, match="control character"):
        OpenAIClient("http://127.0.0.1:1", api_key="key\n")
