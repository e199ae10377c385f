"""The library's C interface in ctypes; abi.h is its other half and says what each field holds."""

from __future__ import annotations

import ctypes as c
from pathlib import Path

import numpy as np

Pointer = c.c_void_p
PARTS = ("linear", "attention", "rows", "head", "total")
"""Names of what `fl_wait` measures, in its order."""


class Matrix(c.Structure):
    """FlMatrix."""

    _fields_ = [
        ("data", Pointer),
        ("sum", Pointer),
        ("scale", Pointer),
        ("four", Pointer),
        ("n", c.c_int32),
        ("k", c.c_int32),
    ]


class Layer(c.Structure):
    """FlLayer."""

    _fields_ = [
        *((name, Matrix) for name in ("qkv", "out", "gate_up", "down")),
        *((name, Pointer) for name in ("attn_norm", "mlp_norm", "qkv_bias", "qk_norm")),
    ]


class Model(c.Structure):
    """FlModel."""

    _fields_ = [
        *(
            (name, c.c_int32)
            for name in ("hidden", "intermediate", "layers", "heads", "kv_heads", "head_dim", "vocab")
            + ("num_blocks", "block_size", "max_tokens", "threads")
        ),
        ("rms_eps", c.c_float),
        *((name, Pointer) for name in ("embedding", "norm", "cos", "sin", "layer")),
        ("head", Matrix),
        ("cache", Pointer),
    ]


DRAW = np.dtype([("uniform", "f8"), ("temperature", "f4"), ("top_p", "f4"), ("min_p", "f4"), ("top_k", "i4")])
"""FlDraw."""


class Step(c.Structure):
    """FlStep."""

    _fields_ = [
        ("chunks", c.c_int32),
        ("samples", c.c_int32),
        *(
            (name, Pointer)
            for name in (
                "tokens",
                "start",
                "count",
                "table",
                "blocks",
                "last",
                "draw",
                "token",
                "logits",
                "hidden",
                "masks",
            )
        ),
        ("masked", c.c_int32),
    ]


def open_library(path: Path) -> c.CDLL:
    """Load a built library and declare its functions. Raises OSError."""
    library = c.CDLL(str(path))
    library.fl_create.restype = Pointer
    library.fl_create.argtypes = [c.POINTER(Model)]
    library.fl_destroy.restype = None
    library.fl_destroy.argtypes = [Pointer]
    library.fl_start.restype = None
    library.fl_start.argtypes = [Pointer, c.POINTER(Step)]
    library.fl_wait.restype = None
    library.fl_wait.argtypes = [Pointer, c.POINTER(c.c_double)]
    library.fl_target.restype = c.c_char_p
    library.fl_target.argtypes = []
    return library
