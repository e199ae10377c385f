"""JSON log lines on stdout, one object a line, without keys: the supervisor shows, rotates and bounds them."""

from __future__ import annotations

import logging
import logging.config
import re

from pythonjsonlogger.json import JsonFormatter

KEY_PATTERN = re.compile(r"fl-[A-Za-z0-9_-]{20,}")


class RedactedJson(JsonFormatter):
    """Last line of defence: no API key leaves the process in a log line, be it in the text, a field or a traceback."""

    def format(self, record: logging.LogRecord) -> str:
        """The whole line, as it will be written, with keys cut out."""
        return KEY_PATTERN.sub("fl-[redacted]", super().format(record))


def configure(level: str = "INFO") -> None:
    """Set up logging for a process of Fanlight. `level` is one of the names in the settings table."""
    logging.captureWarnings(True)
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "formatters": {
                "json": {
                    "()": RedactedJson,
                    "format": "%(levelname)s %(name)s %(message)s",
                    "rename_fields": {"levelname": "level", "name": "logger"},
                    "timestamp": "at",
                }
            },
            "handlers": {
                "stdout": {"class": "logging.StreamHandler", "stream": "ext://sys.stdout", "formatter": "json"}
            },
            "root": {"level": level, "handlers": ["stdout"]},
            "loggers": {
                "uvicorn.access": {"level": "WARNING"},
                "django.request": {"level": "ERROR"},
                "httpx": {"level": "WARNING"},
                "celery": {"level": "WARNING"},
            },
        }
    )
