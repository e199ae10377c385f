"""Django settings, from the environment alone (console/environment.py has the table)."""

from __future__ import annotations

import secrets as random_secrets
import sys
from typing import Any
from urllib.parse import parse_qsl, unquote, urlsplit

from django.core.exceptions import ImproperlyConfigured
from django.utils.translation import gettext_lazy as _

from console import environment
from console.base.layout import Layout, write_atomically

try:
    ENV = environment.load()
except environment.BadSettings as error:
    raise ImproperlyConfigured(f"Fanlight cannot start:\n{error}") from None

BASE_DIR = environment.ROOT
LAYOUT = Layout(ENV["DATA_DIR"])


def _secret() -> str:
    """The server's secret: made at first use, kept 0600 in the data folder, never in the environment of a worker."""
    path = LAYOUT.secret_file
    try:
        if not path.exists():
            if LAYOUT.servers_file.exists():
                raise ImproperlyConfigured(
                    f"Fanlight cannot start:\n{path} is missing, and every API key depends on it.\n"
                    "Put it back from a backup. If there is none, write a new one: every key must then be made anew."
                )
            path.parent.mkdir(parents=True, exist_ok=True)
            write_atomically(path, random_secrets.token_urlsafe(48))
        return path.read_text().strip()
    except OSError as error:
        raise ImproperlyConfigured(
            f"Fanlight cannot start:\nthe data folder {LAYOUT.data} cannot be used: {error}.\n"
            "Run this as the user whom it belongs to, or set FANLIGHT_DATA_DIR to another folder."
        ) from None


def _database(url: str) -> dict[str, object]:
    if not url:
        return {
            "ENGINE": "django.db.backends.postgresql",
            "NAME": "fanlight",
            "USER": "fanlight",
            "HOST": str(LAYOUT.sockets),
        }
    parts = urlsplit(url)
    if parts.scheme not in {"postgres", "postgresql"}:
        raise ImproperlyConfigured("FANLIGHT_DATABASE_URL must start with postgresql://")
    return {
        "ENGINE": "django.db.backends.postgresql",
        "NAME": unquote(parts.path.lstrip("/")),
        "USER": unquote(parts.username or ""),
        "PASSWORD": unquote(parts.password or ""),
        "HOST": unquote(parts.hostname or ""),
        "PORT": str(parts.port or ""),
        "OPTIONS": dict(parse_qsl(parts.query)),
    }


SECRET_KEY = _secret()
DEBUG = False
ALLOWED_HOSTS = list(ENV["HOSTS"])
_ALL_INTERFACES = {"0.0.0.0", "::"}  # noqa: S104 a name to compare with, not an address to bind
PUBLIC_URL = (
    ENV["PUBLIC_URL"] or f"http://{ENV['BIND'] if ENV['BIND'] not in _ALL_INTERFACES else 'localhost'}:{ENV['PORT']}"
)
_SECURE = PUBLIC_URL.startswith("https://")

INSTALLED_APPS = [
    "django.contrib.admin",
    "django.contrib.auth",
    "django.contrib.contenttypes",
    "django.contrib.sessions",
    "django.contrib.messages",
    "django.contrib.staticfiles",
    "django.contrib.postgres",
    "channels",
    "axes",
    "console.base",
    "console.audit",
    "console.tenants",
    "console.keys",
    "console.catalog",
    "console.placement",
    "console.fleet",
    "console.pricing",
    "console.billing",
    "console.telemetry",
    "console.dashboards",
    "console.playground",
]

MIDDLEWARE = [
    "django.middleware.security.SecurityMiddleware",
    "csp.middleware.CSPMiddleware",
    "servestatic.middleware.ServeStaticMiddleware",
    "django.contrib.sessions.middleware.SessionMiddleware",
    "django.middleware.locale.LocaleMiddleware",
    "django.middleware.common.CommonMiddleware",
    "django.middleware.csrf.CsrfViewMiddleware",
    "django.contrib.auth.middleware.AuthenticationMiddleware",
    "django.contrib.auth.middleware.LoginRequiredMiddleware",
    "console.base.middleware.ViewerMiddleware",
    "django.contrib.messages.middleware.MessageMiddleware",
    "django.middleware.clickjacking.XFrameOptionsMiddleware",
    "axes.middleware.AxesMiddleware",
]

ROOT_URLCONF = "console.urls"
ASGI_APPLICATION = "console.asgi.application"

TEMPLATES = [
    {
        "BACKEND": "django.template.backends.django.DjangoTemplates",
        "DIRS": [BASE_DIR / "templates"],
        "APP_DIRS": True,
        "OPTIONS": {
            "context_processors": [
                "django.template.context_processors.request",
                "django.template.context_processors.i18n",
                "django.contrib.auth.context_processors.auth",
                "django.contrib.messages.context_processors.messages",
                "console.base.context.console",
            ],
        },
    },
]

DATABASES: dict[str, dict[str, Any]] = {
    "default": {
        **_database(ENV["DATABASE_URL"]),
        "CONN_MAX_AGE": 0,
        "ATOMIC_REQUESTS": False,
    }
}
if sys.argv[1:2] == ["web"]:
    # Under ASGI every page runs in a thread of its own: without a pool each would open, or leak, a connection.
    DATABASES["default"].setdefault("OPTIONS", {})["pool"] = {"min_size": 1, "max_size": 8, "timeout": 5}
DEFAULT_AUTO_FIELD = "django.db.models.BigAutoField"

