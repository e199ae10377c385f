from django.apps import AppConfig


class BaseConfig(AppConfig):
    name = "console.base"
