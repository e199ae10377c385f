"""Every error the engine raises on purpose.

EngineError
├── ConfigError            a setting cannot work; raised before anything is loaded
├── ModelError
│   ├── UnsupportedModel   the files are readable, but this engine cannot run them
│   ├── UnsafeWeights      pickle or another format that can run code when read
│   └── WrongChecksum      a file is not the one that its SHA-256 belongs to
├── RequestError           the caller must change the request (HTTP 400 unless noted)
│   ├── ContextTooLong     prompt or prompt + max_tokens exceed the model's window
│   ├── UnknownModel       the name is not served here (404)
│   └── TemplateError      the chat template refuses these messages
├── Unauthorized           missing or wrong bearer key (401)
├── DeadlineExceeded       the request's own deadline passed (504)
├── Overloaded             the queue is full or the server drains (503, retry later)
└── EngineFault            a step failed or the step thread died (500)
"""

from __future__ import annotations


class EngineError(Exception):
    """Base of the tree above."""


class ConfigError(EngineError):
    """A setting cannot work."""


class ModelError(EngineError):
    """The model's files cannot be served."""


class UnsupportedModel(ModelError):
    """Readable files of an architecture, tokenizer or tensor type this engine lacks."""


class UnsafeWeights(ModelError):
    """A weight format that can execute code while it is read."""


class WrongChecksum(ModelError):
    """A weight file is damaged, missing, or another than was meant."""


class RequestError(EngineError):
    """The caller must change the request; `param` names the field at fault."""

    status = 400
    code: str | None = None
    type = "invalid_request_error"

    def __init__(self, message: str, param: str | None = None, code: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.param = param
        self.code = code or self.__class__.code


class ContextTooLong(RequestError):
    """Prompt, or prompt + max_tokens, exceed the model's window."""

    code = "context_length_exceeded"


class UnknownModel(RequestError):
    """The model name is not served here."""

    status = 404
    code = "model_not_found"


class TemplateError(RequestError):
    """The chat template raised, took too long, or wrote too much."""


class Unauthorized(RequestError):
    """Missing or wrong bearer key; never repeats the key."""

    status = 401
    code = "invalid_api_key"


class Overloaded(RequestError):
    """No room to queue; `retry_after` is in whole seconds."""

    status = 503
    code = "overloaded"
    type = "server_error"

    def __init__(self, message: str, retry_after: int = 1) -> None:
        super().__init__(message)
        self.retry_after = retry_after


class DeadlineExceeded(RequestError):
    """The answer was not complete when the request's `deadline_ms` were over."""

    status = 504
    code = "deadline_exceeded"
    type = "timeout_error"


class EngineFault(RequestError):
    """The engine failed while it worked on the request."""

    status = 500
    code = "engine_error"
    type = "server_error"
