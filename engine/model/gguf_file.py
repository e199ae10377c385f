"""A lean GGUF reader: header parsed once, tensors mapped and dequantised on demand.

The gguf package's own reader builds a Python object per vocabulary entry, which takes seconds;
only its dequantisation kernels are used here.
"""

from __future__ import annotations

import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from engine.errors import UnsupportedModel

_SCALARS = {
    0: "<B",
    1: "<b",
    2: "<H",
    3: "<h",
    4: "<I",
    5: "<i",
    6: "<f",
    7: "<?",
    10: "<Q",
    11: "<q",
    12: "<d",
}
_STRING, _ARRAY = 8, 9
# The largest real headers have a few ten MB, and a million items in all their arrays.
HEADER_BYTES = 100 << 20
_MAX_ITEMS = 1 << 23
_MAX_KEYS = 1 << 16
_MAX_TENSORS = 1 << 20
_MAX_DIMS = 8


class TensorInfo(NamedTuple):
    """Where a tensor lies; `shape` is row-major (output, input), as numpy and torch have it."""

    shape: tuple[int, ...]
    ggml_type: int
    offset: int


class GgufFile:
    """Metadata and tensors of one GGUF file. Raises UnsupportedModel on a malformed header."""

    def __init__(self, path: Path) -> None:
        self._at = 0
        self._items = 0
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        try:
            with path.open("rb") as file:
                self._map = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._read_header()
        except (struct.error, KeyError, UnicodeDecodeError, ValueError) as error:
            raise UnsupportedModel(f"{path.name} is not a readable GGUF file: {error}") from error

    def load(self, name: str) -> npt.NDArray[np.float32]:
        """Dequantise one tensor to float32."""
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows, ggml_type = self.raw(name)
        kind = GGMLQuantizationType(ggml_type)
        try:
            values = dequantize(rows, kind).reshape(self.tensors[name].shape)
        except NotImplementedError as error:
            raise UnsupportedModel(f"{name}: {kind.name} cannot be dequantised.") from error
        # float32 comes back as a view of the read-only map, which torch must not share.
        return np.require(values, np.float32, "W")

    def raw(self, name: str) -> tuple[npt.NDArray[np.uint8], int]:
        """A view of the tensor's bytes as stored, rows by bytes, and its GGML type."""
        info = self.tensors[name]
        shape = _stored_shape(name, info)
        return np.frombuffer(self._map, np.uint8, math.prod(shape), info.offset).reshape(shape), info.ggml_type

    def _read_header(self) -> None:
        magic, version = self._bytes(4), self._number("<I")
        if magic != b"GGUF" or version not in (2, 3):
            raise UnsupportedModel(f"Not a GGUF v2 or v3 file (magic {magic!r}, version {version}).")
        num_tensors, num_keys = self._number("<Q"), self._number("<Q")
        if num_tensors > _MAX_TENSORS or num_keys > _MAX_KEYS:
            raise ValueError(
                f"it says that it has {num_tensors:,} tensors and {num_keys:,} keys, where at most {_MAX_TENSORS:,} "
                f"and {_MAX_KEYS:,} are read"
            )
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._number("<I"))
        infos = [self._tensor_info() for _ in range(num_tensors)]
        align = int(self.metadata.get("general.alignment", 32))
        base = -(-self._at // align) * align
        self.tensors = {name: info._replace(offset=base + info.offset) for name, info in infos}
        for name, info in self.tensors.items():
            missing = info.offset + math.prod(_stored_shape(name, info)) - len(self._map)
            if missing > 0:
                raise UnsupportedModel(f"The file ends inside {name}: {missing} bytes of it are missing.")

    def _tensor_info(self) -> tuple[str, TensorInfo]:
        name, dims = self._string(), self._number("<I")
        if dims > _MAX_DIMS:
            raise ValueError(f"{name[:100]} has {dims:,} dimensions")
        shape = tuple(self._number("<Q") for _ in range(dims))[::-1]
        return name, TensorInfo(shape, self._number("<I"), self._number("<Q"))

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind != _ARRAY:
            return self._number(_SCALARS[kind])
        item, count = self._number("<I"), self._number("<Q")
        self._items += count
        if self._items > _MAX_ITEMS:
            raise ValueError(f"its arrays have {self._items:,} items or more, and at most {_MAX_ITEMS:,} are read")
        if item in _SCALARS:
            dtype = np.dtype(_SCALARS[item])
            return np.frombuffer(self._bytes(count * dtype.itemsize), dtype).tolist()
        return [self._value(item) for _ in range(count)]

    def _number(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._map, self._at)
        self._at += struct.calcsize(form)
        return value

    def _string(self) -> str:
        return self._bytes(self._number("<Q")).decode("utf-8")

    def _bytes(self, count: int) -> bytes:
        start, self._at = self._at, self._at + count
        if self._at > len(self._map):
            raise ValueError("the file ends inside its header")
        if self._at > HEADER_BYTES:
            raise ValueError(f"its header has more than {HEADER_BYTES >> 20} MB")
        return self._map[start : self._at]


def _stored_shape(name: str, info: TensorInfo) -> tuple[int, ...]:
    """The shape with the last dimension in bytes, as quantised. Raises UnsupportedModel."""
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    try:
        block, size = GGML_QUANT_SIZES[GGMLQuantizationType(info.ggml_type)]
    except (ValueError, KeyError) as error:
        raise UnsupportedModel(f"{name} has the unknown type {info.ggml_type}.") from error
    if not info.shape or info.shape[-1] % block:
        raise UnsupportedModel(f"{name} has rows of {info.shape[-1:]} values; its type needs multiples of {block}.")
    return (*info.shape[:-1], info.shape[-1] // block * size)
