"""API keys: `fl-` + 32 random bytes + checksum. Pure functions; a key itself is never stored.

    fl-<43 characters of base64url><6 hex digits of CRC-32 over what stands before>

The checksum lets a typing error or a scanner's find be told from a guess without asking anybody. At rest there is only
HMAC-SHA-256 under the server's secret: a key is high-entropy, so a slow password hash would add latency and no safety.
"""

from __future__ import annotations

import base64
import functools
import hmac
import re
import secrets
import zlib

PREFIX = "fl-"
_BODY = 43
_CHECK = 6
LENGTH = len(PREFIX) + _BODY + _CHECK
_ANYWHERE = re.compile(rf"{PREFIX}[A-Za-z0-9_-]{{{_BODY + _CHECK}}}")


def generate() -> str:
    """Return a fresh key. Show it once; keep `digest` and `display`."""
    body = PREFIX + base64.urlsafe_b64encode(secrets.token_bytes(32)).rstrip(b"=").decode()
    return body + _checksum(body)


def is_well_formed(key: str) -> bool:
    """Whether the shape and the checksum are right: says nothing about whether the key exists."""
    if len(key) != LENGTH or not key.startswith(PREFIX) or not key.isascii():
        return False
    return hmac.compare_digest(_checksum(key[:-_CHECK]), key[-_CHECK:])


def digest(key: str, secret: bytes) -> str:
    """HMAC-SHA-256 of the key under the server's secret, in hex: how a key is stored and looked up."""
    return _mac(secret, b"api-key", key)


def cache_salt(tenant_id: str, secret: bytes) -> str:
    """The salt of a tenant's prefix cache: another tenant's identical prompt never shares a block with it."""
    return _mac(secret, b"cache-salt", tenant_id)[:32]


def end_user(tenant_id: str, user: str, secret: bytes) -> str:
    """A stable pseudonym (16 hex digits) of the body's `user` inside one tenant."""
    return _mac(secret, b"end-user", f"{tenant_id}\0{user}")[:16]


def display(key: str) -> str:
    """What may be shown of a key afterwards: its prefix and last four characters."""
    return f"{PREFIX}…{key[-4:]}"


def hidden(text: str) -> str:
    """Text with every key in it cut to what may be shown: people paste keys into any field."""
    return _ANYWHERE.sub(lambda match: display(match[0]), text)


def _checksum(body: str) -> str:
    return f"{zlib.crc32(body.encode()):08x}"[-_CHECK:]


def _mac(secret: bytes, purpose: bytes, value: str) -> str:
    return hmac.digest(_subkey(secret, purpose), value.encode(), "sha256").hex()


@functools.lru_cache(maxsize=16)
def _subkey(secret: bytes, purpose: bytes) -> bytes:
    """One secret, several purposes: the purpose is part of the key, so that no digest serves two of them."""
    return hmac.digest(secret, b"fanlight:" + purpose, "sha256")
