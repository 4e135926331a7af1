"""TLS: a certificate that can be replaced while the server runs."""

from __future__ import annotations

import ssl
from pathlib import Path

from ..errors import ConfigError
from ..log import get_logger

logger = get_logger(__name__)


class Certificate:
    """Watches a certificate chain and its key; `apply` puts them into a server's context for new connections."""

    def __init__(self, certfile: str, keyfile: str) -> None:
        self._files = (Path(certfile).expanduser(), Path(keyfile).expanduser())
        self._modified = self._times()
        self.context = self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))

    def reload_if_changed(self) -> None:
        """Read the files again where their times have changed."""
        if self._times() != self._modified:
            self.reload()

    def reload(self) -> None:
        """Read the files again; a pair that does not fit changes nothing and is logged."""
        self._modified = self._times()
        try:
            # A trial first: loading a wrong pair would leave the serving context with half of it.
            self._load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
            self._load(self.context)
            logger.info("the certificate was read again")
        except ConfigError as error:
            logger.error("the certificate stays as it was: %s", error)

    def _load(self, context: ssl.SSLContext) -> ssl.SSLContext:
        certfile, keyfile = self._files
        try:
            # An encrypted key would have OpenSSL ask on the terminal.
            context.load_cert_chain(certfile, keyfile, password=lambda: "")
        except (OSError, ValueError) as error:
            raise ConfigError(f"the certificate {certfile} with the key {keyfile} cannot be used: {error}") from None
        context.minimum_version = ssl.TLSVersion.TLSv1_2
        return context

    def _times(self) -> tuple[int, ...]:
        try:
            return tuple(path.stat().st_mtime_ns for path in self._files)
        except OSError:
            return ()
