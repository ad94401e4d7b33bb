"""Ports of the loopback interface."""

from __future__ import annotations

import socket


def free_port() -> int:
    """A port of the loopback interface that is free now."""
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
