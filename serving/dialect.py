"""What differs between the endpoints that generate text: paths, names of objects, how a body is read."""

from __future__ import annotations

from collections.abc import Callable

import msgspec

from serving.schemas import Ask


class Dialect(msgspec.Struct, frozen=True, kw_only=True):
    name: str  # in records and labels
    path: str  # the same at the gateway and at the engine
    parse: Callable[[bytes], Ask]
    chat: bool
    id_prefix: str
    object: str
    chunk_object: str
