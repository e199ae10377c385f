"""POST /v1/completions"""

from __future__ import annotations

from serving.answer import Shape
from serving.dialect import Dialect
from serving.schemas.completions import completion

SHAPE = Shape(
    chat=False,
    id_prefix="cmpl-",
    object="text_completion",
    chunk_object="text_completion",
)
COMPLETIONS = Dialect(
    name="completions",
    path="/v1/completions",
    parse=completion,
    answer=SHAPE.answer,
    whole=SHAPE.whole,
    chat=False,
)
