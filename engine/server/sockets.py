"""Where the server listens: a TCP port, or a Unix socket with introspection beside it."""

from __future__ import annotations

import os
import socket
from dataclasses import dataclass
from pathlib import Path

from engine.errors import ConfigError


@dataclass(frozen=True, slots=True)
class ServerConfig:
    """Where to listen and how to stop; the engine's own settings are in EngineConfig."""

    host: str = "127.0.0.1"
    port: int = 8001
    uds: Path | None = None
    introspection_port: int | None = None
    api_key_file: Path | None = None
    ready_file: Path | None = None
    drain_seconds: float = 30.0
    log_json: bool = False

    def api_key(self) -> str | None:
        """The key clients must show. Raises ConfigError."""
        if self.api_key_file is None:
            return None
        try:
            key = self.api_key_file.read_text("utf-8").strip()
        except OSError as error:
            raise ConfigError(f"The API key file cannot be read: {error}") from error
        if not key:
            raise ConfigError(f"The API key file {self.api_key_file} is empty.")
        return key


def open_listener(server: ServerConfig) -> socket.socket:
    """Bind the main socket. Raises ConfigError when the place is taken."""
    if server.uds is None:
        return _bind_tcp(server.host, server.port)
    _remove_stale(server.uds)
    listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    before = os.umask(0o177)
    try:
        listener.bind(str(server.uds))
    except OSError as error:
        raise ConfigError(f"Cannot bind {server.uds}: {error}") from error
    finally:
        os.umask(before)
    return listener


def _bind_tcp(host: str, port: int) -> socket.socket:
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    listener = socket.socket(family, socket.SOCK_STREAM)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except OSError as error:
        listener.close()
        raise ConfigError(f"Cannot bind {host}:{port}: {error}") from error
    return listener


def _remove_stale(path: Path) -> None:
    """Remove a socket nobody listens on; refuse one that is in use, or any other file."""
    if not path.exists():
        return
    if not path.is_socket():
        raise ConfigError(f"{path} exists and is not a socket.")
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as probe:
        try:
            probe.connect(str(path))
        except OSError:
            path.unlink()
            return
    raise ConfigError(f"Another process listens on {path}.")


@dataclass(frozen=True, slots=True)
class Listeners:
    """Bound sockets: for everything, and beside a Unix socket for introspection on loopback."""

    main: socket.socket
    side: socket.socket | None

    def addresses(self, server: ServerConfig) -> dict[str, str | None]:
        """How to reach them, as the ready file says it."""
        if server.uds is not None:
            side = f"http://127.0.0.1:{self.side.getsockname()[1]}" if self.side else None
            return {"uds": str(server.uds), "introspection_url": side}
        host = f"[{server.host}]" if ":" in server.host else server.host
        url = f"http://{host}:{self.main.getsockname()[1]}"
        return {"url": url, "introspection_url": url}


def open_listeners(server: ServerConfig) -> Listeners:
    """Bind early, before seconds of loading. Raises ConfigError when a place is taken."""
    side = None
    if server.uds is not None and server.introspection_port is not None:
        side = _bind_tcp("127.0.0.1", server.introspection_port)
    return Listeners(open_listener(server), side)
