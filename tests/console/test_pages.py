"""Pages as a person gets them: signing in, reading, filtering, writing."""

from __future__ import annotations

import csv
import io
import time
import uuid
from collections.abc import Callable

import pytest
from django.test import Client
from django.urls import reverse

from console.audit.models import AuditEntry
from console.base.models import User
from console.dashboards import overview
from console.keys.models import APIKey
from console.telemetry import queries, trace
from console.telemetry import views as telemetry_views
from console.telemetry.models import RequestRecord
from console.tenants.models import Membership, Tenant
from tests.e2e.world import PASSWORD, World, deliver, forget, settled, uuid7
from tests.e2e.world import world as world


def signed_in(user: User) -> Client:
    client = Client()
    client.force_login(user, backend="django.contrib.auth.backends.ModelBackend")
    return client


# ---- signing in --------------------------------------------------------------------------------------------------


def test_a_person_signs_in_and_out(world: World) -> None:
    client = Client()
    assert client.get("/").headers["Location"] == "/login/?next=/"
    answer = client.post("/login/?next=/requests/", {"username": "olga", "password": PASSWORD, "next": "/requests/"})
    assert (answer.status_code, answer.headers["Location"]) == (302, "/requests/")
    assert client.get("/").status_code == 200
    assert client.post("/logout/").headers["Location"] == "/login/"
    assert client.get("/").status_code == 302


def test_a_wrong_password_tells_nothing_of_the_name(world: World) -> None:
    wrong = [Client().post("/login/", {"username": n, "password": "no"}).content for n in ("olga", "not-there")]
    assert b"do not belong together" in wrong[0]
    strip = [w.replace(n.encode(), b"") for w, n in zip(wrong, ("olga", "not-there"), strict=True)]
    assert len(strip[0]) == pytest.approx(len(strip[1]), abs=200)


def test_signing_in_is_throttled(world: World) -> None:
    client = Client(REMOTE_ADDR="192.0.2.7")
    answers = [client.post("/login/", {"username": "olga", "password": f"wrong {n}"}) for n in range(10)]
    assert answers[-1].status_code == 429
    assert b"Too many wrong passwords" in answers[-1].content
    assert client.post("/login/", {"username": "olga", "password": PASSWORD}).status_code == 429
    assert (
        Client(REMOTE_ADDR="192.0.2.8").post("/login/", {"username": "olga", "password": PASSWORD}).status_code == 302
    )


def test_the_next_page_is_never_elsewhere(world: World) -> None:
    answer = Client().post("/login/", {"username": "olga", "password": PASSWORD, "next": "https://evil.example/"})
    assert answer.headers["Location"] == "/"
    client = signed_in(world.owner)
    answer = client.post("/account/preferences/", {"language": "en", "next": "//evil.example/"})
    assert answer.headers["Location"] == "/"


def test_a_first_password_must_be_changed_before_anything_else(world: World) -> None:
    world.admin.must_change_password = True
    world.admin.save()
    client = signed_in(world.admin)
    for path in ("/", "/requests/", "/admin/", "/playground/", "/keys/", "/requests/export.csv"):
        assert client.get(path).headers["Location"] == reverse("password"), path
    page = client.get(reverse("password"))
    assert b"not known to you alone" in page.content
    form = {"old_password": PASSWORD, "new_password1": PASSWORD, "new_password2": PASSWORD}
    assert b"differs from the old one" in client.post(reverse("password"), form).content
    form |= {"new_password1": "another fine passphrase", "new_password2": "another fine passphrase"}
    assert client.post(reverse("password"), form).status_code == 302
    assert client.get("/").status_code == 200
    assert AuditEntry.objects.filter(action="user.password", actor=world.admin).count() == 1


def test_preferences_are_kept_and_checked(world: World) -> None:
    client = signed_in(world.owner)
    client.post(reverse("preferences"), {"language": "zh-hans", "theme": "dark", "time_zone": "Asia/Shanghai"})
    world.owner.refresh_from_db()
    assert (world.owner.language, world.owner.theme, world.owner.time_zone) == ("zh-hans", "dark", "Asia/Shanghai")
    page = client.get("/").content.decode()
    assert 'lang="zh-hans"' in page and 'data-theme="dark"' in page and "总览" in page and "Asia/Shanghai" in page
    for bad in ({"language": "xx"}, {"theme": "pink"}, {"time_zone": "Mars/Base"}):
        assert client.post(reverse("preferences"), bad).status_code == 422


