"""Reads the few samples that are wanted out of a metrics page in Prometheus' text format."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass, field

_SAMPLE = re.compile(r"^([a-zA-Z_:][a-zA-Z0-9_:]*)(?:\{(.*)\})? ([^ ]+)(?: -?\d+)?$")
_LABEL = re.compile(r'([a-zA-Z_][a-zA-Z0-9_]*)="((?:[^"\\]|\\.)*)"')


@dataclass
class Samples:
    """The samples of a page, by name: labels and value of each series."""

    series: dict[str, list[tuple[dict[str, str], float]]] = field(default_factory=dict)

    def total(self, name: str, default: float = 0.0) -> float:
        """The sum over all series of a metric; `default` where there is none."""
        found = self.series.get(name)
        return sum(value for _labels, value in found) if found else default

    def mean(self, name: str, default: float = 0.0) -> float:
        """The mean over all series, for shares that do not add up."""
        found = self.series.get(name)
        return sum(value for _labels, value in found) / len(found) if found else default

    def by(self, name: str, label: str) -> dict[str, float]:
        """Sums by the value of one label."""
        sums: dict[str, float] = {}
        for labels, value in self.series.get(name, ()):
            key = labels.get(label, "")
            sums[key] = sums.get(key, 0.0) + value
        return sums

    def labels(self, name: str) -> dict[str, str]:
        """The labels of a metric's first series: how facts are told that are no numbers."""
        found = self.series.get(name)
        return found[0][0] if found else {}

    def __contains__(self, name: str) -> bool:
        return name in self.series


def read(text: str, names: Iterable[str]) -> Samples:
    """The series of `names`. Raises ValueError where a wanted line cannot be read."""
    wanted = frozenset(names)
    samples = Samples()
    for line in text.splitlines():
        name = line.partition(" ")[0].partition("{")[0]
        if name not in wanted:
            continue
        match = _SAMPLE.match(line)
        if match is None:
            raise ValueError(f"This line of the metrics cannot be read: {line[:120]}")
        labels = dict(_LABEL.findall(match[2] or ""))
        samples.series.setdefault(name, []).append((labels, float(match[3])))
    return samples
