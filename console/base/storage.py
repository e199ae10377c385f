"""Static files under names that hold their hash, the modules that scripts import included."""

from __future__ import annotations

from servestatic.storage import CompressedManifestStaticFilesStorage


class StaticStorage(CompressedManifestStaticFilesStorage):
    """Else `import "./app.js"` fetched the unhashed name, and a browser could run old modules with new ones."""

    support_js_module_import_aggregation = True
