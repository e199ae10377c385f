"""The engine alone over a long time: `python bench/engine_soak.py [--scale 0.01] [--json]`.

Requests of 32 tokens in and 8 out, 32 at a time, in twenty waves, every prompt new. The pool is small (4,096 tokens), so that
one wave goes through all of it. In the end memory must be flat (later waves' median within 5 % of the earlier
waves'), steps as quick as they were (within 25 %, as machines are shared), within weights + pool + 600 MB, and every block free.
"""

from __future__ import annotations

import argparse
import statistics
import sys
import tempfile
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parent.parent))

from bench.engine_load import Ask, drive, words
from bench.engine_servers import Contender, Server, _ours
from bench.rules import tell
from bench.stack import MODEL_FILE

REQUESTS = 100_000
WAVES = 20
AT_ONCE = 32
PROMPT, OUTPUT = 32, 8
BLOCKS = 256
OVERHEAD = 600_000_000


def run(scale: float) -> dict[str, Any]:
    """The soak at `scale` of its full length: figures, and whether each rule holds."""
    contender = Contender("ours", "ours", "", (MODEL_FILE,), _ours("auto", "--num-blocks", str(BLOCKS)))
    a_wave = max(AT_ONCE, int(REQUESTS * scale) // WAVES)
    with tempfile.TemporaryDirectory() as folder:
        server = Server(contender, AT_ONCE, 0, Path(folder) / "server.log")
        try:
            server.wait_ready()
            waves = [_wave(server, index, a_wave) for index in range(WAVES)]
            facts, stats = server.facts(), server.get("/stats")
        finally:
            server.stop()
    rss, steps = [wave[0] for wave in waves], [wave[1] for wave in waves]
    limit = facts["weights_bytes"] + facts["kv_bytes"] + OVERHEAD
    return {
        "requests": a_wave * WAVES,
        "rss_mb": [round(each / 1e6) for each in rss],
        "step_ms": steps,
        "memory_growth": round(_growth(rss), 4),
        "step_growth": round(_growth(steps), 4),
        "rules": {
            "memory_flat": _growth(rss) <= 1.05,
            # A short run's steps say more of the machine's other work than of this one's.
            "steps_as_quick": scale < 0.1 or _growth(steps) <= 1.25,
            "within_weights_pool_and_600_mb": max(rss) <= limit,
            "blocks_whole": stats["free_blocks"] == stats["num_blocks"] and stats["running"] == 0,
            "all_answered": stats["requests_finished"] == {"length": a_wave * WAVES},
        },
    }


def _wave(server: Server, index: int, count: int) -> tuple[int, float]:
    """Resident bytes and the median step, in ms, after one wave."""
    asks = (Ask(words((index, at), PROMPT), OUTPUT) for at in range(count))
    drive(server.port, asks, AT_ONCE, timeout_s=3600)
    stats = server.get("/stats")
    return stats["rss_bytes"], stats["step_ms_p50"]


def _growth(values: list[float] | list[int]) -> float:
    """Median of the later half over that of the earlier half, without the first wave, which fills caches."""
    settled = values[1:]
    half = len(settled) // 2
    return statistics.median(settled[half:]) / statistics.median(settled[:half])


def main() -> int:
    """Print figures; status 1 when a rule is broken."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", type=float, default=1.0, help="share of the full 100,000 requests")
    parser.add_argument("--json", action="store_true", help="one JSON object")
    options = parser.parse_args()
    result = run(options.scale)
    return tell(result, as_json=options.json)


if __name__ == "__main__":
    raise SystemExit(main())
