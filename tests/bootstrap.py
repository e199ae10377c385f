"""Loaded before anything else (`-p tests.bootstrap`): the tests' own data folder, whatever the shell has set."""

from __future__ import annotations

import atexit
import os
import shutil
import tempfile
from pathlib import Path

# Imported here, at a shallow depth and before pytest rewrites its assertions: from deep inside a collection Python 3.11
# can fail to compile it ("AST constructor recursion depth mismatch").
import hypothesis  # noqa: F401

for name in [name for name in os.environ if name.startswith("FANLIGHT_") and name != "FANLIGHT_TEST_MODEL"]:
    del os.environ[name]

DATA = Path(tempfile.mkdtemp(prefix="fl-test-"))
os.environ["FANLIGHT_DATA_DIR"] = str(DATA)
os.environ["HF_HUB_OFFLINE"] = "1"
os.environ.setdefault("DJANGO_ALLOW_ASYNC_UNSAFE", "")


def _remove(pid: int = os.getpid()) -> None:
    if os.getpid() == pid:  # forked children inherit atexit handlers
        shutil.rmtree(DATA, ignore_errors=True)


atexit.register(_remove)
