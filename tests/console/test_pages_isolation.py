"""Every URL of the console against people who must not see it. A new page that is not listed here fails the test."""

from __future__ import annotations

from typing import Any

import pytest
from django.test import Client
from django.urls import URLPattern, URLResolver, get_resolver, reverse

from console.catalog.models import Model
from console.fleet.models import Route
from console.pricing.models import Price
from tests.console.test_pages import signed_in
from tests.e2e.world import World, deliver, settled
from tests.e2e.world import world as world

PUBLIC = {"login", "preferences", None}  # None: redirects without a name, the admin's login and the icon
POST_ONLY = {
    "key-limits",
    "tenant-limits",
    "tenant-capture",
    "request-content",
    "route-create",
    "route-rules",
    "route-target",
    "route-price",
    "cards-cordon",
    "deployment-scale",
    "deployment-rollback",
    "deployment-remove",
    "key-create",
    "key-revoke",
    "model-register",
    "model-retry",
    "model-convert",
    "model-remove",
    "runtime-add",
    "runtime-remove",
    "tenant-create",
    "tenant-member",
    "tenant-remove-member",
    "preferences",
    "logout",
}
NO_ID = "00000000-0000-7000-8000-000000000000"
ADMINS = {
    "cards",
    "cards-what-if",
    "deployments",
    "deployment",
    "deployment-new",
    "deployment-plan",
    "deployment-edit",
    "deployment-log",
    "routes",
    "route",
    "tenants",
    "tenant",
    "tenant-create",
    "tenant-member",
    "tenant-remove-member",
}
API = {
    "api-devices",
    "api-models",
    "api-model",
    "api-model-retry",
    "api-model-convert",
    "api-runtimes",
    "api-runtime",
    "api-placement-plan",
    "api-routes",
    "api-route",
    "api-prices",
    "api-tenant-limits",
    "api-key-limits",
    "api-deployments",
    "api-deployment",
    "api-deployment-scale",
    "api-deployment-rollback",
}


def arguments(world: World, request_id: str) -> dict[str, dict[str, Any]]:
    """What each URL needs, pointing at the other tenant's things. Every named URL stands here."""
    return {
        "overview": {}, "requests": {}, "requests-export": {}, "request": {"request_id": request_id}, "search": {},
        "playground": {}, "models": {}, "deployments": {}, "keys": {}, "key-create": {"tenant": "borealis"},
        "key-revoke": {"key_id": world.foreign_key.id}, "tenants": {}, "tenant-create": {}, "tenant": {"name": "borealis"},  # noqa: E501
        "tenant-member": {"name": "borealis"},
        "tenant-remove-member": {"name": "borealis", "username": world.stranger.username}, "audit": {}, "docs": {}, "account": {}, "preferences": {}, "password": {},  # noqa: E501
        "login": {}, "logout": {},
        "key": {"key_id": world.foreign_key.id}, "key-limits": {"key_id": world.foreign_key.id},
        "tenant-limits": {"name": "borealis"}, "tenant-capture": {"name": "borealis"},
        "request-content": {"request_id": request_id}, "routes": {}, "route-create": {},
        **{name: {"route_id": Route.objects.get().id} for name in ("route", "route-rules", "route-target", "route-price", "api-route")},  # noqa: E501
        "cards": {}, "cards-what-if": {}, "cards-cordon": {}, "api-devices": {}, "api-placement-plan": {},
        "deployment-new": {}, "deployment-plan": {},
        **{name: {"deployment_id": world.deployment.id} for name in ("deployment", "deployment-edit", "deployment-log", "deployment-scale", "deployment-rollback", "deployment-remove")},  # noqa: E501
        **{name: {"deployment_id": world.deployment.id} for name in ("api-deployment", "api-deployment-scale", "api-deployment-rollback")},  # noqa: E501
        "model-register": {}, "runtime-add": {}, "api-models": {}, "api-runtimes": {},
        **{name: {"model_id": Model.objects.get().id} for name in ("model-retry", "model-convert", "model-remove", "api-model", "api-model-retry", "api-model-convert")},  # noqa: E501
        **{name: {"runtime_id": NO_ID} for name in ("runtime-remove", "api-runtime")},
        "api-deployments": {}, "api-routes": {}, "api-prices": {},
        "api-tenant-limits": {"tenant_id": world.borealis.id}, "api-key-limits": {"key_id": world.foreign_key.id},
    }  # fmt: skip


def console_names() -> set[str | None]:
    found: set[str | None] = set()
    for pattern in get_resolver().url_patterns:
        if isinstance(pattern, URLPattern):
            found.add(pattern.name)
        else:
            assert isinstance(pattern, URLResolver) and str(pattern.pattern) == "admin/"
    return found


