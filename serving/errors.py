"""Every way a request can be refused or broken, and the one place that says how each is told.

GatewayError
├── BadRequest            400  what was sent is wrong; `param` names the field
├── Unauthenticated       401  no key, or one that is malformed, unknown, expired or revoked
├── Forbidden             403  a known key that may not do this
├── NotFound              404  an unknown path or model
├── MethodNotAllowed      405
├── RequestTimeout        408  the body did not arrive in time
├── TooLarge              413
├── UnsupportedMedia      415
├── RateLimited           429  a limit of the key or its tenant, named
├── Unavailable           503  cannot be served right now; always with Retry-After
│   └── EngineBusy             … the engine's own 503, after every replica that could be asked
├── EngineRefused         4xx  the engine's own answer, passed on
├── UpstreamFailed        502  the engine or the way to it failed
│   ├── TransportFault         … before it could say why
│   └── ShuttingDown      503  the gateway's own stop cut it
├── DeadlineExceeded      504  a deadline of the route cut it
├── SlowReader            500  the client does not read (never seen by it)
├── ClientLeft            499  nobody is there to be told
└── Internal              500  a bug of ours
"""

from __future__ import annotations

from collections.abc import Sequence

import msgspec

from serving import apikey
from serving.port import Outcome

Header = tuple[bytes, bytes]

MAX_MESSAGE = 2000
MAX_PARAM = 256
NO_RETRY: Header = (b"x-should-retry", b"false")


class GatewayError(Exception):
    """Carries what the client is told (`envelope`) and what the record says (`outcome`)."""

    status = 500
    type = "server_error"
    code: str = "internal_error"
    outcome = Outcome.REJECTED

    def __init__(
        self,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        retry_after: int | None = None,
        headers: Sequence[Header] = (),
    ) -> None:
        # these quote what callers and engines sent, of any length and with keys pasted anywhere
        self.message = apikey.hidden(message)[:MAX_MESSAGE]
        super().__init__(self.message)
        self.param = apikey.hidden(param)[:MAX_PARAM] if param is not None else None
        self.code = code or self.code
        self.headers = list(headers)
        if retry_after is not None:
            self.headers.append((b"retry-after", b"%d" % min(max(retry_after, 1), 60)))

    def envelope(self) -> bytes:
        """OpenAI's error body."""
        error = {
            "message": self.message,
            "type": self.type,
            "param": self.param,
            "code": self.code,
        }
        return msgspec.json.encode({"error": error})

    def event(self) -> bytes:
        """The same after a 200 has been sent: the last event of the stream."""
        return b"data: " + self.envelope() + b"\n\n"


class BadRequest(GatewayError):
    status = 400
    type = "invalid_request_error"
    code = "invalid_request"


class Unauthenticated(GatewayError):
    """Clients see one code whatever is wrong; `reason` (missing, malformed, unknown, …) is for the metrics."""

    status = 401
    type = "invalid_request_error"
    code = "invalid_api_key"

    def __init__(self, message: str, *, reason: str, code: str | None = None) -> None:
        super().__init__(message, code=code, headers=[(b"www-authenticate", b"Bearer")])
        self.reason = reason


class Forbidden(GatewayError):
    status = 403
    type = "permission_error"
    code = "permission_denied"


class NotFound(GatewayError):
    status = 404
    type = "invalid_request_error"
    code = "not_found"


class MethodNotAllowed(GatewayError):
    status = 405
    type = "invalid_request_error"
    code = "method_not_allowed"


class RequestTimeout(GatewayError):
    status = 408
    type = "invalid_request_error"
    code = "request_timeout"


class TooLarge(GatewayError):
    status = 413
    type = "invalid_request_error"
    code = "request_too_large"

    def __init__(self, limit_bytes: int) -> None:
        super().__init__(f"The body is larger than {limit_bytes} bytes.")


class UnsupportedMedia(GatewayError):
    status = 415
    type = "invalid_request_error"
    code = "unsupported_media_type"


class Unavailable(GatewayError):
    """Not now. The reason is the code; `retry_after` is whole seconds, 1 to 60."""

    status = 503
    type = "service_unavailable"
    code = "service_unavailable"

    def __init__(self, message: str, *, code: str, retry_after: int = 5) -> None:
        super().__init__(message, code=code, retry_after=retry_after)


class EngineBusy(Unavailable):
    """The engine's own 503: back-pressure, which another replica may not have. Never a fault of the replica."""

    code = "engine_overloaded"


class RateLimited(GatewayError):
    """A limit of the key or its tenant; the message names it."""

    status = 429
    type = "rate_limit_error"
    code = "rate_limit_exceeded"


class EngineRefused(GatewayError):
    """The engine looked at the request and said no: its status and words, in our envelope."""

    type = "invalid_request_error"
    code = "invalid_request"

    def __init__(
        self,
        status: int,
        message: str,
        *,
        type: str | None = None,
        code: str | None = None,
        param: str | None = None,
    ) -> None:
        super().__init__(message, param=param, code=code)
        self.status = status
        self.type = type or self.type


class UpstreamFailed(GatewayError):
    status = 502
    code = "engine_error"
    outcome = Outcome.ERROR
    answered = 0  # the engine's own status, where it gave one


class TransportFault(UpstreamFailed):
    """The way to the worker broke. A replacement is seconds away, so the client is told when to come back."""

    code = "engine_unreachable"

    def __init__(self, message: str) -> None:
        super().__init__(message, retry_after=5)


class ShuttingDown(UpstreamFailed):
    """The gateway's own stop cut a request that outlived the drain."""

    status = 503
    type = "service_unavailable"
    code = "server_shutting_down"

    def __init__(self, message: str = "The gateway shut down while this request was running.") -> None:
        super().__init__(message, retry_after=1)


class DeadlineExceeded(GatewayError):
    """Trying again would only run into the same deadline, so clients are told not to."""

    status = 504
    type = "timeout_error"
    code = "deadline_exceeded"
    outcome = Outcome.TIMEOUT

    def __init__(self, message: str) -> None:
        super().__init__(message, headers=[NO_RETRY])


class SlowReader(GatewayError):
    code = "slow_reader"
    outcome = Outcome.SLOW_READER


class ClientLeft(GatewayError):
    status = 499
    type = "client_closed_request"
    code = "client_closed_request"
    outcome = Outcome.CANCELLED

    def __init__(self, message: str = "the client closed the connection") -> None:
        super().__init__(message)


class Internal(GatewayError):
    outcome = Outcome.ERROR

    def __init__(self) -> None:
        super().__init__("The gateway failed to handle this request; its operators can find it by x-request-id.")
