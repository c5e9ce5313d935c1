"""Check the bearer tokens of requests: for inference, for control (loading models), and for metrics."""

import hmac
import logging
from pathlib import Path

from pydantic import SecretStr

from twinop.regular_file import read_regular

from .settings import MOST_BYTES, ServerSettings, SettingsError
from .watched import Watched

_log = logging.getLogger(__name__)


class Tokens:
    """The tokens that clients must send, if the settings have any."""

    def __init__(self, settings: ServerSettings) -> None:
        """
        Raises:
            SettingsError: a token's file cannot be read, or is empty.
        """
        self.inference = Token(settings.token, settings.token_file)
        self.control = Token(settings.control_token, settings.control_token_file) or self.inference
        self.metrics = Token(settings.metrics_token, settings.metrics_token_file) or self.inference

    def allow(self, path: str, authorization: bytes) -> bool:
        """Return whether the value of the Authorization header permits a request to an HTTP path."""
        if path.startswith("/v2/repository/"):
            return self.control.allows(authorization)
        return (self.metrics if path in ("/metrics", "/status") else self.inference).allows(authorization)


class Token:
    """One token. If it comes from a file, it is read anew when the file changes."""

    def __init__(self, token: SecretStr | None, file: Path | None) -> None:
        self._file = file
        self._watched = Watched(*([file] if file is not None else []))
        self._token = token.get_secret_value().encode() if token is not None else None
        if file is not None:
            self._token = _read(file)

    def __bool__(self) -> bool:
        return self._token is not None

    def allows(self, authorization: bytes) -> bool:
        if self._token is None:
            return True
        if self._file is not None and self._watched.changed():
            try:
                self._token = _read(self._file)
                _log.info("read the token in %s anew", self._file)
            except SettingsError as error:
                _log.error("%s; the last token stays", error)
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


def _read(file: Path) -> bytes:
    try:
        token = read_regular(file, MOST_BYTES).strip()
    except OSError as error:
        raise SettingsError(f"the token's file {file} cannot be read: {error.strerror}") from error
    if not token:
        raise SettingsError(f"the token's file {file} is empty")
    return token
