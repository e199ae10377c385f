"""POST /v1/chat/completions"""

from __future__ import annotations

from serving import schemas
from serving.dialect import Dialect

CHAT = Dialect(
    name="chat",
    path="/v1/chat/completions",
    parse=schemas.chat,
    chat=True,
    id_prefix="chatcmpl-",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
)
