"""``twofold serve``: an OpenAI-compatible server."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import json
import shlex
from typing import Any

from .. import env
from ..server.config import GENERATION_CONFIGS, REASONING_PARSERS, RERANKERS, TOOL_PARSERS, ServerConfig
from .engine_options import add_engine_arguments, engine_config
from .parser import byte_size, natural_int, number, positive_int

_FIELDS = {field.name: field for field in dataclasses.fields(ServerConfig)}

# Option -> (field, how it is read, what it does). Defaults are ServerConfig's own.
_OPTIONS: dict[str, tuple[str, dict[str, Any]]] = {
    "--host": ("host", {"metavar": "ADDRESS", "help": "address to listen on; 0.0.0.0 for all"}),
    "--port": ("port", {"type": natural_int, "metavar": "N", "help": "port to listen on; 0 lets the system choose"}),
    "--served-model-name": (
        "served_model_names",
        {
            "action": "append",
            "metavar": "NAME",
            "help": "name that clients may ask for; may be given several times (default: MODEL's own)",
        },
    ),
    "--api-key": (
        "api_keys",
        {
            "action": "append",
            "metavar": "KEY",
            "help": "key that clients must send; may be given several times (default: TWOFOLD_API_KEY, or no key)",
        },
    ),
    "--api-key-file": (
        "api_key_file",
        {"metavar": "FILE", "help": "hashed keys with limits of their own, as 'twofold keys' writes them"},
    ),
    "--cors-origin": (
        "cors_origins",
        {
            "action": "append",
            "metavar": "ORIGIN",
            "help": "origin whose pages may call the server, or *; may be given several times",
        },
    ),
    "--tls-certfile": ("tls_certfile", {"metavar": "FILE", "help": "certificate chain in PEM: serve HTTPS"}),
    "--tls-keyfile": ("tls_keyfile", {"metavar": "FILE", "help": "the certificate's private key in PEM"}),
    "--generation-config": (
        "generation_config",
        {"choices": GENERATION_CONFIGS, "help": "whether the model's own sampling defaults hold for the API"},
    ),
    "--tool-parser": (
        "tool_parser",
        {"choices": TOOL_PARSERS, "help": "how the model writes calls of tools (default: as its chat template shows)"},
    ),
    "--reasoning-parser": (
        "reasoning_parser",
        {"choices": REASONING_PARSERS, "help": "how the model marks its thoughts (default: as its template shows)"},
    ),
    "--reranker": (
        "reranker",
        {"choices": RERANKERS, "help": "the prompt by which the model judges documents (default: by its name)"},
    ),
    "--grace-seconds": (
        "grace_seconds",
        {
            "type": number(0.0, float("inf")),
            "metavar": "S",
            "help": "how long running requests may go on after SIGTERM",
        },
    ),
    "--max-body-bytes": (
        "max_body_bytes",
        {"type": byte_size, "metavar": "SIZE", "help": "largest request body, such as 16M"},
    ),
    "--max-open-requests": (
        "max_open_requests",
        {"type": positive_int, "metavar": "N", "help": "requests answered at once; more get a 503"},
    ),
    "--max-connections": (
        "max_connections",
        {"type": positive_int, "metavar": "N", "help": "connections at once; idle ones make room for more"},
    ),
    "--body-seconds": (
        "body_seconds",
        {
            "type": number(0.0, float("inf")),
            "metavar": "S",
            "help": "how long a client may take to send headers, then a body",
        },
    ),
    "--state-dir": (
        "state_dir",
        {
            "metavar": "DIR",
            "help": "folder that keeps stored responses, files and batches (default: they are kept in memory)",
        },
    ),
    "--request-seconds": (
        "request_seconds",
        {"type": number(0.0, float("inf")), "metavar": "S", "help": "how long an answer may take (default: no limit)"},
    ),
    "--otlp-traces-endpoint": (
        "otlp_traces_endpoint",
        {"metavar": "URL", "help": "collector of OpenTelemetry traces, such as http://localhost:4318/v1/traces"},
    ),
    "--access-log": ("access_log", {"action": "store_true", "help": "a line of JSON for every request"}),
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Options of the server, then of the engine."""
    group = parser.add_argument_group("server options")
    for option, (name, settings) in _OPTIONS.items():
        # argparse appends to a list only: the empty tuples of ServerConfig are None here.
        group.add_argument(option, dest=name, default=_FIELDS[name].default or None, **settings)
    add_engine_arguments(parser)


def run(args: argparse.Namespace) -> int:
    """Serve until a signal (exit code 0) or until the engine dies (1)."""
    from ..server.run import run_server

    config = server_config(args)
    announce = functools.partial(_announce, keyed=bool(config.api_keys or config.api_key_file))
    return run_server(engine_config(args), config, on_ready=announce)


def server_config(args: argparse.Namespace) -> ServerConfig:
    """The ServerConfig that parsed arguments describe (ConfigError where a value is wrong)."""
    values = {name: value for name in _FIELDS if (value := getattr(args, name)) is not None}
    for name in ("served_model_names", "api_keys", "cors_origins"):
        values[name] = tuple(values.get(name, ()))
    values["api_keys"] = values["api_keys"] or env.api_keys()
    return ServerConfig(**values)


def _announce(url: str, model: str, *, keyed: bool) -> None:
    """Print where the server is, and two lines that work when pasted into a shell."""
    # JSON's texts and lists are Python's too, and their double quotes live well inside the shell's single ones.
    name, messages = json.dumps(model), json.dumps([{"role": "user", "content": "What is a cat?"}])
    header = " -H 'Authorization: Bearer YOUR_KEY'" if keyed else ""
    client = f'OpenAI(base_url="{url}/v1", api_key="{"YOUR_KEY" if keyed else "none"}")'
    call = f"{client}.chat.completions.create(model={name}, messages={messages}, max_tokens=200)"
    code = f"from openai import OpenAI; print({call}.choices[0].message.content)"
    body = shlex.quote(f'{{"model": {name}, "messages": {messages}, "max_tokens": 200}}')
    print(f"\nTwofold serves {model} at {url}/v1\n")
    print(f"  curl {url}/v1/chat/completions -H 'Content-Type: application/json'{header} -d {body}\n")
    print(f"  python -c {shlex.quote(code)}\n", flush=True)
