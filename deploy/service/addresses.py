"""What the servers listen on, and the messages for what cannot be listened on."""

import socket

from twinop.deploy.service.settings import ServerSettings
from twinop.errors import TwinopError


class AddressError(TwinopError):
    """A port cannot be had, or TLS cannot be set up."""


def bound(host: str, port: int, option: str) -> socket.socket:
    """A socket with that address, not listening yet.

    Raises:
        AddressError: it cannot be had.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.bind(address)
        found.setblocking(False)
    except OSError as error:
        raise address_error(host, port, option, error.strerror or str(error)) from error
    return found


def address_error(host: str, port: int, option: str, why: str) -> AddressError:
    return AddressError(
        f"cannot listen on port {port} of {host}: {why}. Stop what uses it, or choose another with {option} "
        "(0: any that is free) or --host"
    )


def tls_error(settings: ServerSettings, error: Exception) -> AddressError:
    return AddressError(
        f"TLS cannot be set up with certificate {settings.tls_certificate} and key {settings.tls_key}: "
        f"{error}. Both must be PEM files, and the key the certificate's"
    )
