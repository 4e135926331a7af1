"""Twofold's logger: one line per event, with the number, the limit and the action taken."""

from __future__ import annotations

import logging
import sys

from . import env


def get_logger(name: str) -> logging.Logger:
    """The logger of one module; the first call gives the ``twofold`` root its handler."""
    root = logging.getLogger("twofold")
    if not root.handlers:
        level = env.log_level()
        handler = logging.StreamHandler(sys.stderr)
        handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s", "%H:%M:%S"))
        root.addHandler(handler)
        root.setLevel(level)
        root.propagate = False
    return logging.getLogger(name)
