"""JSON log lines on stdout, one object a line, without keys: the supervisor shows, rotates and bounds them."""

from __future__ import annotations

import logging
import logging.config
import re

KEY_PATTERN = re.compile(r"fl-[A-Za-z0-9_-]{20,}")


class Redact(logging.Filter):
    """Last line of defence: no API key leaves the process in a log line, whoever wrote it."""

    def filter(self, record: logging.LogRecord) -> bool:
        message = record.getMessage()
        if "fl-" in message:
            record.msg, record.args = KEY_PATTERN.sub("fl-[redacted]", message), ()
        return True


def configure(level: str = "INFO") -> None:
    """Set up logging for a process of Fanlight. `level` is one of the names in the settings table."""
    logging.config.dictConfig(
        {
            "version": 1,
            "disable_existing_loggers": False,
            "filters": {"redact": {"()": Redact}},
            "formatters": {
                "json": {
                    "()": "pythonjsonlogger.json.JsonFormatter",
                    "format": "%(levelname)s %(name)s %(message)s",
                    "rename_fields": {"levelname": "level", "name": "logger"},
                    "timestamp": "at",
                }
            },
            "handlers": {
                "stdout": {
                    "class": "logging.StreamHandler",
                    "stream": "ext://sys.stdout",
                    "formatter": "json",
                    "filters": ["redact"],
                }
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
