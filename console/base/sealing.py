"""Secrets of others (keys of external endpoints), encrypted at rest under a key derived from the server's secret."""

from __future__ import annotations

import base64
from functools import cache

from cryptography.fernet import Fernet, InvalidToken
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF
from django.conf import settings

_PURPOSE = b"fanlight: secrets of others, sealed, version 1"


class SealBroken(Exception):
    """The text was sealed under another secret, or changed since."""


def seal(secret: str) -> str:
    """The secret as text that only this installation can read."""
    return _box(settings.SECRET_KEY).encrypt(secret.encode()).decode()


def unseal(sealed: str) -> str:
    """The secret back. Raises SealBroken, whose message holds neither."""
    try:
        return _box(settings.SECRET_KEY).decrypt(sealed.encode()).decode()
    except (InvalidToken, UnicodeError):
        raise SealBroken("It was sealed under another secret.key; enter it again.") from None


@cache
def _box(server_secret: str) -> Fernet:
    derived = HKDF(algorithm=SHA256(), length=32, salt=None, info=_PURPOSE).derive(server_secret.encode())
    return Fernet(base64.urlsafe_b64encode(derived))
