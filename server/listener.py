"""The listening socket, bound before anything slow happens, so that a taken port costs no wait."""

from __future__ import annotations

import errno
import ipaddress
import socket
import sys
from typing import Any

LOOPBACK_NAMES = ("localhost", "127.0.0.1", "[::1]")
"""As they stand in a Host header."""


class ListenError(Exception):
    """The address cannot be listened on; the message is one line with the fix."""


def bind(host: str, port: int) -> socket.socket:
    """A bound TCP socket that does not listen yet; port 0 takes any free one.

    Raises:
        ListenError: the address is in use, forbidden or not of this machine.
    """
    family, address = _resolve(host, port)
    # Only of a socket that says so does asyncio know that it is TCP, and turns Nagle's algorithm
    # off: with it, the first text waits 40 ms for a kept connection's acknowledgement.
    sock = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    try:
        if sys.platform == "win32":
            # There, SO_REUSEADDR would let two servers share one port.
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_EXCLUSIVEADDRUSE, 1)
        else:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
    except OSError as error:
        sock.close()
        raise listen_error(host, port, error) from error
    return sock


def listen_error(host: str, port: int, error: OSError) -> ListenError:
    """The sentence for an error of bind or listen."""
    forbidden = error.errno in (errno.EACCES, errno.EPERM)
    # Windows calls a port that somebody else holds exclusively "forbidden".
    if error.errno == errno.EADDRINUSE or (forbidden and port >= 1024):
        return ListenError(
            f"port {port} on {host} is in use; stop the program that uses it, or choose another "
            f"with --port {port + 1}"
        )
    if forbidden:
        return ListenError(
            f"this user may not listen on port {port} of {host}; choose one above 1023 with --port"
        )
    return ListenError(
        f"cannot listen on {host}: {error.strerror or error}; use --host 127.0.0.1, or 0.0.0.0 "
        "for the network"
    )


def is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def base_url(host: str, port: int) -> str:
    """The URL that a client on this machine uses."""
    shown = {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)
    return f"http://[{shown}]:{port}" if ":" in shown else f"http://{shown}:{port}"


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, tuple[Any, ...]]:
    """The first address of `host`, IPv4 before IPv6: what clients try for "localhost" varies."""
    try:
        found = socket.getaddrinfo(
            host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )
    except OSError as error:
        raise ListenError(
            f"{host!r} is not an address of this machine; use --host 127.0.0.1, or 0.0.0.0 for "
            "the network"
        ) from error
    family, _, _, _, address = min(found, key=lambda info: info[0] != socket.AF_INET)
    return family, address
