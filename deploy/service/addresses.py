"""Bind the servers' ports, and report ports and TLS files that cannot be used."""

import socket

import grpc

from twinop.errors import TwinopError
from twinop.system.regular_file import read_regular

from .settings import ServerSettings

MOST_PEM_BYTES = 16 << 20


class AddressError(TwinopError):
    """A port cannot be bound, or TLS cannot be set up."""


def bound(host: str, port: int, option: str, *, shared: bool = False) -> socket.socket:
    """Return a socket that is bound to the address but does not listen yet.

    If `shared`, other servers of this user may listen on the port too.

    Raises:
        AddressError: the address cannot be bound.
    """
    try:
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        found = socket.socket(family, kind, protocol)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, shared)
        found.bind(address)
        found.setblocking(False)
    except OSError as error:
        raise address_error(host, port, option, error.strerror or str(error)) from error
    return found


def address_error(host: str, port: int, option: str, why: str) -> AddressError:
    """Return the error for an address that cannot be bound, with the reason `why`."""
    return AddressError(
        f"cannot listen on port {port} of {host}: {why}. Stop what uses it, or choose another with {option} "
        "(0: any that is free) or --host"
    )


def grpc_credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """Return gRPC's credentials; None without TLS. Raise AddressError if a file cannot be used."""
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    try:
        pair = [read_regular(file, MOST_PEM_BYTES) for file in (settings.tls_key, settings.tls_certificate)]
    except OSError as error:
        raise tls_error(settings, error) from error
    credentials: grpc.ServerCredentials = grpc.ssl_server_credentials([tuple(pair)])
    return credentials


def tls_error(settings: ServerSettings, error: Exception) -> AddressError:
    """Return the error for TLS files that cannot be used."""
    return AddressError(
        f"TLS cannot be set up with certificate {settings.tls_certificate} and key {settings.tls_key}: "
        f"{error}. Both must be PEM files, and the key the certificate's"
    )
