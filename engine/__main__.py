"""`python -m engine serve --model PATH`: the command line."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

from engine import __version__
from engine.config import DTYPES, FAULT_PHASES, POOLINGS, EngineConfig
from engine.errors import ConfigError, EngineError


def parser() -> argparse.ArgumentParser:
    """All options; defaults are the dataclasses' own."""
    top = argparse.ArgumentParser(prog="python -m engine", description="Fanlight's engine.")
    top.add_argument("--version", action="version", version=__version__)
    serve = top.add_subparsers(dest="command", required=True).add_parser(
        "serve",
        help="serve one model over an OpenAI-compatible HTTP API",
        argument_default=argparse.SUPPRESS,
    )
    _engine_options(serve)
    _server_options(serve)
    return top


def _engine_options(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("--model", type=Path, required=True, help="GGUF file or safetensors folder")
    add("--served-model-name", metavar="NAME", help="name clients use (default: the file's)")
    add("--model-revision", metavar="STR", help="roots the prefix-cache hashes")
    add("--model-sha256", metavar="HEX", help="refuse a model file that has another")
    add(
        "--dtype",
        choices=DTYPES,
        help="auto (default): q4 where the file is, else int8, on the fused CPU path; bf16 without it",
    )
    add("--pooling", choices=POOLINGS, help="serve /v1/embeddings by this (default: what the model's files say)")
    add("--device", choices=("auto", "cpu", "cuda"), help="(default: auto)")
    add("--threads", type=int, metavar="N", help="compute threads (default: all cores)")
    add("--max-num-seqs", type=int, metavar="N", help="sequences per step (default: 64)")
    add("--max-num-batched-tokens", type=int, metavar="N", help="per step (default: 512)")
    add("--block-size", type=int, metavar="N", help="tokens per KV block (default: 16)")
    add("--num-blocks", type=int, metavar="N", help="KV blocks (default: 32 × 2,048 tokens)")
    add("--num-host-blocks", type=int, metavar="N", help="KV blocks kept in host memory (default: 0 on a CPU)")
    add("--max-model-len", type=int, metavar="N", help="window (default: the model's)")
    add("--max-queued", type=int, metavar="N", help="waiting requests before 503 (default: 1024)")
    add("--max-queued-tokens", type=int, metavar="N", help="their tokens before 503 (default: 1048576)")
    add(
        "--no-prefix-cache",
        dest="prefix_cache",
        action="store_false",
        help="compute every prompt in full",
    )
    add(
        "--fault-delay",
        dest="faults",
        action="append",
        metavar="PHASE=MS",
        help=f"TESTING ONLY: sleep in one of {', '.join(FAULT_PHASES)}; may be repeated",
    )


def _server_options(serve: argparse.ArgumentParser) -> None:
    add = serve.add_argument
    add("--host", help="(default: 127.0.0.1)")
    add("--port", type=int, help="0 chooses one (default: 8001)")
    add("--uds", type=Path, metavar="PATH", help="listen on this Unix socket (0600) instead")
    add(
        "--introspection-port",
        type=int,
        metavar="N",
        help="with --uds: health, stats and metrics on 127.0.0.1 too; 0 chooses a port",
    )
    add("--api-key-file", type=Path, metavar="FILE", help="clients must show this bearer key")
    add("--ready-file", type=Path, metavar="FILE", help="JSON, written once serving")
    add("--drain-seconds", type=float, metavar="S", help="on SIGTERM (default: 30)")
    add("--log-json", action="store_true", help="progress as JSON lines on stderr")


def parse_faults(entries: Sequence[str]) -> dict[str, float]:
    """`PHASE=MS` entries as a mapping. Raises ConfigError."""
    faults = {}
    for entry in entries:
        phase, _, text = entry.partition("=")
        try:
            faults[phase] = float(text)
        except ValueError as error:
            raise ConfigError(f"--fault-delay {entry!r} is not PHASE=MS.") from error
    return faults


def main(argv: Sequence[str] | None = None) -> int:
    """Parse, check, serve."""
    options = vars(parser().parse_args(argv))
    options.pop("command")
    try:
        options["faults"] = parse_faults(options.pop("faults", []))
        # Checked before torch is imported, so that a typo is reported at once.
        ours = {k: options.pop(k) for k in list(options) if k in EngineConfig.__slots__}
        config = EngineConfig(**ours)
        from engine.server.process import run
        from engine.server.sockets import ServerConfig

        return run(config, ServerConfig(**options))
    except EngineError as error:
        sys.stderr.write(f"engine: {error}\n")
        return 2


if __name__ == "__main__":
    sys.exit(main())
