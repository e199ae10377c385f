"""Stop strings: found even when split over tokens, never shown."""

from __future__ import annotations


class StopFilter:
    """Passes text through until a stop string appears.

    The longest tail that could still grow into a stop string is held back.
    """

    __slots__ = ("_held", "_stops", "matched")

    def __init__(self, stops: tuple[str, ...]) -> None:
        self._stops = stops
        self._held = ""
        self.matched = False

    def push(self, text: str) -> str:
        """Text that is safe to show now; after a match nothing ever is."""
        if self.matched:
            return ""
        if not self._stops:
            return text
        self._held += text
        found = [at for stop in self._stops if (at := self._held.find(stop)) >= 0]
        if found:
            self.matched = True
            shown, self._held = self._held[: min(found)], ""
            return shown
        keep = self._partial()
        cut = len(self._held) - keep
        shown, self._held = self._held[:cut], self._held[cut:]
        return shown

    def flush(self) -> str:
        """What was held back in vain, at the end."""
        shown, self._held = self._held, ""
        return shown

    def _partial(self) -> int:
        """Length of the longest tail that begins a stop string."""
        longest = min(len(self._held), max(map(len, self._stops)) - 1)
        for size in range(longest, 0, -1):
            if any(stop.startswith(self._held[-size:]) for stop in self._stops):
                return size
        return 0
