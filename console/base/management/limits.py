"""Limits as options of commands, the same for tenants and keys."""

from __future__ import annotations

from argparse import ArgumentParser
from collections.abc import Mapping
from typing import Any

from django.core.management.base import CommandError

from console.tenants.limits import WINDOWS

_OPTIONS = {
    "rpm": ("requests_per_minute", "requests in any 60 seconds"),
    "tpm": ("tokens_per_minute", "tokens, input and output together, in any 60 seconds"),
    "input_tpm": ("input_tokens_per_minute", "input tokens in any 60 seconds"),
    "output_tpm": ("output_tokens_per_minute", "output tokens in any 60 seconds"),
    "concurrency": ("concurrency", "requests at once, waiting ones included"),
}


def add_limits(parser: ArgumentParser) -> None:
    """Options for every limit; the word none takes a limit away."""
    for option, (_column, text) in _OPTIONS.items():
        parser.add_argument(f"--{option.replace('_', '-')}", metavar="N", help=f"{text}; none: no limit")
    parser.add_argument(
        "--budget",
        action="append",
        default=[],
        metavar="WINDOW=AMOUNT",
        help=f"money in a window ({', '.join(WINDOWS)}), such as day=25.50; repeatable; AMOUNT none: no limit",
    )
    parser.add_argument("--priority", help="class in a queue: high, normal or low")


def limits_from(options: Mapping[str, Any]) -> dict[str, Any]:
    """The given options as fields of an action. Raises CommandError for a budget that names no window."""
    found = {column: options[option] for option, (column, _text) in _OPTIONS.items() if options[option] is not None}
    for budget in options["budget"]:
        window, equals, amount = budget.partition("=")
        if not equals or window not in WINDOWS:
            raise CommandError(f"--budget {budget} must look like day=25.50; windows are {', '.join(WINDOWS)}.")
        found[f"budget_{window}"] = amount
    if options["priority"] is not None:
        found["priority"] = options["priority"]
    return {name: "" if value == "none" else value for name, value in found.items()}
