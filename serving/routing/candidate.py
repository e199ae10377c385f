"""A replica that could take a request, with what is known of it at this moment."""

from __future__ import annotations

import msgspec

from serving.port import Replica, ReplicaLoad

NOMINAL_SLOTS = 64
"""Slots that an engine without a bound of its own is taken to have, so that its load compares with others'."""


class Candidate(msgspec.Struct, frozen=True):
    """What a policy goes by."""

    replica: Replica
    in_flight: int = 0  # requests of this process
    load: ReplicaLoad | None = None  # its worker's own account
    in_use: int = 0  # slots over all processes, as last heard
    cached_tokens: int = 0  # of the prompt, expected in its prefix cache; only their order matters
    verdict: str = ""  # of health: empty, or why it takes nothing now

    @property
    def busy(self) -> int:
        """Slots in use: what all processes told, never less than what this one knows itself."""
        return max(self.in_use, self.in_flight)

    @property
    def share(self) -> float:
        """Slots in use over slots; 0 is idle, over 1 is more than it runs at once."""
        return self.busy / (self.replica.max_num_seqs or NOMINAL_SLOTS)
