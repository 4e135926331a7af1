"""Every error that Twofold raises on purpose.

TwofoldError
|- ConfigError            an option or a model config is wrong; names the value and the accepted ones
|- ModelNotFoundError     no model under that name, or its source cannot be reached
|- CheckpointError        a tensor or file is missing, truncated, duplicated or unexpected
|- StorageError           a folder cannot be written, or its disk is full
|- UnsupportedError       a correct request that this build or this device cannot serve
|- RequestError           one client request is wrong (HTTP 400)
|  `- ContextLengthError  prompt and output do not fit the model (HTTP 400, context_length_exceeded)
|- EngineBusyError        the engine takes no request now: draining or full (HTTP 503)
`- EngineDeadError        the engine core has died (HTTP 503)
"""

from __future__ import annotations


class TwofoldError(Exception):
    """Base of all errors raised on purpose; the message is written for the user."""


class ConfigError(TwofoldError):
    """An option or a model config is wrong."""


class ModelNotFoundError(TwofoldError):
    """No model under that name, or its source cannot be reached."""


class CheckpointError(TwofoldError):
    """A checkpoint's tensor or file is missing, truncated, duplicated or unexpected."""


class StorageError(TwofoldError):
    """A folder cannot be written, or its disk is full."""


class UnsupportedError(TwofoldError):
    """A correct request that this build or this device cannot serve."""


class RequestError(TwofoldError):
    """One request is wrong; the engine is fine.

    ``param`` names the offending field as the client wrote it (``messages[0].content``), ``code`` is OpenAI's
    machine-readable code where one exists.
    """

    def __init__(self, message: str, *, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.param = param
        self.code = code


class ContextLengthError(RequestError):
    """Prompt and output do not fit the model's context."""

    def __init__(self, message: str, *, param: str | None = None) -> None:
        super().__init__(message, param=param, code="context_length_exceeded")


class EngineBusyError(TwofoldError):
    """The engine takes no new request now: it is draining, or its queue is full."""


class EngineDeadError(TwofoldError):
    """The engine core has died; no request can be answered any more."""
