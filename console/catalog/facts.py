"""Facts of a model, read from its own files."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gguf import GGUFReader


@dataclass(frozen=True)
class Facts:
    """What the catalog shows of a model. Sizes in elements and bytes."""

    format: str
    architecture: str
    parameters: int
    layers: int
    hidden_size: int
    heads: int
    kv_heads: int
    head_dim: int
    context_length: int
    quantisation: str
    disk_bytes: int


def read_gguf(path: Path) -> Facts:
    """Read the header and tensor list of a GGUF file; the weights themselves stay on disk."""
    reader = GGUFReader(path)

    def field(name: str, default: Any = None) -> Any:
        found = reader.fields.get(name)
        return default if found is None else found.contents()

    architecture = str(field("general.architecture"))
    heads = int(field(f"{architecture}.attention.head_count"))
    hidden = int(field(f"{architecture}.embedding_length"))
    bytes_by_type: dict[str, int] = {}
    for tensor in reader.tensors:
        kind = tensor.tensor_type.name
        bytes_by_type[kind] = bytes_by_type.get(kind, 0) + int(tensor.n_bytes)
    return Facts(
        format="gguf",
        architecture=architecture,
        parameters=sum(int(tensor.n_elements) for tensor in reader.tensors),
        layers=int(field(f"{architecture}.block_count")),
        hidden_size=hidden,
        heads=heads,
        kv_heads=int(field(f"{architecture}.attention.head_count_kv", heads)),
        head_dim=int(field(f"{architecture}.attention.key_length", hidden // heads)),
        context_length=int(field(f"{architecture}.context_length")),
        quantisation=max(bytes_by_type, key=lambda kind: bytes_by_type[kind]),
        disk_bytes=path.stat().st_size,
    )
