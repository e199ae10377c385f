"""The body of POST /v1/embeddings."""

from __future__ import annotations

from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from serving.errors import BadRequest
from serving.schemas.ask import Ask, bound
from serving.schemas.completions import prompt_sizes
from serving.schemas.decode import decode
from serving.schemas.sampling import EndUser, ModelName, TokenId, picked

MAX_INPUTS = 2048


class EmbeddingsBody(msgspec.Struct, forbid_unknown_fields=True, kw_only=True):
    model: ModelName
    input: str | Annotated[list[str | TokenId | list[TokenId]], Meta(min_length=1)]
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, lt=2**31)] | None = None
    user: EndUser | None = None


_FORWARDED = ("encoding_format", "dimensions")
_decoder = msgspec.json.Decoder(EmbeddingsBody)


def embeddings(raw: bytes) -> Ask:
    """Read a request for embeddings; raises BadRequest naming the field. `told` is the form of the vectors."""
    body = decode(_decoder, raw)
    inputs, longest, most = prompt_sizes(body.input, "input")
    if inputs > MAX_INPUTS:
        raise BadRequest(f"`input` takes at most {MAX_INPUTS} inputs at once; these are {inputs}.", param="input")
    params = picked(body, _FORWARDED)
    return Ask(
        model=body.model,
        stream=False,
        include_usage=False,
        upstream={**params, "input": body.input},
        params={**params, "inputs": inputs},
        max_tokens=0,
        prompt_estimate=longest,
        prompt_bound=bound(most, inputs),
        user=body.user,
        told=body.encoding_format or "float",
    )
