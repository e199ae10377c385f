"""How a bench whose bars are rules tells its result: figures first, then each rule and whether it holds."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any


def tell(result: Mapping[str, Any], *, as_json: bool) -> int:
    """Print a result with `rules`, name → whether it holds. Returns the exit status: 1 when one does not hold."""
    if as_json:
        print(json.dumps(result))
    else:
        for name, value in result.items():
            if name != "rules":
                print(f"{name}: {value}")
        for rule, holds in result["rules"].items():
            print(f"{'ok  ' if holds else 'MISS'} {rule}")
    return 0 if all(result["rules"].values()) else 1
