"""Every page of the console."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.views import LogoutView
from django.urls import path
from django.views.generic import RedirectView

from console.audit.views import audit
from console.base import views as base
from console.catalog.views import models
from console.dashboards.views import overview
from console.fleet.views import deployments
from console.keys import views as keys
from console.playground.views import playground
from console.telemetry import views as telemetry
from console.tenants import views as tenants

urlpatterns = [
    path("favicon.ico", login_not_required(RedirectView.as_view(url="/static/img/mark.svg"))),
    path("", overview, name="overview"),
    path("requests/", telemetry.requests, name="requests"),
    path("requests/export.csv", telemetry.export, name="requests-export"),
    path("requests/<uuid:request_id>/", telemetry.request_detail, name="request"),
    path("search/", base.search, name="search"),
    path("playground/", playground, name="playground"),
    path("models/", models, name="models"),
    path("deployments/", deployments, name="deployments"),
    path("keys/", keys.keys, name="keys"),
    path("keys/<str:tenant>/create/", keys.create, name="key-create"),
    path("keys/<uuid:key_id>/revoke/", keys.revoke, name="key-revoke"),
    path("tenants/", tenants.tenants, name="tenants"),
    path("tenants/create/", tenants.create, name="tenant-create"),
    path("tenants/<str:name>/", tenants.tenant, name="tenant"),
    path("tenants/<str:name>/members/", tenants.add_member, name="tenant-member"),
    path("tenants/<str:name>/members/<str:username>/remove/", tenants.remove_member, name="tenant-remove-member"),
    path("audit/", audit, name="audit"),
    path("docs/", base.docs, name="docs"),
    path("account/", base.account, name="account"),
    path("account/preferences/", base.preferences, name="preferences"),
    path("account/password/", base.password, name="password"),
    path("login/", base.SignIn.as_view(), name="login"),
    path("logout/", LogoutView.as_view(), name="logout"),
    # One way in: the admin's own login form would know neither the first password's change nor our texts.
    path("admin/login/", base.admin_sign_in),
    path("admin/password_change/", RedirectView.as_view(pattern_name="password")),
    path("admin/", admin.site.urls),
]

handler403 = "console.base.views.forbidden"
handler404 = "console.base.views.not_found"
handler500 = "console.base.views.server_error"
