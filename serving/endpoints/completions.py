"""POST /v1/completions"""

from __future__ import annotations

from serving import schemas
from serving.dialect import Dialect

COMPLETIONS = Dialect(
    name="completions",
    path="/v1/completions",
    parse=schemas.completion,
    chat=False,
    id_prefix="cmpl-",
    object="text_completion",
    chunk_object="text_completion",
)
