"""Check the bearer token of a request."""

import hmac

from .settings import ServerSettings


class Token:
    """The token that clients must send, if the settings have one."""

    def __init__(self, settings: ServerSettings) -> None:
        self._token = settings.token.get_secret_value().encode() if settings.token is not None else None

    def allows(self, authorization: bytes) -> bool:
        """Return whether the value of the Authorization header permits the request."""
        scheme, _, token = authorization.partition(b" ")
        return self._token is None or (
            scheme.lower() == b"bearer" and hmac.compare_digest(token.strip(), self._token)
        )
