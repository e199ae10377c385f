"""The controllers' lease: one row says who leads, under which epoch, until when by the database's clock."""

from __future__ import annotations

import logging
import time

from django.db import connection

log = logging.getLogger(__name__)

LEASE_S = 5
_TAKE = """
INSERT INTO fleet_controllerlease (id, holder, epoch, expires_at)
VALUES (1, %s, 1, now() + make_interval(secs => %s))
ON CONFLICT (id) DO UPDATE SET holder = excluded.holder, expires_at = excluded.expires_at,
  epoch = fleet_controllerlease.epoch + (fleet_controllerlease.holder <> excluded.holder)::int
WHERE fleet_controllerlease.holder = excluded.holder OR fleet_controllerlease.expires_at < now()
  OR fleet_controllerlease.expires_at IS NULL
RETURNING epoch
"""


class Lease:
    """What makes one controller the leader. `epoch` is that of the last time it led, 0 before the first."""

    def __init__(self, holder: str) -> None:
        self.holder = holder
        self.epoch = 0
        self._renew_at = 0.0  # monotonic; the lease is surely ours until then

    def held(self) -> bool:
        """Whether the lease is ours; taken when it is free, renewed well before it ends."""
        if time.monotonic() < self._renew_at:
            return True
        asked_at = time.monotonic()
        taken = self._take()
        self._renew_at = asked_at + LEASE_S / 3 if taken else 0.0
        return taken

    def doubt(self) -> None:
        """Ask the database the next time, whatever the clock says."""
        self._renew_at = 0.0

    def release(self) -> None:
        """Let another lead at once."""
        self.doubt()
        with connection.cursor() as cursor:
            cursor.execute("UPDATE fleet_controllerlease SET expires_at = NULL WHERE holder = %s", [self.holder])

    def _take(self) -> bool:
        with connection.cursor() as cursor:
            cursor.execute(_TAKE, [self.holder, LEASE_S])
            row = cursor.fetchone()
        if row is None:
            return False
        if row[0] != self.epoch:
            log.info("controller: leading under epoch %s", row[0])
            self.epoch = row[0]
        return True
