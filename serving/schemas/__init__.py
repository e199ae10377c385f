"""What callers may send: typed bodies, and the one form (`Ask`) that the pipeline works on.

Every field is listed, so an unknown one is refused by name. Documented fields of an API without effect here are
accepted and dropped; fields of identity and isolation are refused, because the gateway sets them.
"""

from serving.schemas.ask import EXTRAS, Ask

__all__ = ["EXTRAS", "Ask"]