def test_times_are_shown_in_the_viewers_zone(world: World) -> None:
    (made,) = deliver(settled(world.aurora, world.key))
    client = signed_in(world.owner)
    pages = []
    for zone in ("UTC", "Asia/Kathmandu"):
        User.objects.filter(pk=world.owner.pk).update(time_zone=zone)
        pages.append(client.get(f"/requests/{made}/").content.decode())
    assert "All times UTC" in pages[0] and "All times Asia/Kathmandu" in pages[1]
    row = queries.record(queries.Scope(None), uuid.UUID(made))
    assert row is not None and f"{row.started_at:%H:%M:%S}" in pages[0] and f"{row.started_at:%H:%M:%S}" not in pages[1]


# ---- overview and requests ---------------------------------------------------------------------------------------


def test_an_empty_overview_says_what_to_do(world: World) -> None:
    page = signed_in(world.owner).get("/").content.decode()
    assert "No requests in this time" in page and "curl http" in page and "/v1/chat/completions" in page


def test_the_overview_shows_the_figures(world: World) -> None:
    deliver(*(settled(world.aurora, world.key, world.replica, age=n + 1) for n in range(5)))
    page = signed_in(world.admin).get("/").content.decode()
    for text in (
        "The replica is ready.",
        "100 % of requests",
        "212",
        "Slowest to first token",
        "a real generation of 8 tokens",
    ):
        assert text in page, text


def test_requests_are_listed_filtered_and_paged(world: World) -> None:
    ids = deliver(*(settled(world.aurora, world.key, world.replica, age=n + 1) for n in range(60)))
    client = signed_in(world.owner)
    first = client.get("/requests/").content.decode()
    assert first.count('<td class="lead"><a href="/requests/') == queries.PAGE
    assert f"before={ids[49]}" in first
    second = client.get(f"/requests/?before={ids[49]}").content.decode()
    assert second.count('<td class="lead"><a href="/requests/') == 10
    none = client.get("/requests/", {"q": "status:error"}).content.decode()
    assert "No request matches" in none
    bad = client.get("/requests/", {"q": "ttft>fast"}).content.decode()
    assert "needs a duration" in bad and 'aria-invalid="true"' in bad
    part = client.get("/requests/", headers={"HX-Request": "true"}).content.decode()
    assert "<html" not in part and "Newest first" in part


def test_a_request_page_tells_the_whole_story(world: World) -> None:
    (made,) = deliver(settled(world.aurora, world.key, world.replica))
    page = signed_in(world.owner).get(f"/requests/{made}/").content.decode()
    for text in (
        "Where the time went", "prefill of 32 tokens", "Token timeline", "Why this replica", "the only replica that can take it",  # noqa: E501
        "smollm2 r1", "KV blocks", "5 blocks of 16 tokens", "Copy as curl", "$FANLIGHT_KEY", "Replay in playground", "temperature",  # noqa: E501
        "0af7651916cd43dd8448eb211c80319c", "embedded 0.1.0", "gateway and engine on one monotonic clock", "first_token",  # noqa: E501
    ):  # fmt: skip
        assert text in page, text
    assert world.secrets[0] not in page


def test_a_failed_request_says_what_to_try(world: World) -> None:
    body = {"error": "The prompt has 9113 tokens.", "phases": []}
    (made,) = deliver(
        settled(
            world.aurora,
            world.key,
            outcome="rejected",
            status=400,
            code="context_length_exceeded",
            ttft_us=None,
            body=body,
        )
    )
    page = signed_in(world.owner).get(f"/requests/{made}/").content.decode()
    assert "The prompt has 9113 tokens." in page and "Shorten the prompt" in page and "HTTP 400" in page


def test_hostile_text_in_records_stays_text(world: World) -> None:
    bad = "<script>alert(1)</script>"
    body = {
        "error": bad,
        "params": {bad: bad},
        "events": [("engine", bad, 5, {bad: bad})],
        "phases": [(bad, 0, 5, {})],
        "decision": {"reason": bad},
    }
    (made,) = deliver(settled(world.aurora, world.key, outcome="error", model=bad, client_request_id=bad, body=body))
    client = signed_in(world.admin)
    for path in (f"/requests/{made}/", "/requests/", "/", f"/requests/?q={bad}"):
        assert bad not in client.get(path).content.decode(), path


