"""Static files under names that hold their hash, the modules that scripts import included."""

from __future__ import annotations

from whitenoise.storage import CompressedManifestStaticFilesStorage  # type: ignore[import-untyped]


class StaticStorage(CompressedManifestStaticFilesStorage):  # type: ignore[misc]
    """Else `import "./app.js"` fetched the unhashed name, and a browser could run old modules with new ones."""

    support_js_module_import_aggregation = True
