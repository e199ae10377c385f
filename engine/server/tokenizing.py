"""POST /tokenize and /detokenize, by the wire that vLLM has defined: no model runs, and nothing is queued."""

from __future__ import annotations

import asyncio
from typing import Any

from engine.errors import RequestError, UnknownModel
from engine.server import form
from engine.server.embedding import SHARED
from engine.server.http import Exchange
from engine.server.schema import CHAT, COMMON, Check, flag, read_fields, token_ids
from engine.server.service import Service

_OF_BOTH: dict[str, Check] = {name: COMMON[name] for name in SHARED}
TOKENIZE: dict[str, Check] = _OF_BOTH | {
    "prompt": COMMON["model"],
    "messages": CHAT["messages"],
    "tools": CHAT["tools"],
    "add_special_tokens": flag,
    "add_generation_prompt": flag,
    "return_token_strs": flag,
}
DETOKENIZE: dict[str, Check] = _OF_BOTH | {"tokens": token_ids}


async def tokenize(service: Service, exchange: Exchange) -> None:
    """Answer with the ids of a prompt, or of a chat as the model would be given it. Raises RequestError."""
    fields = read_fields(await exchange.body(), TOKENIZE, ("model",))
    _check_model(service, fields)
    if ("prompt" in fields) == ("messages" in fields):
        raise RequestError("Either 'prompt' or 'messages' is required.", "prompt")
    if not fields.get("add_generation_prompt", True):
        raise RequestError("This engine always adds the generation prompt.", "add_generation_prompt")
    exchange.request_id = fields.get("request_id", exchange.request_id)
    ids = await asyncio.get_running_loop().run_in_executor(None, _ids, service, fields)
    told: dict[str, Any] = {"count": len(ids), "max_model_len": service.max_model_len, "tokens": ids}
    if fields.get("return_token_strs"):
        told["token_strs"] = [service.tokenizer.token_text(id) for id in ids]
    await exchange.json(told)


async def detokenize(service: Service, exchange: Exchange) -> None:
    """Answer with the text of ids, special tokens by their names. Raises RequestError."""
    fields = read_fields(await exchange.body(), DETOKENIZE, ("model", "tokens"))
    _check_model(service, fields)
    ids = fields["tokens"]
    if ids and max(ids) >= service.vocab_size:
        raise RequestError(f"Invalid 'tokens': an id is beyond {service.vocab_size - 1}.", "tokens")
    exchange.request_id = fields.get("request_id", exchange.request_id)
    loop, decode = asyncio.get_running_loop(), service.tokenizer.decode
    await exchange.json({"prompt": await loop.run_in_executor(None, lambda: decode(ids, special=True))})


def _check_model(service: Service, fields: dict[str, Any]) -> None:
    if fields["model"] != service.config.name:
        raise UnknownModel(f"The model '{fields['model']}' does not exist.", "model")


def _ids(service: Service, fields: dict[str, Any]) -> list[int]:
    tokenizer = service.tokenizer
    if "prompt" in fields:
        return tokenizer.encode(fields["prompt"], bos=fields.get("add_special_tokens", True))
    use = form.tools_of(fields)
    return tokenizer.encode_chat(fields["messages"], use.definitions if use else [])
