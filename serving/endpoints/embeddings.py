"""POST /v1/embeddings"""

from __future__ import annotations

import base64
import struct

import msgspec

from serving.dialect import Dialect, Reply
from serving.endpoints.onepiece import OnePiece
from serving.metering import Usage
from serving.request import Request
from serving.schemas.embeddings import embeddings


class _Item(msgspec.Struct):
    index: int
    embedding: list[float] | str


class _Answer(msgspec.Struct):
    data: msgspec.Raw
    usage: Usage | None = None


_answers = msgspec.json.Decoder(_Answer)
_items = msgspec.json.Decoder(list[_Item])


def whole(body: bytes, request: Request) -> Reply:
    """The engine's vectors under the route's name, in the form that was asked for. Raises ValueError."""
    assert request.ask is not None and request.route is not None
    answer = _answers.decode(body)
    data = _in_form(bytes(answer.data), request.ask.told)
    tokens = (answer.usage.prompt_tokens if answer.usage else None) or 0
    rest = {"model": request.route.name, "usage": {"prompt_tokens": tokens, "total_tokens": tokens}}
    told = b'{"object":"list","data":' + data + b"," + msgspec.json.encode(rest)[1:]
    return Reply(usage=answer.usage, body=told)


def _in_form(data: bytes, form: str) -> bytes:
    """Vectors as they came, unless the engine knows one form only and it is the other one."""
    if not data.startswith(b"["):
        raise ValueError("not a list")
    is_text = b'"embedding":"' in data or b'"embedding": "' in data
    if is_text == (form == "base64"):
        return data
    turned = _base64 if form == "base64" else _floats
    items = [
        {"object": "embedding", "index": item.index, "embedding": turned(item.embedding)}
        for item in _items.decode(data)
    ]
    return msgspec.json.encode(items)


def _base64(vector: list[float] | str) -> str:
    """Little-endian float32, as OpenAI has it."""
    return vector if isinstance(vector, str) else base64.b64encode(struct.pack(f"<{len(vector)}f", *vector)).decode()


def _floats(vector: list[float] | str) -> list[float]:
    if not isinstance(vector, str):
        return vector
    packed = base64.b64decode(vector, validate=True)
    if len(packed) % 4:
        raise ValueError("not a row of float32")
    return list(struct.unpack(f"<{len(packed) // 4}f", packed))


EMBEDDINGS = Dialect(
    name="embeddings",
    path="/v1/embeddings",
    parse=embeddings,
    answer=OnePiece,
    generates=False,
    whole=whole,
)
