"""GET /v1/openapi.json: what may be sent where, made from the same types that read it."""

from __future__ import annotations

import functools
from typing import Any

import msgspec

from serving.schemas.chat import ChatBody
from serving.schemas.completions import CompletionBody
from serving.schemas.embeddings import EmbeddingsBody
from serving.schemas.messages import CountBody, MessagesBody
from serving.schemas.responses import Item, ResponsesBody
from serving.schemas.tokenize import DetokenizeBody, TokenizeBody

PATH = "/v1/openapi.json"
_BODIES: dict[str, tuple[type, str]] = {
    "/v1/chat/completions": (ChatBody, "A chat completion, whole or streamed"),
    "/v1/completions": (CompletionBody, "A plain completion, whole or streamed"),
    "/v1/responses": (ResponsesBody, "OpenAI's Responses API, without stored responses"),
    "/v1/messages": (MessagesBody, "Anthropic's Messages API"),
    "/v1/messages/count_tokens": (CountBody, "Tokens of a message, not sent to a model"),
    "/v1/embeddings": (EmbeddingsBody, "Vectors of texts"),
    "/v1/tokenize": (TokenizeBody, "Tokens of a text or a chat"),
    "/v1/detokenize": (DetokenizeBody, "Text of tokens"),
}
_STREAMS = ("/v1/chat/completions", "/v1/completions", "/v1/responses", "/v1/messages")
_REFUSALS = (400, 401, 403, 404, 405, 408, 413, 415, 422, 429, 500, 502, 503, 504)
_JSON = "application/json"


class ErrorDetail(msgspec.Struct):
    message: str
    type: str
    param: str | None
    code: str


class Error(msgspec.Struct):
    """OpenAI's error."""

    error: ErrorDetail


class AnthropicDetail(msgspec.Struct):
    type: str
    message: str


class AnthropicError(msgspec.Struct, tag_field="type", tag="error"):
    """Anthropic's error."""

    error: AnthropicDetail
    request_id: str


@functools.cache
def document(version: str) -> bytes:
    """The OpenAPI 3.1 document, encoded."""
    kinds = [*(kind for kind, _ in _BODIES.values()), Item, Error, AnthropicError]
    schemas, components = msgspec.json.schema_components(kinds, ref_template="#/components/schemas/{name}")
    told = dict(zip(_BODIES, schemas, strict=False))
    components["ResponsesBody"]["properties"]["input"] = _typed_input(schemas[len(_BODIES)])
    paths: dict[str, Any] = {path: {"post": _post(path, told[path])} for path in _BODIES}
    paths["/v1/models"] = {"get": _get("Models that this key may use", [])}
    paths["/v1/models/{model}"] = {"get": _get("One of them", [_model_parameter()])}
    return msgspec.json.encode(
        {
            "openapi": "3.1.0",
            "info": {"title": "Fanlight gateway", "version": version},
            "paths": paths,
            "components": {
                "schemas": components,
                "securitySchemes": {
                    "bearer": {"type": "http", "scheme": "bearer"},
                    "header": {"type": "apiKey", "in": "header", "name": "x-api-key"},
                },
            },
            "security": [{"bearer": []}, {"header": []}],
        }
    )


def _typed_input(item: dict[str, Any]) -> dict[str, Any]:
    """Items may leave out their type where they are messages, so the body keeps them untyped until it is read."""
    easy = {"type": "object", "required": ["role", "content"], "properties": {"role": {"type": "string"}}}
    items = {"type": "array", "minItems": 1, "items": {"anyOf": [item, easy]}}
    return {"anyOf": [{"type": "string"}, items]}


def _post(path: str, body: dict[str, Any]) -> dict[str, Any]:
    content = {_JSON: {"schema": {"type": "object"}}}
    if path in _STREAMS:
        content["text/event-stream"] = {"schema": {"type": "string"}}
    return {
        "summary": _BODIES[path][1],
        "operationId": path.removeprefix("/v1/").replace("/", "_"),
        "requestBody": {"required": True, "content": {_JSON: {"schema": body}}},
        "responses": {"200": {"description": "The answer", "content": content}, **_refusals(path)},
    }


def _get(summary: str, parameters: list[dict[str, Any]]) -> dict[str, Any]:
    answer = {"description": "The answer", "content": {_JSON: {"schema": {"type": "object"}}}}
    return {"summary": summary, "parameters": parameters, "responses": {"200": answer, **_refusals("")}}


def _model_parameter() -> dict[str, Any]:
    return {"name": "model", "in": "path", "required": True, "schema": {"type": "string", "minLength": 1}}


def _refusals(path: str) -> dict[str, Any]:
    name = "AnthropicError" if path.startswith("/v1/messages") else "Error"
    content = {_JSON: {"schema": {"$ref": f"#/components/schemas/{name}"}}}
    return {str(status): {"description": "An error", "content": content} for status in _REFUSALS}
