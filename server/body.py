"""Reading a JSON body: bounded in size, time and depth, UTF-8 only, decoded straight into a schema."""

from __future__ import annotations

import asyncio
import re
from typing import TypeVar

import msgspec
import numpy as np
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request

from ..errors import RequestError

T = TypeVar("T")

MAX_DEPTH = 64
_OPENERS = bytes.maketrans(b"{}", b"[]")
_NOT_BRACKETS = bytes(set(range(256)) - set(b"[]{}"))
_PATH = re.compile(r" - at `(?:key in )?\$\.?([^`]*)`$")
_MISSING = re.compile(r"missing required field `([^`]+)`")
_CLOSE = {"Connection": "close"}


async def read_json(request: Request, schema: type[T], *, max_bytes: int, seconds: float) -> T:
    """The body of ``request`` as ``schema``. RequestError (400), or HTTPException 408, 413, 415."""
    _check_media_type(request)
    return decode(await read_raw(request, max_bytes=max_bytes, seconds=seconds), schema)


async def read_raw(request: Request, *, max_bytes: int, seconds: float) -> bytes:
    """The body of ``request`` as it came. HTTPException 400, 408, 413, 415."""
    _check_headers(request, max_bytes)
    try:
        return await asyncio.wait_for(_read(request, max_bytes), seconds)
    except asyncio.TimeoutError:
        raise HTTPException(408, f"the request body did not arrive within {seconds:g} s", _CLOSE) from None
    except ClientDisconnect:
        raise HTTPException(400, "the connection closed before the whole body arrived", _CLOSE) from None


def decode(body: bytes, schema: type[T]) -> T:
    """JSON bytes as ``schema``; RequestError names the JSON path of what is wrong."""
    try:
        body.decode()
    except UnicodeDecodeError as error:
        raise RequestError(f"the request body is not UTF-8: byte {error.start} cannot be decoded") from None
    _check_depth(body)
    try:
        return msgspec.json.decode(body, type=schema)
    except msgspec.ValidationError as error:
        _check_syntax(body)
        raise _validation_error(str(error)) from None
    except msgspec.DecodeError as error:
        raise _bad_syntax(error) from None
    except RecursionError:
        raise _too_deep() from None


def _check_media_type(request: Request) -> None:
    media_type = request.headers.get("content-type", "application/json").split(";")[0].strip().lower()
    if media_type != "application/json" and not media_type.endswith("+json"):
        raise HTTPException(415, f"Content-Type is {media_type!r}; send application/json")


def _check_headers(request: Request, max_bytes: int) -> None:
    encoding = request.headers.get("content-encoding", "identity")
    if encoding != "identity":
        raise HTTPException(415, f"Content-Encoding is {encoding!r}; send the body uncompressed")
    length = request.headers.get("content-length", "")
    if length.isascii() and length.isdigit() and int(length) > max_bytes:
        raise _too_large(int(length), max_bytes)


async def _read(request: Request, max_bytes: int) -> bytes:
    chunks = bytearray()
    async for chunk in request.stream():
        chunks += chunk
        if len(chunks) > max_bytes:
            raise _too_large(len(chunks), max_bytes)
    return bytes(chunks)


def _too_large(size: int, max_bytes: int) -> HTTPException:
    return HTTPException(413, f"the request body has {size} bytes or more; the limit is {max_bytes}", _CLOSE)


def _check_syntax(body: bytes) -> None:
    """Refuse what is no JSON, whatever its beginning says: decoding into a schema stops at the first wrong field."""
    try:
        msgspec.json.decode(body, type=msgspec.Raw)
    except msgspec.DecodeError as error:
        raise _bad_syntax(error) from None


def _bad_syntax(error: msgspec.DecodeError) -> RequestError:
    return RequestError(f"the request body is not valid JSON: {error}")


def _too_deep() -> RequestError:
    return RequestError(f"the request body nests deeper than {MAX_DEPTH} levels")


def _check_depth(body: bytes) -> None:
    """Refuse deep nesting before the parser meets it: strings out, then brackets counted, no Python loop over bytes."""
    if body.count(b"[") + body.count(b"{") <= MAX_DEPTH:
        return
    outside = b"".join(body.replace(b"\\\\", b"").replace(b'\\"', b"").split(b'"')[::2])
    brackets = np.frombuffer(outside.translate(_OPENERS, _NOT_BRACKETS), dtype=np.uint8)
    depth = np.cumsum(np.where(brackets == ord("["), 1, -1), dtype=np.int32)
    if depth.size and depth.max() > MAX_DEPTH:
        raise _too_deep()


def _validation_error(message: str) -> RequestError:
    found = _PATH.search(message)
    path = found.group(1) if found else ""
    text = message[: found.start()] if found else message
    missing = _MISSING.search(text)
    if missing:
        path = f"{path}.{missing.group(1)}" if path else missing.group(1)
        return RequestError(f"{path} is missing; the request needs it", param=path)
    # msgspec writes `field[...]` where the wrong key of a mapping is not known: the field is the best name then.
    path = path.split("[...]")[0]
    return RequestError(f"{path or 'the request body'}: {text[0].lower() + text[1:]}", param=path or None)