def test_every_page_is_listed(world: World) -> None:
    assert console_names() - {None} == set(arguments(world, NO_ID))


def urls(world: World, request_id: str) -> dict[str, str]:
    return {name: reverse(name, kwargs=kwargs) for name, kwargs in arguments(world, request_id).items()}


def test_without_signing_in_there_is_only_the_door(world: World) -> None:
    (theirs,) = deliver(settled(world.borealis, world.foreign_key))
    for name, url in urls(world, theirs).items():
        method = Client().post if name in POST_ONLY else Client().get
        answer = method(url)
        if name in PUBLIC:
            continue
        if name in API:
            assert answer.status_code == 401 and answer.json()["error"]["message"], name
            continue
        assert answer.status_code == 302 and answer.headers["Location"].startswith("/login/"), name
    for path in ("/admin/", "/admin/base/user/", f"/admin/keys/apikey/{world.key.id}/change/"):
        assert Client().get(path).status_code == 302


@pytest.mark.parametrize("who", ["owner", "viewer", "nobody"])
def test_others_see_nothing_of_a_tenant(world: World, who: str) -> None:
    (theirs,) = deliver(
        settled(
            world.borealis, world.foreign_key, world.replica, code="borealis_code", client_request_id="borealis-client"
        )
    )
    if who != "nobody":
        deliver(settled(world.aurora, world.key, world.replica))
    client = signed_in(getattr(world, who))
    traces = [
        "borealis",
        "Borealis",
        theirs,
        str(world.foreign_key.id),
        str(world.borealis.id),
        world.foreign_key.display[-4:] + "</span>",
    ]
    for name, url in urls(world, theirs).items():
        if name in POST_ONLY:
            continue
        for query in ("", "?range=7d", f"?q={theirs}&range=24h", f"?tenant=borealis&q=tenant:{world.borealis.id}"):
            answer = client.get(url + query)
            if name in ADMINS:
                assert answer.status_code == 403, name
            if name in API:
                assert answer.status_code in {403, 404, 405}, name
            if name in {"request", "key"} or (name == "keys" and "tenant=borealis" in query and who != "nobody"):
                assert answer.status_code == 404, url + query
            content = b"".join(answer.streaming_content) if answer.streaming else answer.content
            text = content.decode()
            for trace in traces:
                if trace in query or trace in url:  # what was typed may be repeated
                    continue
                assert trace not in text.replace(query.replace("&", "&amp;"), "").replace(url, ""), (name, query, trace)


@pytest.mark.parametrize("who", ["owner", "viewer", "nobody"])
def test_others_change_nothing_of_a_tenant(world: World, who: str) -> None:
    client = signed_in(getattr(world, who))
    for name in sorted(POST_ONLY - {"preferences", "logout"}):
        answer = client.post(
            urls(world, NO_ID)[name], {"name": "x", "username": "olga", "role": "owner", "create": "1"}
        )
        assert answer.status_code in {403, 404}, name
    for name in sorted(API):
        body = {"concurrency": 1, "name": "x", "model": "smollm2"}
        answer = client.post(urls(world, NO_ID)[name], body, content_type="application/json")
        assert answer.status_code in {403, 404, 405}, name
    world.foreign_key.refresh_from_db()
    assert world.foreign_key.concurrency is None
    assert not Price.objects.exists() and Route.objects.count() == 1
    assert world.foreign_key.status == "active"
    assert world.borealis.membership_set.count() == 1


def test_the_stranger_sees_their_own(world: World) -> None:
    mine, theirs = deliver(settled(world.borealis, world.foreign_key), settled(world.aurora, world.key))
    client = signed_in(world.stranger)
    assert client.get(f"/requests/{mine}/").status_code == 200
    assert client.get(f"/requests/{theirs}/").status_code == 404
    listed = client.get("/requests/").content.decode()
    assert mine in listed and theirs not in listed


def test_writes_need_post_and_a_token(world: World) -> None:
    client = Client(enforce_csrf_checks=True)
    client.force_login(world.admin, backend="django.contrib.auth.backends.ModelBackend")
    for name, url in urls(world, NO_ID).items():
        if name in POST_ONLY:
            assert client.get(url).status_code == 405, name
            assert client.post(url, {"name": "x"}).status_code == 403, name
        if name in API:
            refused = client.post(url, {"name": "x"}, content_type="application/json")
            assert refused.status_code == 403 and "CSRF" in refused.json()["error"]["message"], name
    assert client.post("/login/", {"username": "olga", "password": "x"}).status_code == 403
    assert client.post("/account/password/", {}).status_code == 403
