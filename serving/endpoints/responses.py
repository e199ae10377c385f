"""POST /v1/responses: OpenAI's Responses API, by way of chat completions."""

from __future__ import annotations

from serving.dialect import Dialect
from serving.translate.narrate import narrated
from serving.translate.response import ResponseNarrator
from serving.translate.responses import responses

RESPONSES = Dialect(
    name="responses",
    path="/v1/responses",
    parse=responses,
    answer=narrated(ResponseNarrator),
    upstream="/v1/chat/completions",
)
