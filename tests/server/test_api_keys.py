"""API keys from a file: who gets in, limits, reloading; and whose stored things are whose."""

from __future__ import annotations

import hashlib
import json
import os
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import pytest
from http_server import RunningServer, counting_server
from twofold import cli
from twofold.errors import ConfigError
from twofold.server.api_keys import ApiKey, KeyEntry, read_key_file
from twofold.server.config import ServerConfig


def digest(key: str) -> str:
    return "sha256:" + hashlib.sha256(key.encode()).hexdigest()


def write(path: Path, **keys: dict[str, Any]) -> str:
    """A file with ``name={"key": ..., limits}``."""
    entries = [{"name": name, "hash": digest(fields.pop("key")), **fields} for name, fields in keys.items()]
    path.write_text(json.dumps({"keys": entries}))
    return str(path)


def ask(server: RunningServer, key: str | None, path: str = "/v1/models") -> httpx.Response:
    return server.http.get(path, headers={"Authorization": f"Bearer {key}"} if key else {})


def complete(server: RunningServer, key: str, **fields: Any) -> httpx.Response:
    body = {"model": server.model, "prompt": "a", "max_tokens": 1, **fields}
    return server.post("/v1/completions", body, headers={"Authorization": f"Bearer {key}"})


def test_a_file_of_keys(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", ann={"key": "one"}, ben={"key": "two"})
    with counting_server(server={"api_key_file": path, "api_keys": ("plain",)}) as server:
        assert ask(server, None, "/health").status_code == 200
        for route in ("/v1/models", "/metrics", "/v1/kernels", "/none"):
            assert ask(server, None, route).status_code == 401
            assert ask(server, "three", route).status_code == 401
        assert {ask(server, key).status_code for key in ("one", "two", "plain")} == {200}
        assert server.http.get("/v1/models", headers={"x-api-key": "one"}).status_code == 200
        assert ask(server, digest("one")).status_code == 401, "a hash is no key"
        write(tmp_path / "keys.json", ben={"key": "two"}, cat={"key": "three"})
        os.utime(path, ns=(1, 1))
        deadline = time.monotonic() + 100
        while ask(server, "one").status_code != 401:
            assert time.monotonic() < deadline
            time.sleep(0.05)
        assert ask(server, "three").status_code == 200
        (tmp_path / "keys.json").write_text("{")
        server.state.api_keys.reload()
        assert ask(server, "three").status_code == 200, "a wrong file changes nothing"


def test_requests_in_flight(tmp_path: Path) -> None:
    path = write(tmp_path / "keys.json", ann={"key": "one", "requests_in_flight": 1}, ben={"key": "two"})
    with counting_server("SlowCore", server={"api_key_file": path}) as server:
        # Four seconds at least, so that it is still running when the next ones arrive.
        fields = {"max_tokens": 200, "ignore_eos": True}
        first = threading.Thread(target=complete, args=(server, "one"), kwargs=fields)
        first.start()
        while not server.client.num_open_requests:
            time.sleep(0.005)
        refused = complete(server, "one")
        assert refused.status_code == 429 and refused.headers["retry-after"]
        assert refused.json()["error"]["code"] == "rate_limit_exceeded"
        assert complete(server, "two").status_code == 200, "the limit is the key's own"
        first.join()
        assert complete(server, "one").status_code == 200


def test_requests_per_minute(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [1000.0]
    monkeypatch.setattr(time, "monotonic", lambda: now[0])
    key = ApiKey(KeyEntry(name="a", hash=digest("a"), requests_per_minute=3), refilled=now[0])
    assert [key.refusal() for _ in range(3)] == [None] * 3
    refusal = key.refusal()
    assert refusal is not None and refusal[1] == 20
    now[0] += 20.1
    assert key.refusal() is None and key.refusal() is not None
    now[0] += 3600
    assert [key.refusal() is None for _ in range(4)] == [True, True, True, False], "no more than a minute's worth waits"
    assert key.num_open == 7


def test_responses_belong_to_their_key() -> None:
    with counting_server(server={"api_keys": ("one", "two")}) as server:
        one, two = (server.openai.with_options(api_key=key) for key in ("one", "two"))
        answer = one.responses.create(model=server.model, input="a", max_output_tokens=1)
        url = f"/v1/responses/{answer.id}"
        assert (ask(server, "one", url).status_code, ask(server, "two", url).status_code) == (200, 404)
        body = {"model": server.model, "input": "b", "previous_response_id": answer.id}
        refused = server.post("/v1/responses", body, headers={"Authorization": "Bearer two"})
        assert refused.status_code == 400
        assert two.api_key == "two"


@pytest.mark.parametrize(
    ("text", "word"),
    [
        ("{", "wrong"),
        ('{"keys": [{"name": "a", "hash": "secret"}]}', "sha256:"),
        (json.dumps({"keys": [{"name": "", "hash": digest("a")}]}), "without a name"),
        (json.dumps({"keys": [{"name": "a", "hash": digest("a")}] * 2}), "twice"),
        (json.dumps({"keys": [{"name": "a", "hash": digest("a"), "requests_per_minute": 0}]}), "at least 1"),
        (json.dumps({"keys": [{"name": "a", "hash": digest("a"), "requests": 1}]}), "requests"),
    ],
)
def test_wrong_files(tmp_path: Path, text: str, word: str) -> None:
    (tmp_path / "keys.json").write_text(text)
    with pytest.raises(ConfigError, match=word):
        read_key_file(tmp_path / "keys.json")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_key_file(tmp_path / "none.json")


def test_the_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.json"
    assert cli.main(["keys", "add", str(path), "ann", "--requests-per-minute", "5"]) == 0
    key = capsys.readouterr().out.strip()
    entry = read_key_file(path).keys[0]
    assert (entry.name, entry.hash, entry.requests_per_minute) == ("ann", digest(key), 5)
    assert key not in path.read_text() and path.stat().st_mode & 0o077 == 0
    assert cli.main(["keys", "add", str(path), "ann"]) == 2
    assert cli.main(["keys", "list", str(path)]) == 0
    assert "ann  any in flight, 5 a minute" in capsys.readouterr().out
    assert cli.main(["keys", "remove", str(path), "ann"]) == 0
    assert read_key_file(path).keys == [] and cli.main(["keys", "remove", str(path), "ann"]) == 2


def test_keys_are_not_shown() -> None:
    assert "secret" not in repr(ServerConfig(api_keys=("secret",)))


def test_what_does_not_count_is_given_back() -> None:
    key = ApiKey(KeyEntry(name="a", hash=digest("a"), requests_per_minute=1))
    for _ in range(3):
        assert key.refusal() is None
        key.release(counts=False)
    assert key.refusal() is None and key.refusal() is not None and key.num_open == 1
