"""Errors: OpenAI's envelope with the right status, on every route, streaming or not; API keys."""

from __future__ import annotations

from collections.abc import Iterator

import httpx
import openai
import pytest
from http_server import RunningServer, counting_server

KEY = "sk-correct-horse"


@pytest.fixture(scope="module")
def keyed() -> Iterator[RunningServer]:
    with counting_server(server={"api_keys": (KEY, "sk-other"), "served_model_names": ("one", "two")}) as server:
        yield server


def check_envelope(response: httpx.Response, status: int, code: str | None = None) -> dict:
    assert response.status_code == status, response.text
    assert response.headers["content-type"] == "application/json"
    assert list(response.json()) == ["error"]
    error = response.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert isinstance(error["message"], str) and error["message"] and "Traceback" not in error["message"]
    assert isinstance(error["type"], str)
    assert all(error[name] is None or isinstance(error[name], str) for name in ("param", "code"))
    if code is not None:
        assert error["code"] == code
    return error


@pytest.mark.parametrize("stream", [False, True])
def test_b008_error_object(chain: RunningServer, stream: bool) -> None:
    def post(path: str, **body: object) -> httpx.Response:
        return chain.post(path, {"model": chain.model, "stream": stream, **body})

    messages = [{"role": "user", "content": "e"}]
    chat = "/v1/chat/completions"
    assert check_envelope(post(chat, messages=messages, temperature="hot"), 400)["param"] == "temperature"
    assert check_envelope(post(chat), 400)["param"] == "messages"
    long = check_envelope(post("/v1/completions", prompt="e" * 300), 400, "context_length_exceeded")
    assert long["type"] == "invalid_request_error" and "256" in long["message"] and "300" in long["message"]
    check_envelope(post("/v1/no-such-route"), 404, "not_found")
    check_envelope(chain.http.get(chat), 405, "method_not_allowed")
    check_envelope(chain.http.delete("/health"), 405, "method_not_allowed")


def test_b008_official_exceptions(chain: RunningServer) -> None:
    with pytest.raises(openai.BadRequestError) as caught:
        chain.openai.completions.create(model=chain.model, prompt="e" * 300)
    assert caught.value.code == "context_length_exceeded" and caught.value.param == "prompt"
    with pytest.raises(openai.NotFoundError) as missing:
        chain.openai.completions.create(model="no-such-model", prompt="e")
    assert missing.value.code == "model_not_found"


def test_405_says_what_is_allowed(chain: RunningServer) -> None:
    assert chain.http.get("/v1/completions").headers["allow"] == "POST"


def test_b009_unknown_model(chain: RunningServer) -> None:
    for path, body in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "e"}]}),
        ("/v1/completions", {"prompt": "e"}),
    ):
        assert check_envelope(chain.post(path, {"model": "no-such-model", **body}), 404, "model_not_found")
        assert check_envelope(chain.post(path, {"model": "", **body}), 404, "model_not_found")
        assert check_envelope(chain.post(path, body), 400)["param"] == "model"
    check_envelope(chain.http.get("/v1/models/no-such-model"), 404, "model_not_found")
    check_envelope(chain.http.get("/v1/models/../../etc/passwd"), 404)


def test_b009_every_served_name(keyed: RunningServer) -> None:
    client = openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=KEY, max_retries=0)
    models = client.models.list().data
    assert [(model.id, model.object) for model in models] == [("one", "model"), ("two", "model")]
    assert all(type(model.created) is int for model in models)
    assert client.models.retrieve("two").id == "two"
    for name in ("one", "two"):
        assert client.completions.create(model=name, prompt="a", max_tokens=1).model == name
    with pytest.raises(openai.NotFoundError):
        client.completions.create(model="counting", prompt="a")


@pytest.mark.parametrize(
    "header",
    [None, "Bearer wrong", KEY, f"Basic {KEY}", "Bearer", f"Bearer {KEY}x", f"Bearer {KEY[:-1]}", "Bearer \xe9"],
)
def test_b008_bad_api_key(keyed: RunningServer, header: str | None) -> None:
    headers = {} if header is None else {"Authorization": header.encode("latin-1")}
    for method, path in (("GET", "/v1/models"), ("POST", "/v1/completions"), ("GET", "/metrics"), ("GET", "/nowhere")):
        response = keyed.http.request(method, path, headers=headers)
        error = check_envelope(response, 401, "invalid_api_key")
        assert response.headers["www-authenticate"] == "Bearer" and KEY not in error["message"]
    assert keyed.http.get("/health").status_code == 200


def test_good_api_keys(keyed: RunningServer) -> None:
    for header in (f"Bearer {KEY}", "bearer sk-other"):
        assert keyed.http.get("/v1/models", headers={"Authorization": header}).status_code == 200
    with pytest.raises(openai.AuthenticationError):
        openai.OpenAI(base_url=f"{keyed.url}/v1", api_key="wrong", max_retries=0).models.list()


def test_unforeseen_error_is_a_500_without_details(counting: RunningServer, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise ZeroDivisionError("secret detail")

    monkeypatch.setattr(counting.state, "check_model", fail)
    response = counting.post("/v1/completions", {"model": "counting", "prompt": "a"})
    assert "secret" not in check_envelope(response, 500, "internal_error")["message"]
    monkeypatch.undo()
    assert counting.complete("a", max_tokens=1)["choices"][0]["text"] == "b"


@pytest.mark.parametrize("key", ["s\xe9cret", "\xe0", "\u9375", "k\udcff"])
def test_keys_beyond_ascii(key: str) -> None:
    with counting_server(server={"api_keys": ("other", key)}) as server:
        forms = {key.encode("utf-8", "surrogateescape")} | ({key.encode("latin-1")} if max(key) < "\u0100" else set())
        for form in forms:
            for given, status in ((form, 200), (form + b"x", 401), (b"x" + form[1:], 401)):
                headers = {"Authorization": b"Bearer " + given}
                assert server.http.get("/v1/models", headers=headers).status_code == status, given
