"""One line of JSON per answered request, without bodies, headers and keys."""

from __future__ import annotations

import sys
import time

import msgspec
from starlette.types import Scope

from .owners import owner_in


def log_access(scope: Scope, status: str, seconds: float) -> None:
    """Write the line to standard output. A path longer than 200 characters is cut; the query is left out."""
    client = scope.get("client")
    line = {
        "time": time.time(),
        "client": client[0] if client else None,
        "key": owner_in(scope) or None,
        "method": scope["method"],
        "path": scope["path"][:200],
        "status": int(status),
        "seconds": round(seconds, 6),
    }
    sys.stdout.write(msgspec.json.encode(line).decode() + "\n")
    sys.stdout.flush()
