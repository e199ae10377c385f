"""One-time passwords: shown once, changed at the first sign-in."""

from __future__ import annotations

import secrets
import string

_ALPHABET = string.ascii_letters + string.digits


def one_time_password() -> str:
    """Four groups of five letters and digits: over 110 bits, and possible to type."""
    return "-".join("".join(secrets.choice(_ALPHABET) for _ in range(5)) for _ in range(4))
