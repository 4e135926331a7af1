"""Whose request it is: what one API key stored is not there for another."""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import Scope

_SCOPE_KEY = "twofold.owner"


def set_owner(scope: Scope, owner: str) -> None:
    """Note the API key that a request came with; ``owner`` names the key and is not the key."""
    scope[_SCOPE_KEY] = owner


def owner_of(request: Request) -> str:
    """The name of the request's API key; empty where the server asks for none."""
    return owner_in(request.scope)


def owner_in(scope: Scope) -> str:
    """`owner_of` for what has no request yet."""
    owner: str = scope.get(_SCOPE_KEY, "")
    return owner
