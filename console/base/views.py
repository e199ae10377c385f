"""Sign in, account, search, docs, errors: the pages that belong to no app."""

from __future__ import annotations

import uuid
from typing import Any

from django.conf import settings
from django.contrib import messages
from django.contrib.auth import update_session_auth_hash
from django.contrib.auth.decorators import login_not_required
from django.contrib.auth.views import LoginView
from django.db import transaction
from django.http import HttpRequest, HttpResponse, JsonResponse
from django.shortcuts import redirect, render
from django.template.loader import render_to_string
from django.urls import reverse
from django.utils.http import url_has_allowed_host_and_scheme, urlencode
from django.utils.translation import gettext as _
from django.views.decorators.cache import never_cache
from django.views.decorators.debug import sensitive_post_parameters
from django.views.decorators.http import require_GET, require_http_methods, require_POST

from console.audit.actions import Actor, record
from console.base import api
from console.base.forms import NewPasswordForm, PreferencesForm, SignInForm, zones
from console.base.models import User
from console.fleet.models import Route


def actor_of(request: HttpRequest) -> Actor:
    """The signed-in person and their address, for actions."""
    return Actor(user=signed_in(request), address=request.META.get("REMOTE_ADDR") or None)


def signed_in(request: HttpRequest) -> User:
    """The person behind a request to a page that needs one."""
    assert isinstance(request.user, User)
    return request.user


class SignIn(LoginView):
    """The one way in, for the console and Django's admin; throttled by axes."""

    template_name = "registration/login.html"
    authentication_form = SignInForm
    redirect_authenticated_user = True


@never_cache
@sensitive_post_parameters()
@require_http_methods(["GET", "POST"])
def password(request: HttpRequest) -> HttpResponse:
    """Change one's password; the only page that opens before the first change."""
    user = signed_in(request)
    form = NewPasswordForm(user, request.POST or None)
    if request.method == "POST" and form.is_valid():
        with transaction.atomic():
            form.save(commit=False)
            user.must_change_password = False
            user.save(update_fields=["password", "must_change_password"])
            record(actor_of(request), "user.password", user)
        update_session_auth_hash(request, user)
        messages.success(request, _("Your password is changed."))
        return redirect("overview")
    return render(
        request,
        "registration/password.html",
        {"form": form},
        status=200 if not form.errors else 422,
    )


@login_not_required
@require_POST
def preferences(request: HttpRequest) -> HttpResponse:
    """Language, theme and zone. Before signing in only the language, in a cookie."""
    language = request.POST.get("language", "")
    if request.user.is_authenticated:
        form = PreferencesForm(request.POST, instance=request.user)
        if not form.is_valid():
            return JsonResponse({"errors": form.errors}, status=422)
        if form.fields:
            request.user.save(update_fields=list(form.fields))
    response = _back(request)
    if language in dict(settings.LANGUAGES):
        response.set_cookie(
            settings.LANGUAGE_COOKIE_NAME,
            language,
            max_age=365 * 86400,
            samesite="Lax",
            secure=settings.SESSION_COOKIE_SECURE,
        )
    return response


def _back(request: HttpRequest) -> HttpResponse:
    if request.headers.get("HX-Request"):
        return HttpResponse(status=204)
    target = request.POST.get("next", "")
    if url_has_allowed_host_and_scheme(target, {request.get_host()}, request.is_secure()):
        return redirect(target)
    return redirect("overview")


@login_not_required
@require_GET
def admin_sign_in(request: HttpRequest) -> HttpResponse:
    """Where the admin sends whoever it keeps out: on to our own form, or, once signed in, to the reason."""
    if request.user.is_authenticated:
        return forbidden(request)
    return redirect(f"{reverse('login')}?{request.META.get('QUERY_STRING', '')}")


@require_GET
def account(request: HttpRequest) -> HttpResponse:
    """One's own preferences."""
    return render(request, "base/account.html", {"zones": zones()})


@require_GET
def search(request: HttpRequest) -> HttpResponse:
    """The box in the top bar: a request id leads to its page, anything else to the list of requests."""
    text = request.GET.get("q", "").strip()
    bare = text.removeprefix("x-request-id:").strip()
    try:
        return redirect("request", request_id=uuid.UUID(bare))
    except ValueError:
        return redirect(f"{reverse('requests')}?{urlencode({'q': text, 'range': '24h'})}")


@require_GET
def docs(request: HttpRequest) -> HttpResponse:
    """Quick start with this installation's address filled in."""
    return render(
        request,
        "base/docs.html",
        {"routes": Route.objects.all(), "base_url": f"{settings.PUBLIC_URL}/v1"},
    )


def forbidden(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    text = _("Your account does not reach it. Ask an administrator if it should.")
    return _error(request, 403, _("This is not yours to open"), text)


def csrf_failure(request: HttpRequest, reason: str = "") -> HttpResponse:
    if request.path.startswith(api.PREFIX):
        return api.refusal(403, "The CSRF token is missing or out of date: send the cookie's value as X-CSRFToken.")
    return _error(
        request,
        403,
        _("The form was out of date"),
        _("Go back, reload the page and send it again."),
    )


def not_found(request: HttpRequest, exception: Exception | None = None) -> HttpResponse:
    text = _("The address may be mistyped, its retention may be over, or it belongs to somebody else.")
    return _error(request, 404, _("There is nothing here"), text)


def server_error(request: HttpRequest) -> HttpResponse:
    """Rendered without a request: whatever failed, the database included, must not fail here again."""
    context = {
        "status": 500,
        "title": _("This page failed"),
        "text": _("Fanlight itself made a mistake; requests to /v1 are not affected. The log has the details."),
        "base": "bare.html",
    }
    return HttpResponse(render_to_string("error.html", context), status=500)


def too_slow(request: HttpRequest) -> HttpResponse:
    text = _("The database did not answer in time. Choose a shorter time range or a narrower filter.")
    return _error(request, 503, _("This took too long"), text)


def _error(request: HttpRequest, status: int, title: str, text: str) -> HttpResponse:
    user = getattr(request, "user", None)
    base = "base.html" if user and user.is_authenticated else "bare.html"
    context: dict[str, Any] = {"status": status, "title": title, "text": text, "base": base}
    return render(request, "error.html", context, status=status)
