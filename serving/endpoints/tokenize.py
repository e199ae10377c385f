"""POST /v1/tokenize and /v1/detokenize, as vLLM has them: limited and recorded like the rest, and free of tokens."""

from __future__ import annotations

import msgspec

from serving.dialect import Dialect, Reply
from serving.endpoints.onepiece import OnePiece
from serving.metering import Usage
from serving.request import Request
from serving.schemas.tokenize import detokenize, tokenize


class Tokens(msgspec.Struct, omit_defaults=True):
    """What an engine's tokenizer answers."""

    count: int
    max_model_len: int = 0
    tokens: list[int] = []
    token_strs: list[str] | None = None


class Text(msgspec.Struct):
    prompt: str


read_tokens = msgspec.json.Decoder(Tokens).decode
_read_text = msgspec.json.Decoder(Text).decode
NOTHING_USED = Usage()


def _tokens(body: bytes, _request: Request) -> Reply:
    return Reply(usage=NOTHING_USED, body=msgspec.json.encode(read_tokens(body)))


def _text(body: bytes, _request: Request) -> Reply:
    return Reply(usage=NOTHING_USED, body=msgspec.json.encode(_read_text(body)))


TOKENIZE = Dialect(
    name="tokenize",
    path="/v1/tokenize",
    parse=tokenize,
    answer=OnePiece,
    upstream="/tokenize",
    generates=False,
    whole=_tokens,
)
DETOKENIZE = Dialect(
    name="detokenize",
    path="/v1/detokenize",
    parse=detokenize,
    answer=OnePiece,
    upstream="/detokenize",
    generates=False,
    whole=_text,
)
