"""POST /v1/chat/completions"""

from __future__ import annotations

from serving.answer import Shape
from serving.dialect import Dialect
from serving.schemas.chat import chat

SHAPE = Shape(
    chat=True,
    id_prefix="chatcmpl-",
    object="chat.completion",
    chunk_object="chat.completion.chunk",
)
CHAT = Dialect(
    name="chat",
    path="/v1/chat/completions",
    parse=chat,
    answer=SHAPE.answer,
    whole=SHAPE.whole,
    chat=True,
)
