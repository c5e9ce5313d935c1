"""Check the bearer tokens of requests: one for inference, and one for control (loading models)."""

import hmac
import logging
import os
from pathlib import Path

from pydantic import SecretStr

from twinop.regular_file import read_regular

from .settings import MOST_BYTES, ServerSettings, SettingsError

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


class Token:
    """One token. If it comes from a file, it is read again when the file changes."""

    def __init__(self, token: SecretStr | None, file: Path | None) -> None:
        self._file = file
        self._token = token.get_secret_value().encode() if token is not None else None
        if file is not None:
            self._stamp, self._token = _stamp(file), _read(file)

    def __bool__(self) -> bool:
        return self._token is not None

    def allows(self, authorization: bytes) -> bool:
        """Return whether this is the value of the Authorization header that the server wants."""
        if self._token is None:
            return True
        if self._file is not None and self._stamp != (found := _stamp(self._file)):
            self._stamp = found
            try:
                self._token = _read(self._file)
                _log.info("the token in %s has changed", self._file)
            except SettingsError as error:
                _log.error("%s; the last token stays", error)
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)


def _stamp(file: Path) -> tuple[int, ...]:
    try:
        found = os.stat(file)
    except OSError:
        return ()
    return found.st_ino, found.st_mtime_ns, found.st_size


def _read(file: Path) -> bytes:
    try:
        token = read_regular(file, MOST_BYTES).strip()
    except OSError as error:
        raise SettingsError(f"the token's file {file} cannot be read: {error.strerror}") from error
    if not token:
        raise SettingsError(f"the token's file {file} is empty")
    return token
