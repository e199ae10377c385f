"""The form of a new key."""

from __future__ import annotations

from typing import Any

from django import forms
from django.utils import timezone
from django.utils.translation import gettext_lazy as _

from console.fleet.models import Route


class KeyForm(forms.Form):
    """Name, the routes it may call (none: all), and when it ends."""

    name = forms.CharField(label=_("Name"), max_length=80)
    allowed_models = forms.MultipleChoiceField(label=_("May call"), required=False)
    expires_at = forms.DateTimeField(label=_("Expires"), required=False, input_formats=["%Y-%m-%dT%H:%M", "%Y-%m-%d"])

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        names = Route.objects.values_list("name", flat=True)
        self.fields["allowed_models"].choices = [(name, name) for name in names]  # type: ignore[attr-defined]

    def clean_expires_at(self) -> Any:
        expires = self.cleaned_data["expires_at"]
        if expires is not None and expires <= timezone.now():
            raise forms.ValidationError(_("The expiry lies in the past."))
        return expires
