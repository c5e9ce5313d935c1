"""Bind the servers' ports, and report those that cannot be used."""

import socket

from twinop.errors import TwinopError


class AddressError(TwinopError):
    """A port cannot be bound."""


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
