"""ServerConfig: everything that a user can choose about the HTTP side, each default in one place."""

from __future__ import annotations

from dataclasses import dataclass, field

from ..errors import ConfigError

GENERATION_CONFIGS = ("auto", "none")
TOOL_PARSERS = (
    "auto", "hermes", "llama3", "mistral", "mistral_args", "deepseek_v3", "deepseek_v31", "glm", "qwen3_coder",
    "gpt_oss", "json",
)  # fmt: skip
RERANKERS = ("auto", "none", "qwen3")
REASONING_PARSERS = ("auto", "none", "think", "gpt_oss")


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerConfig:
    """Options of one HTTP server.

    ``port``               0 lets the system choose one.
    ``served_model_names`` names that clients may ask for; empty: the model's own name.
    ``api_keys``           with at least one, every route but /health wants ``Authorization: Bearer KEY``.
    ``api_key_file``       JSON file of hashed keys with limits of their own, read again when it changes.
    ``cors_origins``       origins whose pages may call this server; ``*`` for all.
    ``tls_certfile``       certificate chain in PEM, with ``tls_keyfile``: HTTPS; read again when they change.
    ``generation_config``  ``auto``: the model's own sampling defaults lie over OpenAI's; ``none``: OpenAI's only.
    ``tool_parser``        how the model writes calls of tools; ``auto``: as its chat template shows.
    ``reasoning_parser``   how it marks its thoughts; ``auto`` as well, ``none``: they are text.
    ``reranker``           the prompt by which a model judges a query and a document; ``auto``: by the model's name.
    ``grace_seconds``      how long running requests may go on after SIGTERM.
    ``max_body_bytes``     larger request bodies get a 413.
    ``max_open_requests``  requests being answered at once; one more gets a 503 with Retry-After.
    ``max_connections``    connections at once; one more ends the one that has been idle longest, or gets a 503.
    ``body_seconds``       how long a client may take to send its headers, and how long its body; then 408.
    ``request_seconds``    how long an answer may take, streams included; then 504. None: as long as it wants.
    ``access_log``         a line of JSON on standard output per request.
    ``otlp_traces_endpoint``  URL of a collector that takes OpenTelemetry traces over HTTP; None: no traces.
    ``state_dir``          folder for stored responses, files and batches; None keeps them in memory.
    """

    host: str = "127.0.0.1"
    port: int = 8000
    served_model_names: tuple[str, ...] = ()
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    api_key_file: str | None = None
    cors_origins: tuple[str, ...] = ()
    tls_certfile: str | None = None
    tls_keyfile: str | None = None
    generation_config: str = "auto"
    tool_parser: str = "auto"
    reasoning_parser: str = "auto"
    reranker: str = "auto"
    grace_seconds: float = 30.0
    max_body_bytes: int = 16 << 20
    max_open_requests: int = 4096
    max_connections: int = 8192
    body_seconds: float = 30.0
    request_seconds: float | None = None
    access_log: bool = False
    otlp_traces_endpoint: str | None = None
    state_dir: str | None = None

    def __post_init__(self) -> None:
        if self.generation_config not in GENERATION_CONFIGS:
            raise ConfigError(
                f"generation_config is {self.generation_config!r}; it must be one of {', '.join(GENERATION_CONFIGS)}"
            )
        options = (("tool_parser", TOOL_PARSERS), ("reasoning_parser", REASONING_PARSERS), ("reranker", RERANKERS))
        for name, accepted in options:
            if getattr(self, name) not in accepted:
                raise ConfigError(f"{name} is {getattr(self, name)!r}; it must be one of {', '.join(accepted)}")
        if not 0 <= self.port <= 65535:
            raise ConfigError(f"port is {self.port}; it must lie from 0 to 65535")
        if self.grace_seconds < 0:
            raise ConfigError(f"grace_seconds is {self.grace_seconds:g}; it must be at least 0")
        for name in ("max_body_bytes", "max_open_requests", "max_connections", "body_seconds"):
            if getattr(self, name) <= 0:
                raise ConfigError(f"{name} is {getattr(self, name)}; it must be positive")
        if self.request_seconds is not None and self.request_seconds <= 0:
            raise ConfigError(f"request_seconds is {self.request_seconds:g}; it must be positive")
        endpoint = self.otlp_traces_endpoint
        if endpoint is not None and not endpoint.startswith(("http://", "https://")):
            raise ConfigError(
                f"otlp_traces_endpoint is {endpoint!r}; it must be a URL, such as http://localhost:4318/v1/traces"
            )
        if (self.tls_certfile is None) != (self.tls_keyfile is None):
            raise ConfigError("tls_certfile and tls_keyfile belong together; give both or neither")
        if any(not key.strip() for key in self.api_keys):
            raise ConfigError("an API key is empty; give a key of at least one character")
        if any(not name for name in self.served_model_names):
            raise ConfigError("a served model name is empty; give a name of at least one character")
