"""Errors of the console's actions. Pages, API and commands show the message as it is: it says what to do.

ConsoleError
├── NotAllowed     the actor may not do this
└── Refused        the action makes no sense as things are
"""

from __future__ import annotations


class ConsoleError(Exception):
    """Base of what an action can raise; `str()` is a sentence for a person."""


class NotAllowed(ConsoleError):
    """The actor's role does not include this."""


class Refused(ConsoleError):
    """The state of things forbids it, or an argument cannot be used: then `field` names the argument."""

    def __init__(self, message: str, field: str = "") -> None:
        super().__init__(message)
        self.field = field


def first_line(error: BaseException) -> str:
    """The first line of an error's text, or its class where it says nothing (a TimeoutError often does)."""
    return (str(error).splitlines() or [type(error).__name__])[0]