def test_a_fresh_id_waits_and_an_old_one_is_not_found(world: World) -> None:
    client = signed_in(world.owner)
    fresh = client.get(f"/requests/{uuid7(time.time() - 3)}/")
    assert fresh.status_code == 200 and b"not delivered yet" in fresh.content
    for missing in (uuid7(time.time() - 86400), uuid7(time.time() + 86400), str(uuid.uuid4())):
        assert client.get(f"/requests/{missing}/").status_code == 404


def test_the_search_box_leads_to_a_request_or_a_filter(world: World) -> None:
    client = signed_in(world.owner)
    made = uuid7(time.time())
    assert client.get("/search/", {"q": f" {made} "}).headers["Location"] == f"/requests/{made}/"
    assert client.get("/search/", {"q": "ttft>1s"}).headers["Location"] == "/requests/?q=ttft%3E1s&range=24h"


def test_the_export_is_csv_scoped_and_safe_to_open(world: World) -> None:
    deliver(
        settled(world.aurora, world.key, world.replica, client_request_id='=HYPERLINK("x")'),
        settled(world.borealis, world.foreign_key),
    )
    User.objects.filter(pk=world.owner.pk).update(time_zone="Asia/Kathmandu")
    answer = signed_in(world.owner).get("/requests/export.csv")
    rows = list(csv.DictReader(io.StringIO(b"".join(answer.streaming_content).decode())))
    assert len(rows) == 1
    assert rows[0]["started_at"].endswith("+05:45")
    assert (rows[0]["tenant"], rows[0]["key"], rows[0]["replica"]) == ("aurora", "helpdesk-prod", "smollm2 r1")
    assert rows[0]["client_request_id"] == '\'=HYPERLINK("x")'
    assert signed_in(world.owner).get("/requests/export.csv?q=foo:1").status_code == 400


def test_a_query_that_takes_too_long_is_told_as_such(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_args: object, **_more: object) -> None:
        raise queries.TooSlow

    monkeypatch.setattr(queries, "page", slow)
    monkeypatch.setattr(overview, "take", slow)
    client = signed_in(world.owner)
    for path in ("/requests/", "/"):
        answer = client.get(path)
        assert answer.status_code == 503 and b"shorter time range" in answer.content


# ---- keys, tenants, audit ----------------------------------------------------------------------------------------


def test_a_key_is_shown_once(world: World) -> None:
    client = signed_in(world.owner)
    answer = client.post("/keys/aurora/create/", {"name": "ci", "allowed_models": ["smollm2"], "expires_at": ""})
    page = answer.content.decode()
    secret = page.split('id="thekey">')[1].split("<")[0]
    assert secret.startswith("fl-") and answer.headers["Cache-Control"].find("no-store") >= 0
    made = APIKey.objects.get(name="ci")
    assert made.allowed_models == ["smollm2"] and made.created_by == world.owner
    assert secret not in client.get("/keys/").content.decode()
    assert AuditEntry.objects.get(action="key.create", target_id=str(made.id)).actor == world.owner
    late = client.post("/keys/aurora/create/", {"name": "x", "expires_at": "2020-01-01T00:00"})
    assert late.status_code == 422 and b"lies in the past" in late.content


def test_a_key_is_revoked(world: World) -> None:
    answer = signed_in(world.owner).post(f"/keys/{world.key.id}/revoke/")
    assert answer.headers["Location"] == "/keys/?tenant=aurora"
    world.key.refresh_from_db()
    assert world.key.status == "revoked"


@pytest.mark.parametrize("who", ["member", "viewer"])
def test_only_owners_and_admins_write_keys(world: World, who: str) -> None:
    client = signed_in(getattr(world, who))
    assert "Create a key" not in client.get("/keys/").content.decode()
    assert client.post("/keys/aurora/create/", {"name": "x"}).status_code == 403
    client.post(f"/keys/{world.key.id}/revoke/")
    world.key.refresh_from_db()
    assert world.key.status == "active"
    assert not APIKey.objects.filter(name="x").exists()


def test_usage_by_key_comes_from_the_ledger(world: World) -> None:
    deliver(
        *(
            settled(world.aurora, world.key, prompt_tokens=1000, cached_tokens=250, completion_tokens=7, age=n + 1)
            for n in range(3)
        )
    )
    page = signed_in(world.owner).get("/keys/").content.decode()
    assert '<td class="num" data-k="Requests">3</td>' in page and "3,000" in page and "25" in page