# Valkey databases: 0 live state and channel layer, 1 the Celery broker (its length has an alarm of its own).
VALKEY_URL = ENV["VALKEY_URL"] or f"unix://{LAYOUT.valkey_socket}"
CHANNEL_LAYERS = {
    "default": {
        "BACKEND": "channels_redis.pubsub.RedisPubSubChannelLayer",
        "CONFIG": {"hosts": [VALKEY_URL], "prefix": "fanlight"},
    }
}
CELERY_BROKER_URL = (
    f"redis+socket://{LAYOUT.valkey_socket}?virtual_host=1" if not ENV["VALKEY_URL"] else f"{ENV['VALKEY_URL']}/1"
)
CELERY_TASK_SERIALIZER = "json"
CELERY_ACCEPT_CONTENT = ["json"]  # never pickle: who can write to the broker must not run code
CELERY_TASK_IGNORE_RESULT = True
CELERY_BROKER_CONNECTION_RETRY_ON_STARTUP = True
CELERY_BROKER_TRANSPORT_OPTIONS = {"visibility_timeout": 24 * 3600}
CELERY_TIMEZONE = "UTC"
CELERY_BEAT_SCHEDULE = {
    "catalog-work": {"task": "console.catalog.tasks.work", "schedule": 5.0, "options": {"expires": 5.0}},
    "reconcile-limits": {"task": "console.billing.tasks.reconcile_limits", "schedule": 60.0},
    "make-partitions": {"task": "console.telemetry.tasks.make_partitions", "schedule": 3600.0},
    "drop-old-partitions": {
        "task": "console.telemetry.tasks.drop_old_partitions",
        "schedule": 6 * 3600.0,
    },
    "expire-contents": {"task": "console.telemetry.tasks.expire_contents", "schedule": 3600.0},
}

AUTH_USER_MODEL = "base.User"
AUTHENTICATION_BACKENDS = [
    "axes.backends.AxesStandaloneBackend",
    "django.contrib.auth.backends.ModelBackend",
]
AUTH_PASSWORD_VALIDATORS = [
    {"NAME": "django.contrib.auth.password_validation.UserAttributeSimilarityValidator"},
    {
        "NAME": "django.contrib.auth.password_validation.MinimumLengthValidator",
        "OPTIONS": {"min_length": 10},
    },
    {"NAME": "django.contrib.auth.password_validation.CommonPasswordValidator"},
    {"NAME": "django.contrib.auth.password_validation.NumericPasswordValidator"},
]
LOGIN_URL = "login"
LOGIN_REDIRECT_URL = "overview"
LOGOUT_REDIRECT_URL = "login"

# Ten wrong passwords for one name from one address lock that pair for ten minutes.
AXES_FAILURE_LIMIT = 10
AXES_COOLOFF_TIME = 1 / 6
AXES_LOCKOUT_PARAMETERS = [["username", "ip_address"]]
AXES_LOCKOUT_TEMPLATE = "registration/locked.html"
AXES_RESET_ON_SUCCESS = True
AXES_VERBOSE = False
AXES_DISABLE_ACCESS_LOG = True

# Cookies are named per installation: two of them on one host must not sign each other out.
_COOKIE = f"fanlight_{ENV['PORT']}"
SESSION_COOKIE_NAME = f"{_COOKIE}_session"
CSRF_COOKIE_NAME = f"{_COOKIE}_csrf"
LANGUAGE_COOKIE_NAME = f"{_COOKIE}_language"
SESSION_COOKIE_HTTPONLY = CSRF_COOKIE_HTTPONLY = True
SESSION_COOKIE_SAMESITE = CSRF_COOKIE_SAMESITE = "Lax"
SESSION_COOKIE_SECURE = CSRF_COOKIE_SECURE = _SECURE
SESSION_COOKIE_AGE = 14 * 24 * 3600
CSRF_FAILURE_VIEW = "console.base.views.csrf_failure"
CSRF_TRUSTED_ORIGINS = [PUBLIC_URL] if _SECURE else []
SECURE_CONTENT_TYPE_NOSNIFF = True
SECURE_REFERRER_POLICY = "same-origin"
SECURE_HSTS_SECONDS = 31_536_000 if _SECURE else 0
X_FRAME_OPTIONS = "DENY"
CONTENT_SECURITY_POLICY = {
    "DIRECTIVES": {
        "default-src": ["'self'"],
        "script-src": ["'self'"],
        "style-src": ["'self'"],
        "img-src": ["'self'", "data:"],
        "connect-src": ["'self'"],
        "object-src": ["'none'"],
        "base-uri": ["'none'"],
        "form-action": ["'self'"],
        "frame-ancestors": ["'none'"],
    }
}

LANGUAGE_CODE = "en"
LANGUAGES = [("en", _("English")), ("zh-hans", _("Simplified Chinese"))]
LOCALE_PATHS = [BASE_DIR / "locale"]
TIME_ZONE = "UTC"
USE_TZ = True
USE_I18N = True

STATIC_URL = "/static/"
STATICFILES_DIRS = [BASE_DIR / "static"]
STATIC_ROOT = LAYOUT.data / "static"
STORAGES = {
    "default": {"BACKEND": "django.core.files.storage.FileSystemStorage"},
    "staticfiles": {"BACKEND": "console.base.storage.StaticStorage"},
}
SERVESTATIC_ALLOW_ALL_ORIGINS = False
MEDIA_ROOT = ""

LOGGING_CONFIG = None  # console/base/logs.py sets logging up, per process

TESTING = "pytest" in sys.modules
if TESTING:
    PASSWORD_HASHERS = ["django.contrib.auth.hashers.MD5PasswordHasher"]
    STORAGES["staticfiles"] = {"BACKEND": "django.contrib.staticfiles.storage.StaticFilesStorage"}
