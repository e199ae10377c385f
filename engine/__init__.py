"""Fanlight's embedded engine: continuous batching over a paged KV cache, small enough to read.

Start reading at `sequence.py`, `blocks.py` and `scheduler.py` (the pure core), then `core.py` (the
step loop), `runner.py` (a step as tensors) and `server/` (the OpenAI-compatible HTTP surface).
The engine imports nothing of serving or console.
"""

__version__ = "0.1.0"
