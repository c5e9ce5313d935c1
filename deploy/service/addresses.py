"""Bind the servers' ports, and report ports and TLS files that cannot be used."""

import logging
import socket
import ssl
from pathlib import Path
from typing import Any

import grpc

from twinop.errors import TwinopError
from twinop.regular_file import read_regular

from .settings import ServerSettings
from .watched import Watched

_log = logging.getLogger(__name__)
_MOST_BYTES = 16 << 20  # of a PEM file; those of all authorities have 0.3 MB


class AddressError(TwinopError):
    """A port cannot be bound, or TLS cannot be set up."""


def bound(host: str, port: int, option: str, *, shared: bool = False) -> socket.socket:
    """Return a socket that is bound to the address but does not listen yet.

    If `shared`, other processes may listen on the port too.

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


def reserved(host: str, port: int, option: str) -> socket.socket:
    """Return a socket that keeps the port for processes that share it, and away from other services.

    Raises:
        AddressError: the address cannot be bound, or the system cannot share it.
    """
    found = bound(host, port, option)
    try:  # after `bound`, which had to find the port unused
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 0)
        found.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
    except OSError as error:
        why = f"several processes cannot share it: {error.strerror}"
        raise address_error(host, port, option, why) from error
    return found


def address_error(host: str, port: int, option: str, why: str) -> AddressError:
    """Return the error for an address that cannot be bound, with the reason `why`."""
    return AddressError(
        f"cannot listen on port {port} of {host}: {why}. Stop what uses it, or choose another with {option} "
        "(0: any that is free) or --host"
    )


class LoggedHandshake(ssl.SSLObject):
    """Logs why a client's certificate is refused: asyncio closes the connection without a word."""

    def do_handshake(self) -> None:
        """Shake hands.

        Raises:
            ssl.SSLError: the client has no certificate, or not one that is accepted.
        """
        try:
            super().do_handshake()
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            raise
        except ssl.SSLError as error:
            why = getattr(error, "verify_message", "") or error.reason
            _log.warning("a TLS connection was refused: %s", why)
            raise


def grpc_credentials(settings: ServerSettings) -> grpc.ServerCredentials | None:
    """Return gRPC's credentials, which follow changes of the certificate's files; None without TLS.

    Raises:
        AddressError: a file cannot be used.
    """
    if settings.tls_certificate is None or settings.tls_key is None:
        return None
    pair = settings.tls_key, settings.tls_certificate
    try:
        authorities = read_pem(settings.tls_client_ca) if settings.tls_client_ca is not None else None
        first = _configuration(pair, authorities)
    except (OSError, ValueError) as error:
        raise tls_error(settings, error) from error
    watched = Watched(*pair)

    def renewed() -> Any:
        """Return the new certificate, or None if there is none; called at each connection."""
        try:
            return _configuration(pair, authorities) if watched.changed() else None
        except (OSError, ValueError):
            _log.exception("the TLS certificate could not be reloaded")
            return None

    needs_certificate = authorities is not None
    credentials: grpc.ServerCredentials = grpc.dynamic_ssl_server_credentials(
        first, renewed, require_client_authentication=needs_certificate
    )
    return credentials


def read_pem(file: Path) -> bytes:
    """Read a certificate or a key.

    Raises:
        OSError: it is no regular file, far too large, or cannot be read.
    """
    return read_regular(file, _MOST_BYTES)


def _configuration(pair: tuple[Path, Path], authorities: bytes | None) -> Any:
    key, certificate = map(read_pem, pair)
    return grpc.ssl_server_certificate_configuration([(key, certificate)], authorities)


def tls_error(settings: ServerSettings, error: Exception) -> AddressError:
    """Return the error for TLS files that cannot be used."""
    files = f"certificate {settings.tls_certificate} and key {settings.tls_key}"
    if settings.tls_client_ca is not None:
        files += f", and {settings.tls_client_ca} for clients"
    return AddressError(
        f"TLS cannot be set up with {files}: {error}. All must be PEM files, and the key the certificate's"
    )
