"""Word to a service manager such as systemd (`Type=notify`): sd_notify(3), without its library."""

from __future__ import annotations

import socket

from tokenmill.observe.environment import notify_socket


def notify(state: str) -> None:
    """Tell `READY=1`, `STOPPING=1`, ... to whoever asked for it; nothing happens if nobody did."""
    path = notify_socket()
    if path is None:
        return
    address = "\0" + path[1:] if path.startswith("@") else path
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as sock:
        try:
            sock.connect(address)
            sock.sendall(state.encode("ascii"))
        except OSError:  # a manager that does not listen loses its word, not us our server
            return
