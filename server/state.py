"""What the routes of one server share, and the phase that it is in."""

from __future__ import annotations

import time
from enum import Enum
from pathlib import Path
from typing import Any, TypeVar

from starlette.requests import Request
from starlette.types import ASGIApp

from ..engine.client import AsyncEngineClient
from ..engine.sampling_params import SamplingParams
from ..errors import EngineBusyError, EngineDeadError
from .api_keys import ApiKeys
from .config import ServerConfig
from .database import Database
from .errors import ModelNameError
from .logprobs import TokenTexts
from .metrics import Metrics
from .open_requests import OpenRequests
from .tools.style import Style, choose_style
from .tracing import Tracing

S = TypeVar("S")


class Phase(str, Enum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    DEAD = "dead"


class ServerState:
    """One server. ``client`` is None until `attach`: the port answers before the model is loaded."""

    def __init__(self, config: ServerConfig) -> None:
        self.config = config
        self.client: AsyncEngineClient | None = None
        self.created = int(time.time())
        self.served_names = config.served_model_names
        self.num_open = 0
        self.open_requests = OpenRequests(config.request_seconds)
        self.api_keys = ApiKeys(config.api_keys, _path(config.api_key_file))
        self.metrics = Metrics(self)
        endpoint = config.otlp_traces_endpoint
        self.tracing = None if endpoint is None else Tracing(endpoint)
        self.token_texts: TokenTexts
        self.style: Style
        # The prompt of a reranker, None for a model that is none.
        self.reranker: str | None = None
        self.database = Database(_path(config.state_dir))
        self._shared: dict[type[Any], Any] = {}
        # Past the gate, for the server's own requests.
        self.router: ASGIApp
        self._draining = False

    def attach(self, client: AsyncEngineClient) -> None:
        """Begin to serve with a ready client."""
        self.token_texts = TokenTexts(client.tokenizer)
        template = client.tokenizer.template_text
        self.style = choose_style(template, self.config.tool_parser, self.config.reasoning_parser)
        self.reranker = choose_reranker(self.config.reranker, client.config.model)
        self.served_names = self.served_names or (default_name(client.config.model),)
        self.client = client

    def begin_drain(self) -> None:
        """Take no new requests from now on."""
        self._draining = True

    @property
    def phase(self) -> Phase:
        if self.client is not None and self.client.errored:
            return Phase.DEAD
        if self._draining:
            return Phase.DRAINING
        return Phase.LOADING if self.client is None else Phase.READY

    def ready_client(self) -> AsyncEngineClient:
        """The client, or EngineBusyError while loading or draining, or EngineDeadError."""
        phase = self.phase
        if phase is Phase.DEAD:
            assert self.client is not None
            raise EngineDeadError(str(self.client.error))
        if phase is Phase.DRAINING:
            raise EngineBusyError("the server is shutting down and takes no new requests")
        if self.client is None:
            raise EngineBusyError("the model is still loading; try again later")
        return self.client

    def check_model(self, name: str | None) -> None:
        """ModelNameError unless ``name`` is served; None passes."""
        if name is not None and name not in self.served_names:
            raise ModelNameError(name, self.served_names)

    def make_params(self, fields: dict[str, Any]) -> SamplingParams:
        """SamplingParams of what the client gave, over the model's defaults unless the server is told to leave them."""
        if self.config.generation_config == "none":
            return SamplingParams(**fields)
        return self.ready_client().inputs.default_params(**fields)

    def shared(self, kind: type[S]) -> S:
        """The one ``kind(state)`` of this server, made on first use: what the routes of a family share."""
        if kind not in self._shared:
            self._shared[kind] = kind(self)  # type: ignore[call-arg]
        made: S = self._shared[kind]
        return made


def state_of(request: Request) -> ServerState:
    """The state of the server that got ``request``."""
    state: ServerState = request.app.state.server
    return state


def default_name(model: str) -> str:
    """The name to serve a model under: a path's last part, so that no folder of the host shows, else itself."""
    path = Path(model).expanduser()
    if path.is_dir():
        return path.resolve().name
    return path.stem if path.is_file() else model


def choose_reranker(option: str, model: str) -> str | None:
    """The reranker's prompt that the option names, or that goes with the model's name."""
    if option == "auto":
        return "qwen3" if "qwen3-reranker" in default_name(model).lower() else None
    return None if option == "none" else option


def _path(text: str | None) -> Path | None:
    return None if text is None else Path(text).expanduser()
