"""Check the bearer tokens of requests: one for inference, and one for control (loading models)."""

import hmac
from pathlib import Path

from pydantic import SecretStr

from twinop.system.regular_file import read_regular

from .operations import CONTROL, OPEN
from .settings import MOST_BYTES, ServerSettings, SettingsError


class Tokens:
    """The tokens that clients must send, if the settings have any."""

    def __init__(self, settings: ServerSettings) -> None:
        """Read the tokens' files; SettingsError: one cannot be read, or is empty."""
        self._inference = _token(settings.token, settings.token_file)
        self._control = _token(settings.control_token, settings.control_token_file) or self._inference

    def allow(self, path: str, authorization: bytes) -> bool:
        """Return whether a request for the path may be answered, by its Authorization header."""
        wanted = self._control if path.startswith(CONTROL) else self._inference
        if wanted is None or path in OPEN:
            return True
        scheme, _, token = authorization.partition(b" ")
        return scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), wanted)


def _token(token: SecretStr | None, file: Path | None) -> bytes | None:
    if file is None:
        return token.get_secret_value().encode() if token is not None else None
    try:
        found = read_regular(file, MOST_BYTES).strip()
    except OSError as error:
        raise SettingsError(f"the token's file {file} cannot be read: {error.strerror}") from error
    if not found:
        raise SettingsError(f"the token's file {file} is empty")
    return found
