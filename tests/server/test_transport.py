"""HTTPS with certificates that change, CORS, time limits and access logs."""

from __future__ import annotations

import json
import signal
import ssl
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest
from http_server import SUPPORT, RunningServer, counting_server, free_port
from twofold.errors import ConfigError
from twofold.server.config import ServerConfig
from twofold.server.tls import Certificate


def make_certificate(folder: Path, name: str) -> tuple[str, str]:
    """A self-signed certificate for 127.0.0.1 with ``name`` as its subject."""
    certfile, keyfile = folder / "cert.pem", folder / "key.pem"
    command = ["openssl", "req", "-x509", "-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes"]
    command += ["-subj", f"/CN={name}", "-addext", "subjectAltName=IP:127.0.0.1", "-days", "2"]
    subprocess.run([*command, "-keyout", str(keyfile), "-out", str(certfile)], check=True, capture_output=True)
    return str(certfile), str(keyfile)


def served_subject(port: int, certfile: str) -> str:
    context = ssl.create_default_context(cafile=certfile)
    with httpx.Client(verify=context) as client:
        response = client.get(f"https://127.0.0.1:{port}/health")
        stream = response.extensions["network_stream"].get_extra_info("ssl_object")
        return dict(part[0] for part in stream.getpeercert()["subject"])["commonName"]


def wait_for(condition: object) -> None:
    deadline = time.monotonic() + 100
    while True:
        try:
            if condition():  # type: ignore[operator]
                return
        except httpx.TransportError:
            pass
        assert time.monotonic() < deadline
        time.sleep(0.05)


def test_tls_with_reload(tmp_path: Path) -> None:
    certfile, keyfile = make_certificate(tmp_path, "first")
    port = free_port()
    options = {"port": port, "tls_certfile": certfile, "tls_keyfile": keyfile, "access_log": True}
    command = [sys.executable, str(SUPPORT / "counting_server.py"), "CountingCore", json.dumps(options)]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        wait_for(lambda: served_subject(port, certfile) == "first")
        with pytest.raises(httpx.TransportError):
            httpx.get(f"http://127.0.0.1:{port}/health")
        make_certificate(tmp_path, "second")
        process.send_signal(signal.SIGHUP)
        wait_for(lambda: served_subject(port, certfile) == "second")
    finally:
        process.send_signal(signal.SIGTERM)
        output = process.communicate(timeout=100)[0]
    assert process.returncode == 0
    lines = [json.loads(line) for line in output.splitlines() if line.startswith("{")]
    assert lines and all(line["path"] == "/health" and line["method"] == "GET" for line in lines)
    assert {line["status"] for line in lines} <= {200, 503}


def test_a_pair_that_does_not_fit(tmp_path: Path) -> None:
    certfile, keyfile = make_certificate(tmp_path, "first")
    certificate = Certificate(certfile, keyfile)
    before = Path(certfile).read_bytes()
    other = tmp_path / "other"
    other.mkdir()
    make_certificate(other, "second")
    Path(certfile).write_bytes((other / "cert.pem").read_bytes())
    certificate.reload()
    Path(certfile).write_bytes(before)
    assert shown(certificate, certfile) == "first"
    with pytest.raises(ConfigError, match="cannot be used"):
        Certificate(str(other / "cert.pem"), keyfile)
    with pytest.raises(ConfigError, match="belong together"):
        ServerConfig(tls_certfile=certfile)


def shown(certificate: Certificate, certfile: str) -> str:
    """The subject that a client sees, over memory alone."""
    client_in, client_out = ssl.MemoryBIO(), ssl.MemoryBIO()
    context = ssl.create_default_context(cafile=certfile)
    client = context.wrap_bio(client_in, client_out, server_hostname="127.0.0.1")
    server = certificate.context.wrap_bio(client_out, client_in, server_side=True)
    for _ in range(4):
        for side in (client, server):
            try:
                side.do_handshake()
            except ssl.SSLWantReadError:
                continue
    peer = client.getpeercert()
    assert peer is not None
    return dict(part[0] for part in peer["subject"])["commonName"]  # type: ignore[index,misc]


@pytest.fixture(scope="module")
def cors() -> object:
    with counting_server(server={"cors_origins": ("https://good.org",), "api_keys": ("k",)}) as server:
        yield server


def test_cors(cors: RunningServer) -> None:
    ask = {"Origin": "https://good.org", "Access-Control-Request-Method": "POST"}
    ask["Access-Control-Request-Headers"] = "authorization,content-type"
    allowed = cors.http.options("/v1/chat/completions", headers=ask)
    assert allowed.status_code == 200 and allowed.headers["access-control-allow-origin"] == "https://good.org"
    assert "authorization" in allowed.headers["access-control-allow-headers"].lower()
    denied = cors.http.options("/v1/chat/completions", headers={**ask, "Origin": "https://bad.org"})
    assert "access-control-allow-origin" not in denied.headers
    refused = cors.http.get("/v1/models", headers={"Origin": "https://good.org"})
    assert refused.status_code == 401 and refused.headers["access-control-allow-origin"] == "https://good.org"


def test_no_cors_unless_asked(counting: RunningServer) -> None:
    response = counting.http.get("/v1/models", headers={"Origin": "https://good.org"})
    assert "access-control-allow-origin" not in response.headers


def test_answers_that_take_too_long() -> None:
    with counting_server("SlowCore", server={"request_seconds": 3.0}) as server:
        body = {"model": server.model, "prompt": "a", "max_tokens": 1000, "ignore_eos": True}
        late = server.post("/v1/completions", body)
        assert late.status_code == 504 and late.json()["error"]["code"] == "request_timeout"
        events = server.events("/v1/completions", body)
        assert events[-1]["error"]["code"] == "request_timeout" and len(events) > 2
        server.wait_idle()
        assert server.post("/v1/completions", {**body, "max_tokens": 2}).status_code == 200


def test_the_access_log(capfd: pytest.CaptureFixture[str]) -> None:
    with counting_server(server={"access_log": True, "api_keys": ("secret-key",)}) as server:
        body = {"model": server.model, "prompt": "secret-prompt", "max_tokens": 1}
        headers = {"Authorization": "Bearer secret-key"}
        assert server.post("/v1/completions?q=secret-query", body, headers=headers).status_code == 200
        assert server.post("/v1/completions", body, headers={"Authorization": "Bearer other"}).status_code == 401
    text = capfd.readouterr().out
    lines = [json.loads(line) for line in text.splitlines() if line.startswith("{")]
    assert [(line["path"], line["status"]) for line in lines] == [("/v1/completions", 200), ("/v1/completions", 401)]
    assert lines[0]["key"].startswith("key-") and lines[1]["key"] is None and lines[0]["seconds"] > 0
    assert "secret" not in text
