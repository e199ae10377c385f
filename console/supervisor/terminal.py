"""What the person at the terminal sees: prefixed lines, one progress line, the banner."""

from __future__ import annotations

import sys
import threading
from typing import Any, Protocol

_COLOURS = {
    "web": 36,
    "shipper": 35,
    "controller": 33,
    "jobs": 34,
    "beat": 34,
    "postgres": 90,
    "valkey": 90,
    "up": 32,
}


class Stream(Protocol):
    """Where lines go: a terminal, a pipe, a log file."""

    def write(self, text: str, /) -> object: ...

    def flush(self) -> None: ...

    def isatty(self) -> bool: ...


class Terminal:
    """Serialises lines of many threads onto one stream.

    Nothing here raises when the stream is gone (a closed terminal, `| head`): the children's output must be read on, or
    they would stand still on a full pipe, and the stop in order must not end at its first word.
    """

    def __init__(self, stream: Stream | None = None) -> None:
        stream = sys.stdout if stream is None else stream
        self._stream = stream
        self._colour = stream.isatty()
        self._lock = threading.Lock()
        self._progress = False
        self._last = -1

    def line(self, name: str, text: str) -> None:
        """Show one line of a process."""
        colour = _COLOURS.get(name, 37)
        prefix = f"\x1b[{colour}m{name:>10}\x1b[0m" if self._colour else f"{name:>10}"
        with self._lock:
            self._end_progress()
            self._write("".join(f"{prefix}  {part}\n" for part in text.splitlines() or [""]))

    def say(self, text: str) -> None:
        """Show one line of the supervisor itself."""
        self.line("up", text)

    def percent(self, done: int) -> None:
        """Draw a progress bar in place; on a pipe, say every quarter."""
        with self._lock:
            if self._colour:
                bar = "█" * (done // 4) + "░" * (25 - done // 4)
                self._write(f"\r{'':>10}  {bar} {done:3d} %")
                self._progress = True
            elif done % 25 == 0 and done != self._last:
                self._write(f"{'up':>10}  {done} %\n")
            self._last = done

    def banner(self, url: str, model: str, credentials: dict[str, str], worker: str) -> bool:
        """Say where everything is; returns whether somebody could see it. Secrets go to no log."""
        key = credentials.get("api_key", "$FANLIGHT_KEY")
        lines = ["", f"  Fanlight is up   {url}", f"  Worker           {worker}", ""]
        if credentials:
            lines += [
                f"  Sign in          {credentials['login']} / {credentials['password']}",
                f"  API key          {key}",
                "                   Both are shown this once; the password is changed at first sign-in.",
                "",
            ]
        else:
            lines += [
                "  A new API key    .venv/bin/python manage.py key create --tenant default",
                "",
            ]
        message = '[{"role": "user", "content": "What is the capital of France?"}]'
        lines += [
            f'  curl -N {url}/v1/chat/completions -H "Authorization: Bearer {key}" -H "Content-Type: application/json"'
            f""" -d '{{"model": "{model}", "stream": true, "messages": {message}}}'""",
            "",
            "  Ctrl-C stops everything in order.",
            "",
        ]
        with self._lock:
            self._end_progress()
            return self._write("\n".join(lines) + "\n")

    def _end_progress(self) -> None:
        if self._progress:
            self._write("\n")
            self._progress = False

    def _write(self, text: str) -> bool:
        try:
            self._stream.write(text)
            self._stream.flush()
        except (OSError, ValueError):
            return False
        return True


def worker_line(replicas: list[dict[str, Any]]) -> str:
    """One phrase about the replicas for the banner."""
    if not replicas:
        return "none yet"
    return ", ".join(f"{each['name']} {each['state']}" for each in replicas)
