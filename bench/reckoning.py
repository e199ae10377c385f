"""After a day of faults: what clients, the ledger, the journals, Valkey and the gateways know, held against each other."""

from __future__ import annotations

import json
import time
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from datetime import datetime
from decimal import Decimal
from typing import Any

import psutil

from bench.asking import Told
from bench.gateway_queue import gateway_processes
from bench.stack import Stack, StackError, eventually, scrape

NOT_YET = (OSError, KeyError, TypeError, StackError)  # of a process that is on its way back
REFUSED = (429, 503)  # of a flood of these one line tells how many there were
REST_S = 120  # all is shipped, budgets are reconciled with the ledger each minute, idle connections closed after 4 s


def reckon(stack: Stack, url: str, told: Sequence[Told], key_id: str, since: datetime, fds: int) -> dict[str, Any]:
    """Figures, and whether each rule holds. `fds` is what a gateway process had open before, with nothing to do."""
    known = [each for each in told if each.request_id]
    refused = [each for each in known if each.status in REFUSED]
    served = [each for each in known if each.status not in REFUSED]
    ids = {each.request_id for each in served}
    records, use = _or_last(lambda: _settled(stack, url, key_id, since, ids, len(refused)))
    lines = Counter(record["request_id"] for record in records)
    billed = {record["request_id"]: record["completion_tokens"] for record in records}
    short = [each for each in known if billed.get(each.request_id, 0) < each.pieces]
    wrong = [each for each in known if each.billed is not None and billed.get(each.request_id) != each.billed]
    spent = sum((Decimal(record["cost"]) for record in records), Decimal(0))
    after = _or_last(lambda: _descriptors(stack, fds))
    return {
        "requests": len(told), "known": len(known), "records": len(records),
        "statuses": dict(Counter(each.status for each in told)),
        "outcomes": dict(Counter(record["outcome"] for record in records)),
        "mismatches": {"missing": len(served) - sum(each.request_id in lines for each in served),
                       "twice": sum(count > 1 for count in lines.values()), "short": len(short), "wrong": len(wrong)},
        "examples": [_example(each, records) for each in (short + wrong)[:10]],
        "at_rest": use, "ledger": str(spent), "fds": {"before": fds, "after": after},
        "rules": {
            "each_known_request_has_one_line": all(lines[each.request_id] == 1 for each in served),
            "each_known_refusal_is_counted": counted(records, "rejected") >= len(refused),
            "no_line_twice": all(count == 1 for count in lines.values()),
            "no_line_of_nobody": counted(records) <= len(told),
            "none_billed_short": not short,
            "billed_what_the_answer_said": not wrong,
            "nobody_was_left_hanging": not any(each.hung for each in told),
            "journals_are_in_the_ledger": not use["unshipped"] and not use["refused"],
            "nothing_reserved_no_slot_taken_nobody_waits": not any(use["held"].values()),
            "spent_is_the_ledgers_sum": Decimal(use["spent"]) == spent,
            "no_descriptor_leaked": bool(after) and max(after) <= fds,
        },
    }  # fmt: skip


def counted(records: Sequence[dict[str, Any]], outcome: str = "") -> int:
    """Requests that the lines stand for."""
    return sum(record["requests"] for record in records if outcome in ("", record["outcome"]))


def _settled(
    stack: Stack, url: str, key_id: str, since: datetime, ids: set[str], refused: int
) -> tuple[bool, tuple[list[dict[str, Any]], dict[str, Any]]]:
    """The key's lines and what is held, once all known requests are among the lines and nothing is held or on its way.

    Refusals of a flood are a line only once their minute is over.
    """
    use = _at_rest(stack, url, key_id)
    records = [record for record in stack.usage(since) if record["key_id"] == key_id]
    spent = sum((Decimal(record["cost"]) for record in records), Decimal(0))
    still = any(use["held"].values()) or use["unshipped"] or Decimal(use["spent"]) != spent
    known = ids <= {record["request_id"] for record in records} and counted(records, "rejected") >= refused
    return not still and known, (records, use)


def _example(told: Told, records: list[dict[str, Any]]) -> dict[str, Any]:
    """A mismatch, for a person to look into."""
    return asdict(told) | {"record": next((r for r in records if r["request_id"] == told.request_id), None)}


def _at_rest(stack: Stack, url: str, key_id: str) -> dict[str, Any]:
    """What is held when nobody asks: all of it must be nothing."""
    use = json.loads(stack.manage("limits", "show", "--key", key_id, "--json"))["use"]
    gauges = scrape(f"{url}/metrics")
    held = {
        "at once": float(use["concurrency"]["used"]),
        "reserved": sum(float(each["reserved"]) for each in use.values()),
        "slots": gauges["fanlight_slots_in_use"],
        "waiting": gauges["fanlight_waiting"],
        "in flight": gauges["fanlight_in_flight"],
        "unwritten": gauges["fanlight_journal_unwritten_records"],
    }
    return {
        "held": held,
        "unshipped": gauges["fanlight_journal_unshipped_bytes"],
        "refused": any(stack.data.rglob("refused.journal")),
        "spent": use["budget_day"]["used"],
    }


def _descriptors(stack: Stack, fds: int) -> tuple[bool, list[int]]:
    counts = [psutil.Process(pid).num_fds() for pid in gateway_processes(stack)]
    return max(counts) <= fds, counts


def settled_descriptors(stack: Stack) -> int:
    """What a gateway process has open with nothing to do: the same twice, longer apart than idle connections last."""
    seen = [_descriptors(stack, 0)[1]]
    while len(seen) < 2 or seen[-1] != seen[-2]:
        time.sleep(5)
        seen.append(_descriptors(stack, 0)[1])
    return max(seen[-1])


def _or_last(look: Any) -> Any:
    """What `look` finds once it is satisfied, or what it found last."""
    found: list[Any] = [None]

    def satisfied() -> bool:
        holds, found[0] = look()
        return bool(holds)

    try:
        eventually(satisfied, REST_S, *NOT_YET, pause_s=0.5)
    except TimeoutError:
        if found[0] is None:
            raise
    return found[0]