def test_admins_make_tenants_and_members(world: World) -> None:
    client = signed_in(world.admin)
    assert client.post("/tenants/create/", {"name": "Bad Name"}, follow=True).status_code == 200
    assert not Tenant.objects.filter(name="Bad Name").exists()
    client.post("/tenants/create/", {"name": "cobalt", "display_name": "Cobalt"})
    client.post("/tenants/cobalt/members/", {"username": "nemo", "role": "owner"})
    assert Membership.objects.get(tenant__name="cobalt", user=world.nobody).role == "owner"
    answer = client.post("/tenants/cobalt/members/", {"username": "nobody-here", "role": "owner"}, follow=True)
    assert b"There is no account called" in answer.content
    assert {"tenant.create", "tenant.member"} <= set(AuditEntry.objects.values_list("action", flat=True))


def test_the_audit_log_pages_filters_and_hides(world: World) -> None:
    admin = signed_in(world.admin).get("/audit/").content.decode()
    assert "borealis-key" in admin and "192.0.2.1" in admin
    owner = signed_in(world.owner).get("/audit/").content.decode()
    assert "helpdesk-prod" in owner and "borealis" not in owner and "deployment.create" not in owner
    assert "key.create" not in signed_in(world.member).get("/audit/").content.decode()
    only = signed_in(world.admin).get("/audit/", {"action": "route."}).content.decode()
    assert "route.create" in only and "key.create" not in only


def test_paths_of_the_machine_are_for_admins(world: World) -> None:
    deliver(settled(world.aurora, world.key, world.replica))
    for user in (world.owner, world.stranger):
        client = signed_in(user)
        for path in ("/", "/models/", "/playground/", "/docs/"):
            page = client.get(path).content.decode()
            assert "secret-path" not in page and "4242" not in page, path
    assert "secret-path" in signed_in(world.admin).get("/models/").content.decode()


def test_djangos_admin_only_reads(world: World) -> None:
    client = signed_in(world.admin)
    for path in (
        "tenants/tenant",
        "keys/apikey",
        "base/user",
        "fleet/replica",
        "billing/usagerecord",
        "audit/auditentry",
        "catalog/model",
    ):
        assert client.get(f"/admin/{path}/").status_code == 200, path
        assert client.get(f"/admin/{path}/add/").status_code == 403, path
    change = f"/admin/tenants/tenant/{world.aurora.id}/change/"
    assert client.get(change).status_code == 200
    assert client.post(change, {"name": "stolen"}).status_code == 403
    assert client.post(f"/admin/tenants/tenant/{world.aurora.id}/delete/", {"post": "yes"}).status_code == 403
    assert client.post(
        "/admin/keys/apikey/", {"action": "delete_selected", "_selected_action": [str(world.key.id)]}
    ).status_code in {302, 403, 200}
    assert APIKey.objects.filter(pk=world.key.pk).exists()
    key_page = client.get(f"/admin/keys/apikey/{world.key.id}/change/").content.decode()
    assert world.key.digest and world.key.digest not in key_page
    assert (
        "pbkdf2" not in (user_page := client.get(f"/admin/base/user/{world.owner.id}/change/").content.decode())
        and "md5$" not in user_page
    )
    owner = signed_in(world.owner)
    turned_away = owner.get("/admin/", follow=True)
    assert turned_away.status_code == 403, turned_away.redirect_chain
    assert b"This is not yours to open" in turned_away.content
    assert Client().get("/admin/login/?next=/admin/").headers["Location"] == "/login/?next=/admin/"


# ---- the house ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("path", "bound"),
    [
        ("/", 15),
        ("/requests/", 13),
        ("/keys/", 12),
        ("/models/", 8),
        ("/deployments/", 9),
        ("/audit/", 4),
        ("/tenants/", 6),
        ("/playground/", 9),
    ],
)
def test_lists_cost_the_same_queries_however_long(
    world: World, path: str, bound: int, django_assert_num_queries: Callable[..., object]
) -> None:
    client = signed_in(world.admin)

    def cost() -> int:
        forget()
        from django.db import connection
        from django.test.utils import CaptureQueriesContext

        with CaptureQueriesContext(connection) as captured:
            assert client.get(path).status_code == 200
        return len(captured)

    deliver(settled(world.aurora, world.key, world.replica))
    few = cost()
    for n in range(8):
        tenant = Tenant.objects.create(name=f"more-{n}")
        key = APIKey.objects.create(tenant=tenant, name=f"key {n}", digest=f"{n}")
        APIKey.objects.create(tenant=world.aurora, name=f"own {n}", digest=f"own{n}")
        deliver(settled(tenant, key, world.replica, age=n + 1))
    assert cost() == few
    assert few <= bound


