"""One attempt's answer on its way to the client: counted, edited, noted where it outlives this process, sent on.

Everything happens in the callback that brought the engine's bytes; nothing here waits.
"""

from __future__ import annotations

import logging
import time

import msgspec

from serving import upstream
from serving.answer import Answer
from serving.dialect import Dialect
from serving.journal import SlotTable
from serving.metering import Counts, Usage
from serving.request import Gaps, Request
from serving.stream import Editor, Piece
from serving.telemetry.durations import Durations, report_of
from serving.telemetry.timeline import EngineReport
from serving.upstream import DONE, Choice, Chunk

log = logging.getLogger(__name__)


class Superseded(Exception):
    """Another attempt at the same request had text first."""


class Relay:
    """Takes the events of one engine's stream for one request."""

    def __init__(self, request: Request, dialect: Dialect, answer: Answer, slots: SlotTable, engine: str) -> None:
        assert request.ask is not None
        self.counts = Counts()
        self.gaps = Gaps()
        self.report: EngineReport | None = None
        self._request = request
        self._answer = answer
        self._slots = slots
        self._counts_each_choice = request.ask.choices > 1 and engine != "embedded"
        self._per_choice: dict[int, int] = {}
        self._editor = Editor(chat=dialect.chat, choices=request.ask.choices, stops=request.ask.stops)

    @property
    def finished(self) -> bool:
        """Whether every choice came to its end."""
        return self._editor.finished

    @property
    def finish_reason(self) -> str:
        return self._editor.finish_reason

    @property
    def stopped_early(self) -> bool:
        """Whether a stop string ended what the engine has not: it need not go on."""
        return self._editor.finished and self._editor.stopped_early

    def take(self, payloads: list[bytes]) -> bool:
        """Take the next events, all that one read brought; returns whether the answer is over."""
        editor = self._editor
        heard = editor.heard
        pieces: list[Piece] = []
        done = False
        for payload in payloads:
            if payload == DONE:
                done = True
                break
            chunk = upstream.parse_chunk(payload)
            if chunk.usage is not None or chunk.fanlight:
                self._note_facts(chunk)
            pieces += editor.edit(chunk.choices)
        self._note_tokens(editor.heard, editor.heard - heard)
        if pieces:
            if not self._request.leads(self):
                raise Superseded
            if self._request.capture is not None:
                self._request.capture.add(pieces)
            self._answer.add(pieces)
        return done or self.stopped_early

    def _note_facts(self, chunk: Chunk) -> None:
        if chunk.usage is not None:
            choices = upstream.parse_choices(chunk.choices) if self._counts_each_choice else []
            self.counts.take(chunk.usage, self._completion(chunk.usage, choices))
        if chunk.fanlight:
            self._take_report(chunk.fanlight)
        elif chunk.metrics and self.report is None:
            self._take_durations(chunk.metrics)

    def _completion(self, usage: Usage, choices: list[Choice]) -> int:
        """Engines but ours count each choice for itself until the end."""
        completion = usage.completion_tokens or 0
        if not choices:
            return completion
        self._per_choice[choices[0].index] = completion
        return sum(self._per_choice.values())

    def _take_report(self, raw: msgspec.Raw) -> None:
        """The engine's timeline is welcome and never essential: what cannot be read is left out."""
        try:
            report = msgspec.json.decode(raw, type=EngineReport)
        except (msgspec.DecodeError, RecursionError):
            log.warning("request %s: the engine's timeline cannot be read", self._request.id)
            return
        self.report = self._request.report = report.merged(self.report)

    def _take_durations(self, raw: msgspec.Raw) -> None:
        try:
            told = msgspec.json.decode(raw, type=Durations | None)
        except (msgspec.DecodeError, RecursionError):
            log.warning("request %s: the engine's metrics cannot be read", self._request.id)
            return
        if told is not None:
            stamps = self._request.stamps
            now, counts = time.monotonic_ns(), self.counts
            report = report_of(told, stamps.posted, stamps.first_chunk, now, counts.prompt, counts.cached)
            self.report = self._request.report = report

    def _note_tokens(self, relayed: int, heard: int) -> None:
        """Count before anything is sent on, where it outlives this process."""
        request, counts = self._request, self.counts
        now = time.monotonic_ns()
        request.stamps.last_chunk = now
        counts.relayed = relayed
        if heard:
            request.stamps.first_chunk = request.stamps.first_chunk or now
            self.gaps.note(now, heard)
        if request.slot is not None:
            self._slots.update(request.slot, request.arrival.uuid, counts.prompt, counts.cached, counts.generated)
