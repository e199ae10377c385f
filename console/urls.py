"""Every page of the console."""

from __future__ import annotations

from django.contrib import admin
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.views import LogoutView
from django.urls import path
from django.views.generic import RedirectView

from console.audit.views import audit
from console.base import views as base
from console.base.api import endpoint
from console.catalog import api as catalog_api
from console.catalog import views as catalog
from console.dashboards.views import overview
from console.fleet import api as fleet_api
from console.fleet import deployment_api
from console.fleet import deployment_views as deploy_views
from console.fleet import route_views as routes
from console.fleet.views import deployments
from console.keys import api as keys_api
from console.keys import views as keys
from console.placement import api as placement_api
from console.placement import views as placement
from console.playground.views import playground
from console.pricing import api as pricing_api
from console.telemetry import views as telemetry
from console.tenants import api as tenants_api
from console.tenants import views as tenants

urlpatterns = [
    path("favicon.ico", login_not_required(RedirectView.as_view(url="/static/img/mark.svg"))),
    path("", overview, name="overview"),
    path("requests/", telemetry.requests, name="requests"),
    path("requests/export.csv", telemetry.export, name="requests-export"),
    path("requests/<uuid:request_id>/", telemetry.request_detail, name="request"),
    path("requests/<uuid:request_id>/content/", telemetry.open_content, name="request-content"),
    path("search/", base.search, name="search"),
    path("playground/", playground, name="playground"),
    path("models/", catalog.models, name="models"),
    path("models/register/", catalog.register, name="model-register"),
    path("models/runtimes/add/", catalog.add_runtime, name="runtime-add"),
    path("models/runtimes/<uuid:runtime_id>/remove/", catalog.remove_runtime, name="runtime-remove"),
    *(
        path(f"models/<uuid:model_id>/{what}/", catalog.act, {"what": what}, name=f"model-{what}")
        for what in ("retry", "convert", "remove")
    ),
    path("deployments/", deployments, name="deployments"),
    path("deployments/new/", deploy_views.new, name="deployment-new"),
    path("deployments/plan/", deploy_views.plan, name="deployment-plan"),
    path("deployments/<uuid:deployment_id>/", deploy_views.deployment, name="deployment"),
    path("deployments/<uuid:deployment_id>/edit/", deploy_views.edit, name="deployment-edit"),
    path("deployments/<uuid:deployment_id>/log/", deploy_views.log, name="deployment-log"),
    path("deployments/<uuid:deployment_id>/scale/", deploy_views.rescale, name="deployment-scale"),
    path("deployments/<uuid:deployment_id>/rollback/", deploy_views.back, name="deployment-rollback"),
    path("deployments/<uuid:deployment_id>/remove/", deploy_views.remove, name="deployment-remove"),
    path("cards/", placement.cards, name="cards"),
    path("cards/what-if/", placement.what_if, name="cards-what-if"),
    path("cards/cordon/", placement.set_cordon, name="cards-cordon"),
    path("routes/", routes.routes, name="routes"),
    path("routes/create/", routes.create, name="route-create"),
    path("routes/<uuid:route_id>/", routes.route, name="route"),
    path("routes/<uuid:route_id>/rules/", routes.rules, name="route-rules"),
    path("routes/<uuid:route_id>/target/", routes.target, name="route-target"),
    path("routes/<uuid:route_id>/price/", routes.price, name="route-price"),
    path("keys/", keys.keys, name="keys"),
    path("keys/<uuid:key_id>/", keys.key, name="key"),
    path("keys/<uuid:key_id>/limits/", keys.limits, name="key-limits"),
    path("keys/<str:tenant>/create/", keys.create, name="key-create"),
    path("keys/<uuid:key_id>/revoke/", keys.revoke, name="key-revoke"),
    path("tenants/", tenants.tenants, name="tenants"),
    path("tenants/create/", tenants.create, name="tenant-create"),
    path("tenants/<str:name>/", tenants.tenant, name="tenant"),
    path("tenants/<str:name>/limits/", tenants.limits, name="tenant-limits"),
    path("tenants/<str:name>/capture/", tenants.capture, name="tenant-capture"),
    path("tenants/<str:name>/members/", tenants.add_member, name="tenant-member"),
    path("tenants/<str:name>/members/<str:username>/remove/", tenants.remove_member, name="tenant-remove-member"),
    path("api/v1/routes", endpoint(get=fleet_api.routes, post=fleet_api.create), name="api-routes"),
    path("api/v1/routes/<uuid:route_id>", endpoint(get=fleet_api.route, post=fleet_api.change), name="api-route"),
    path(
        "api/v1/deployments",
        endpoint(get=deployment_api.deployments, post=deployment_api.create),
        name="api-deployments",
    ),
    path(
        "api/v1/deployments/<uuid:deployment_id>",
        endpoint(get=deployment_api.deployment, post=deployment_api.change, delete=deployment_api.remove),
        name="api-deployment",
    ),
    path(
        "api/v1/deployments/<uuid:deployment_id>/scale",
        endpoint(post=deployment_api.rescale),
        name="api-deployment-scale",
    ),
    path(
        "api/v1/deployments/<uuid:deployment_id>/rollback",
        endpoint(post=deployment_api.back),
        name="api-deployment-rollback",
    ),
    path("api/v1/models", endpoint(get=catalog_api.models, post=catalog_api.register), name="api-models"),
    path("api/v1/models/<uuid:model_id>", endpoint(get=catalog_api.model, delete=catalog_api.remove), name="api-model"),
    path("api/v1/models/<uuid:model_id>/retry", endpoint(post=catalog_api.retry), name="api-model-retry"),
    path("api/v1/models/<uuid:model_id>/convert", endpoint(post=catalog_api.convert), name="api-model-convert"),
    path("api/v1/runtimes", endpoint(get=catalog_api.runtimes, post=catalog_api.add_runtime), name="api-runtimes"),
    path("api/v1/runtimes/<uuid:runtime_id>", endpoint(delete=catalog_api.remove_runtime), name="api-runtime"),
    path("api/v1/devices", endpoint(get=placement_api.devices), name="api-devices"),
    path("api/v1/placement/plan", endpoint(post=placement_api.plan), name="api-placement-plan"),
    path("api/v1/prices", endpoint(get=pricing_api.prices, post=pricing_api.create), name="api-prices"),
    path(
        "api/v1/tenants/<uuid:tenant_id>/limits",
        endpoint(get=tenants_api.limits, post=tenants_api.change),
        name="api-tenant-limits",
    ),
    path(
        "api/v1/keys/<uuid:key_id>/limits",
        endpoint(get=keys_api.limits, post=keys_api.change),
        name="api-key-limits",
    ),
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