@pytest.mark.parametrize(
    "path",
    [
        "/",
        "/requests/",
        "/playground/",
        "/keys/",
        "/models/",
        "/deployments/",
        "/audit/",
        "/tenants/",
        "/docs/",
        "/account/",
        "/login/",
    ],
)
def test_no_page_needs_an_inline_style_or_script(world: World, path: str) -> None:
    deliver(settled(world.aurora, world.key, world.replica))
    client = Client() if path == "/login/" else signed_in(world.admin)
    answer = client.get(path)
    page = answer.content.decode()
    assert " style=" not in page and "<style" not in page and " onclick=" not in page
    for tag in page.split("<script")[1:]:
        assert 'src="' in tag.split(">")[0] or 'type="application/json"' in tag.split(">")[0]
    assert "script-src 'self'" in answer.headers["Content-Security-Policy"]


def test_errors_are_pages(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    assert b"There is nothing here" in signed_in(world.owner).get("/nope/").content
    assert Client().get("/nope/").status_code == 404
    assert b"not yours to open" in signed_in(world.owner).get("/deployments/").content

    def boom(*_args: object) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(overview, "take", boom)
    client = signed_in(world.owner)
    client.raise_request_exception = False
    answer = client.get("/")
    assert answer.status_code == 500 and b"This page failed" in answer.content and b"boom" not in answer.content


def test_an_admin_makes_an_account_whose_password_is_shown_once_and_takes_it_out_again(world: World) -> None:
    client = signed_in(world.admin)
    made = client.post("/tenants/aurora/members/", {"username": "nina", "role": "member", "create": "1"})
    password = made.context["made"].password
    assert password in made.content.decode()
    assert password not in client.get("/tenants/aurora/").content.decode()
    nina = User.objects.get(username="nina")
    assert nina.check_password(password) and nina.must_change_password
    assert not AuditEntry.objects.filter(details__icontains=password).exists()
    client.post("/tenants/aurora/members/nina/remove/")
    assert not nina.memberships.exists()
    again = client.post("/tenants/aurora/members/", {"username": "NINA", "role": "member", "create": "1"}, follow=True)
    assert "already" in again.content.decode()


def test_a_copied_request_leaves_out_what_only_a_number_was_kept_of() -> None:
    row = RequestRecord(model="m", endpoint="chat", stream=True)
    body = {"params": {"stop": 1, "seed": 7, "logit_bias": 2}}
    for text in (telemetry_views._curl(row, body), telemetry_views._python(row, body)):
        assert "seed" in text
        assert "stop" not in text
        assert "logit_bias" not in text
    assert "stop" not in telemetry_views._replay(row, body)


def test_a_request_of_every_endpoint_can_be_copied_and_stored() -> None:
    from serving.asgi import DIALECTS

    longest = RequestRecord._meta.get_field("endpoint").max_length
    for dialect in DIALECTS.values():
        assert len(dialect.name) <= longest
        row = RequestRecord(model="m", endpoint=dialect.name, stream=False)
        params = {"inputs": 2, "stream": False} if dialect.name == "embeddings" else {"stream": False}
        python = telemetry_views._python(row, {"params": params})
        compile(python, dialect.name, "exec")
        translated = dialect.upstream == "/v1/chat/completions"
        assert (dialect.upstream if translated else dialect.path) in telemetry_views._curl(row, {"params": {}})
        assert "inputs" not in python


def test_what_lies_between_the_engines_first_token_and_ours_is_decode() -> None:
    row = RequestRecord(
        ttft_us=71_759, duration_us=227_658, gateway_us=4_800, queue_us=0, engine_queue_us=862, prefill_us=40_059,
        decode_us=181_935, unattributed_us=0,
    )  # fmt: skip
    for until_first_token in (True, False):
        shares = trace.of_record(row, until_first_token)
        assert sum(share.share for share in shares if share.layer == "none") < 0.001
        assert sum(share.share for share in shares) == pytest.approx(1, abs=0.001)


def test_what_a_replica_lends_is_neither_used_nor_free(world: World) -> None:
    told = {"num_blocks": 100, "free_blocks": 30, "kv_usage": 0.25}
    assert overview.ReplicaNow(world.replica, told).kv_used_blocks == 70  # an engine that does not lend
    assert overview.ReplicaNow(world.replica, told | {"held_blocks": 10}).kv_used_blocks == 10
    assert overview.ReplicaNow(world.replica, {}).kv_used_blocks is None
