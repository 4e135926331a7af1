"""A small streaming client for any OpenAI-compatible server, on the standard library alone."""

from __future__ import annotations

import http.client
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

from ..errors import ConfigError, RequestError, TwofoldError

_CONNECT_SECONDS = 10.0


class OpenAIClient:
    """Talks to the server at ``url``, with or without ``/v1``; each call has its own connection: threads may share it.

    A refused request raises RequestError, an unreachable or failing server TwofoldError.
    """

    def __init__(self, url: str, *, api_key: str | None = None, timeout: float = 600.0) -> None:
        parts = urlsplit(url if "//" in url else f"http://{url}")
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ConfigError(f"url is {url!r}; it must look like http://127.0.0.1:8000")
        self.url = f"{parts.scheme}://{parts.netloc}"
        self.timeout = timeout
        self._parts = parts
        self._prefix = parts.path.rstrip("/").removesuffix("/v1")
        self._headers: dict[str, str | bytes] = {"Content-Type": "application/json", "User-Agent": "twofold"}
        if api_key:
            if not api_key.isprintable():
                raise ConfigError("the API key holds a control character; check the key for a line break")
            # As bytes: http.client would refuse a key outside latin-1.
            self._headers["Authorization"] = f"Bearer {api_key}".encode()

    def model_names(self) -> list[str]:
        """The ids that ``/v1/models`` lists."""
        with self._open("GET", "/v1/models", None) as response:
            return [str(row["id"]) for row in json.load(response).get("data", [])]

    def stream(self, path: str, body: dict[str, Any]) -> Iterator[tuple[float, dict[str, Any]]]:
        """Post ``body`` with streaming on; yields (``time.perf_counter()`` of arrival, event). Closing it hangs up."""
        with self._open("POST", path, {**body, "stream": True}) as response:
            while line := response.readline():
                arrived = time.perf_counter()
                if not line.startswith(b"data:"):
                    continue
                data = line[5:].strip()
                if data == b"[DONE]":
                    return
                event = json.loads(data)
                if event.get("error"):
                    raise TwofoldError(f"{self.url}: {_error_text(event)}")
                yield arrived, event

    @contextmanager
    def _open(self, method: str, path: str, body: dict[str, Any] | None) -> Iterator[http.client.HTTPResponse]:
        kind = http.client.HTTPSConnection if self._parts.scheme == "https" else http.client.HTTPConnection
        connection = kind(self._parts.hostname or "", self._parts.port, timeout=_CONNECT_SECONDS)
        try:
            connection.connect()
            connection.sock.settimeout(self.timeout)
            payload = None if body is None else json.dumps(body).encode()
            connection.request(method, self._prefix + path, payload, self._headers)
            response = connection.getresponse()
            if response.status != 200:
                kind_of_error = RequestError if 400 <= response.status < 500 else TwofoldError
                raise kind_of_error(f"{self.url}{path}: HTTP {response.status}: {_body_text(response.read())}")
            yield response
        except (OSError, http.client.HTTPException, json.JSONDecodeError) as error:
            raise TwofoldError(f"{self.url} cannot be used: {error or type(error).__name__}") from error
        finally:
            connection.close()


def _body_text(body: bytes) -> str:
    try:
        return _error_text(json.loads(body))
    except json.JSONDecodeError:
        return body[:300].decode("utf-8", "replace").strip()


def _error_text(event: Any) -> str:
    error = event.get("error", event) if isinstance(event, dict) else event
    return str(error.get("message", error)) if isinstance(error, dict) else str(error)
