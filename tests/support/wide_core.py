"""CountingCore for tokenizers with more than 256 ids; light, for a core process imports it."""

from __future__ import annotations

import dataclasses

from counting_core import CountingCore
from twofold.engine.messages import EngineInfo


class WideCore(CountingCore):
    """The same counting, with a vocabulary of 1024 ids."""

    def info(self) -> EngineInfo:
        return dataclasses.replace(super().info(), vocab_size=1024)
