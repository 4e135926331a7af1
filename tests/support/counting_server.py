"""A whole server over a core of counting_core: ``python counting_server.py CORE OPTIONS``, for tests of its process."""

from __future__ import annotations

import json
import sys
from typing import Any

from counting_core import ByteTokenizer
from twofold.engine.config import EngineConfig
from twofold.server.config import ServerConfig
from twofold.server.run import run_server


class ChatByteTokenizer(ByteTokenizer):
    """ByteTokenizer with a template that writes each message as ``role:content;``."""

    def render_chat(self, messages: list[dict[str, Any]], **options: Any) -> str:
        return "".join(f"{message['role']}:{message['content']};" for message in messages)


def serve_counting(core: str, options: dict[str, Any]) -> int:
    """``run_server`` with options of ServerConfig; its exit code."""
    client = {"core_factory": f"counting_core:{core}", "tokenizer": ChatByteTokenizer()}
    return run_server(EngineConfig(model="counting"), ServerConfig(**options), client_options=client)


if __name__ == "__main__":
    sys.exit(serve_counting(sys.argv[1], json.loads(sys.argv[2])))
