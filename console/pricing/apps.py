from django.apps import AppConfig


class PricingConfig(AppConfig):
    name = "console.pricing"
