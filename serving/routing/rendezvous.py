"""Rendezvous hashing: every owner draws a number for a key and the best one has it.

An owner that comes or goes, or whose weight changes, moves only the keys that it gains or loses (Thaler and
Ravishankar 1998; with weights, the draw is an exponential variable of that rate).
"""

from __future__ import annotations

import math
from hashlib import blake2b

_BITS = 52  # so that the ends of the interval stay out of reach of rounding


def uniform(key: str, owner: str) -> float:
    """A number strictly between 0 and 1, the same in every process and at every start."""
    digest = blake2b(f"{key}\0{owner}".encode("utf-8", "surrogatepass"), digest_size=8).digest()
    return ((int.from_bytes(digest, "big") >> (64 - _BITS)) + 0.5) / (1 << _BITS)


def distance(key: str, owner: str, weight: float) -> float:
    """How far an owner of this weight (over 0) is from a key: the nearest one has it, each with its share of keys."""
    return -math.log(uniform(key, owner)) / weight
