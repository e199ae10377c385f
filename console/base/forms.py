"""Forms of the account: signing in, the password, preferences."""

from __future__ import annotations

import zoneinfo
from functools import cache
from typing import Any

from django import forms
from django.conf import settings
from django.contrib.auth.forms import AuthenticationForm, PasswordChangeForm
from django.utils.translation import gettext_lazy as _

from console.base.models import User


class SignInForm(AuthenticationForm):
    """Name and password; errors never tell which of the two was wrong."""

    error_messages = {
        "invalid_login": _("That name and password do not belong together. Check the keyboard's case and try again."),
        "inactive": _("This account is switched off. Ask an administrator."),
    }

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.fields["username"].label = _("Name")
        self.fields["password"].label = _("Password")


class NewPasswordForm(PasswordChangeForm):
    """The old password once, the new one twice; the new one must differ."""

    def clean_new_password1(self) -> str:
        new: str = self.cleaned_data["new_password1"]
        if new == self.data.get("old_password"):
            raise forms.ValidationError(_("Choose a password that differs from the old one."))
        return new


class PreferencesForm(forms.ModelForm):  # type: ignore[type-arg]
    """Language, theme and zone of a person; a field that is not sent stays as it is."""

    class Meta:
        model = User
        fields = ("language", "theme", "time_zone")

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for name in list(self.fields):
            if name not in self.data:
                del self.fields[name]

    def clean_language(self) -> str:
        return self._one_of("language", {"", *dict(settings.LANGUAGES)})

    def clean_time_zone(self) -> str:
        return self._one_of("time_zone", {"", *zones()})

    def _one_of(self, name: str, allowed: set[str]) -> str:
        value: str = self.cleaned_data[name]
        if value not in allowed:
            raise forms.ValidationError(_("This is none of the choices."))
        return value


@cache
def zones() -> tuple[str, ...]:
    """IANA zones a person would look for, without the legacy aliases."""
    regions = (
        "Africa/",
        "America/",
        "Antarctica/",
        "Asia/",
        "Atlantic/",
        "Australia/",
        "Europe/",
        "Indian/",
        "Pacific/",
    )
    return ("UTC", *sorted(z for z in zoneinfo.available_timezones() if z.startswith(regions)))
