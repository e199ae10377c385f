"""The Celery application: jobs that no request waits for."""

from __future__ import annotations

import os
import warnings
from typing import Any

from celery import Celery
from celery.signals import setup_logging

os.environ.setdefault("DJANGO_SETTINGS_MODULE", "console.settings")

app = Celery("fanlight")
app.config_from_object("django.conf:settings", namespace="CELERY")
app.autodiscover_tasks()

# Under root nothing can be dropped: the data folder and the sockets are root's. What makes root dangerous for Celery,
# messages in pickle, is refused (CELERY_ACCEPT_CONTENT), and the broker's socket is ours alone.
warnings.filterwarnings("ignore", message=r"\s*You're running the worker with superuser privileges")


def _log_as_the_others_do(**_facts: Any) -> None:
    """JSON without keys, in place of Celery's own format."""
    from django.conf import settings

    from console.base import logs

    logs.configure(settings.ENV["LOG_LEVEL"])


setup_logging.connect(_log_as_the_others_do)
