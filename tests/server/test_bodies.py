"""Bodies that are no JSON, not UTF-8, too large, too deep or of the wrong kind get a 4xx at once."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator

import pytest
from http_server import RunningServer, counting_server
from twofold.errors import RequestError
from twofold.server.body import MAX_DEPTH, decode
from twofold.server.chat_schema import ChatRequest

JSON = {"Content-Type": "application/json"}
MAX_BODY = 200_000


@pytest.fixture(scope="module")
def server() -> Iterator[RunningServer]:
    with counting_server(server={"max_body_bytes": MAX_BODY, "body_seconds": 2.0}) as running:
        yield running


def body(**fields: object) -> bytes:
    return json.dumps({"model": "counting", "prompt": "a", "max_tokens": 1, **fields}).encode()


def check_refused(server: RunningServer, content: bytes, status: int, headers: dict[str, str] = JSON) -> dict:
    response = server.http.post("/v1/completions", content=content, headers=headers)
    assert response.status_code == status, response.text
    assert "Traceback" not in response.text
    assert server.complete("a", max_tokens=1)["choices"][0]["text"] == "b"
    return response.json()["error"]


@pytest.mark.parametrize(
    "content",
    [
        b"{:",
        b"",
        b"null",
        b"[]",
        b'"x"',
        b"[" * 90_000,
        b"[" * 90_000 + b"]" * 90_000,
        b'{"a":' * 30_000 + b"1" + b"}" * 30_000,
        body()[:-1] + b', "ignored": ' + b"[" * 90_000 + b"]" * 90_000 + b"}",
        body(temperature=1).replace(b'"temperature": 1', b'"temperature": NaN'),
        body(temperature=1).replace(b'"temperature": 1', b'"temperature": 1e999'),
        body(stream="true"),
        body(max_tokens="5"),
        body(max_tokens=5.5),
        body(max_tokens=True),
        body(n=1).replace(b'"n": 1', b'"n": 1e30'),
        b"\xef\xbb\xbf" + body(),
        body() + b"}",
    ],
)
def test_b088_bad_json(server: RunningServer, content: bytes) -> None:
    assert check_refused(server, content, 400)["type"] == "invalid_request_error"


def test_b088_odd_but_valid(server: RunningServer) -> None:
    """Repeated keys: the last counts, as in every JSON library; unknown keys may be anything."""
    content = body()[:-1] + b', "model": "none", "model": "counting", "\xc3\xa9\xf0\x9f\x98\x80": {"a": [[]]}}'
    response = server.http.post("/v1/completions", content=content, headers=JSON)
    assert response.status_code == 200, response.text


def test_b088_wrong_media_types(server: RunningServer) -> None:
    for kind in ("text/plain", "application/x-www-form-urlencoded", "application/jsonp"):
        assert check_refused(server, body(), 415, {"Content-Type": kind})["code"] == "unsupported_media_type"
    check_refused(server, body(), 415, {**JSON, "Content-Encoding": "gzip"})
    for kind in ("application/json; charset=utf-8", "application/vnd.api+json"):
        response = server.http.post("/v1/completions", content=body(), headers={"Content-Type": kind})
        assert response.status_code == 200
    request = server.http.build_request("POST", "/v1/completions", content=body())
    request.headers.pop("content-type", None)
    assert server.http.send(request).status_code == 200


def test_b088_too_large(server: RunningServer) -> None:
    assert check_refused(server, body(prompt="a" * MAX_BODY), 413)["code"] == "request_too_large"

    def chunks() -> Iterator[bytes]:
        for _ in range(30):
            yield b" " * 10_000

    response = server.http.post("/v1/completions", content=chunks(), headers=JSON)
    assert response.status_code == 413
    assert server.complete("a", max_tokens=1)["choices"][0]["text"] == "b"


@pytest.mark.parametrize(("length", "status"), [(5, 400), (10_000_000, 413), (len(body()) + 10, 408)])
def test_b088_wrong_content_length(server: RunningServer, length: int, status: int) -> None:
    with socket.create_connection(("127.0.0.1", server.port), timeout=60) as connection:
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {length}\r\n\r\n"
        connection.sendall(head.encode() + body())
        assert connection.recv(4096).startswith(f"HTTP/1.1 {status} ".encode())
    server.wait_idle()
    assert server.complete("a", max_tokens=1)["choices"][0]["text"] == "b"


def test_client_gone_in_the_middle_of_its_body(counting: RunningServer) -> None:
    """Noticed long before the 30 seconds that a body may take."""
    with socket.create_connection(("127.0.0.1", counting.port), timeout=60) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 100\r\n\r\n{")
        deadline = time.monotonic() + 60
        while not counting.state.num_open:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    counting.wait_idle(25)


@pytest.mark.parametrize(
    "content",
    [
        '{"model": "counting", "prompt": "你好"}'.encode("gbk"),
        body().decode().encode("utf-16"),
        body().decode().encode("utf-16-le"),
        b'{"model": "counting", "prompt": "a\xff"}',
        b'{"model": "counting", "prompt": "a\xc3"}',
        b'{"model": "counting\xff", "prompt": "a"}',
        b'{"model": "counting", "prompt": "a", "stop": "\xfe"}',
        b'{"model": "counting", "prompt": "a", "user": "\xfe"}',
        b'{"model": "counting", "prompt": "\\ud800"}',
        b'{"model": "counting", "prompt": "a", "stop": ["\\udc00"]}',
    ],
)
def test_b089_not_utf8(server: RunningServer, content: bytes) -> None:
    message = check_refused(server, content, 400)["message"]
    assert message.isascii()


def test_b089_nul_is_a_character(server: RunningServer) -> None:
    answer = server.complete("a\x00", max_tokens=1, user="\x00", stop=["\x00"])
    assert answer["usage"]["prompt_tokens"] == 2


@pytest.mark.parametrize(("depth", "fits"), [(MAX_DEPTH, True), (MAX_DEPTH + 1, False)])
def test_depth_limit_is_exact(depth: int, fits: bool) -> None:
    levels = depth - 1
    nested = '{"x":' * (levels // 2) + "[" * (levels - levels // 2) + "]" * (levels - levels // 2) + "}" * (levels // 2)
    content = f'{{"model": "m", "messages": [], "extra": {nested}}}'.encode()
    if fits:
        assert decode(content, ChatRequest).model == "m"
    else:
        with pytest.raises(RequestError, match=str(MAX_DEPTH)):
            decode(content, ChatRequest)


def test_brackets_in_strings_are_no_depth() -> None:
    text = json.dumps("[" * 500 + '\\"{' * 500)
    body = decode(f'{{"model": "m", "messages": [{{"role": "user", "content": {text}}}]}}'.encode(), ChatRequest)
    assert body.messages[0].content == json.loads(text)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ('"messages": [{"role": "user"}, {"content": "x"}]', "messages[1].role"),
        ('"messages": [{"role": 5}]', "messages[0].role"),
        ('"messages": {}', "messages"),
        ('"messages": [], "logit_bias": {"5": "x"}', "logit_bias"),
        ('"messages": [], "stop": ["a", 1]', "stop[1]"),
        ('"messages": [], "stream_options": {"include_usage": 1}', "stream_options.include_usage"),
    ],
)
def test_errors_name_the_json_path(fields: str, param: str) -> None:
    with pytest.raises(RequestError) as caught:
        decode(f'{{"model": "m", {fields}}}'.encode(), ChatRequest)
    assert caught.value.param == param and param in str(caught.value)


@pytest.mark.parametrize(
    "content",
    [b"{} x", b'{"model": 5} x', b'{"model": 5, }', b'{"model": 5, "messages": tru}', b'{"messages": 5', b"5 6"],
)
def test_syntax_comes_before_the_schema(content: bytes) -> None:
    with pytest.raises(RequestError, match="not valid JSON"):
        decode(content, ChatRequest)
