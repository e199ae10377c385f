"""What the console's WebSockets share: the Origin check, the check that a person is still signed in, a thread for the
database that nobody else waits for."""

from __future__ import annotations

import asyncio
import contextvars
from collections.abc import Awaitable, Callable, MutableMapping
from concurrent.futures import ThreadPoolExecutor
from importlib import import_module
from typing import Any, ParamSpec, TypeVar
from urllib.parse import urlsplit

from channels.security.websocket import WebsocketDenier
from django.conf import settings
from django.contrib.auth.models import AnonymousUser
from django.db import connections

from console.base.models import User

P = ParamSpec("P")
T = TypeVar("T")
Scope = MutableMapping[str, Any]
App = Callable[..., Awaitable[None]]

SIGNED_OUT = 4401

# asgiref's shared thread serves every other hop of Channels; a query that hangs here must not hold it.
_THREADS = ThreadPoolExecutor(max_workers=4, thread_name_prefix="socket-db")


class SameOrigin:
    """Refuses a handshake whose Origin is not the page's own: host and port, not only the host's name."""

    def __init__(self, app: App) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Any, send: Any) -> None:
        if not same_origin(dict(scope["headers"])):
            await WebsocketDenier()(scope, receive, send)
            return
        await self._app(scope, receive, send)


def same_origin(headers: dict[bytes, bytes]) -> bool:
    """Whether Origin names the host that was asked, or the public URL. No Origin: no browser, refused."""
    origin = urlsplit(headers.get(b"origin", b"").decode("latin-1"))
    if not origin.netloc or origin.scheme not in {"http", "https"}:
        return False
    allowed = {
        headers.get(b"host", b"").decode("latin-1").lower(),
        urlsplit(settings.PUBLIC_URL).netloc.lower(),
    }
    return origin.netloc.lower() in allowed


async def off_loop(call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Run a blocking call on the sockets' own threads. The thread's connection is closed after it."""
    context = contextvars.copy_context()
    return await asyncio.get_running_loop().run_in_executor(_THREADS, lambda: context.run(_closing, call, args, kwargs))


def _closing(call: Callable[..., T], args: Any, kwargs: Any) -> T:
    try:
        return call(*args, **kwargs)
    finally:
        connections.close_all()


def person_of(scope: Scope) -> User | None:
    """Read the person of a socket again: None once they signed out, changed their password or were switched off."""
    user: User | AnonymousUser | None = scope.get("user")
    session = scope.get("session")
    if user is None or not user.is_authenticated or session is None:
        return None
    store = import_module(settings.SESSION_ENGINE).SessionStore(session.session_key)
    if store.get("_auth_user_id") != str(user.pk):
        return None
    fresh = User.objects.filter(pk=user.pk, is_active=True, must_change_password=False).first()
    if fresh is None or store.get("_auth_user_hash") != fresh.get_session_auth_hash():
        return None
    return fresh
