"""What an engine adapter is: all that Fanlight knows of an engine, in one place and without starting it.

A worker's command line and environment come from checked parameters only. What a worker tells (its metrics) is turned
into the keys of the embedded engine's own /stats, so that nobody else needs to know which engine it is.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

_WORDS = {"true": True, "on": True, "yes": True, "1": True, "false": False, "off": False, "no": False, "0": False}
_READERS: Mapping[str, Callable[[str], Any]] = {
    "int": int,
    "float": float,
    "bool": lambda word: _WORDS[word.lower()],
    "choice": str,
}


class AdapterError(ValueError):
    """A deployment's parameters cannot be used; the message names the parameter."""


@dataclass(frozen=True)
class WorkerSpec:
    """Everything a worker's command line and environment are made of."""

    model_path: Path
    model_revision: str  # roots the prefix cache: blocks of other weights never match
    served_name: str
    uds: Path
    ready_file: Path
    threads: int
    drain_s: float  # what running streams get after SIGTERM
    parameters: Mapping[str, Any]
    fault_delays: Mapping[str, float]  # testing only: phase -> seconds
    cache: Path | None = None  # what engines compile at a start and find again at the next; None: each compiles anew
    python: Path | None = None  # the runtime's interpreter; None: our own
    cores: tuple[int, ...] = ()  # ids of those it may run on; empty: any
    exclusive_cores: bool = True  # False: others run on them too, so its threads must wait passively
    gpus: tuple[str, ...] = ()  # uids of its cards; empty: it runs on the CPU
    quantisation: str = ""  # empty: as stored
    tensor_parallel: int = 1
    arguments: Sequence[str] = ()  # free-form ones; who may give them is decided before
    environment: Mapping[str, str] = field(default_factory=dict)  # of the adapter's `variables` only
    memory: int = 0  # bytes that the ledger keeps for it on each device; 0: not planned
    kv_bytes: int = 0  # of which KV blocks; 0: not planned
    traces: tuple[str, str] | None = None  # where it may send its OTLP spans (protobuf over HTTP), and the bearer token
    port: int = 0  # of loopback, for engines that know no Unix socket
    key: str = ""  # that such an engine asks for

    @property
    def sockets(self) -> Path:
        """A private folder, there before the worker is, for sockets between its own processes."""
        return self.uds.with_suffix("")


@dataclass(frozen=True)
class Parameter:
    """One knob of an engine: what it may be, what it does, and what was measured about it."""

    kind: str  # "int", "float", "bool", "choice"
    help: str
    advice: str = ""
    default: Any = None  # None: the engine decides
    low: float | None = None
    high: float | None = None
    choices: tuple[str, ...] = ()
    unit: str = ""
    devices: tuple[str, ...] = ("cpu", "gpu")  # where it means anything

    def parse(self, name: str, value: object) -> Any:
        """The value, checked. Raises AdapterError, also for a number that is written as text: see `read`."""
        if self.kind == "bool":
            fits = isinstance(value, bool)
        elif self.kind == "choice":
            fits = value in self.choices
        else:
            kinds = (int,) if self.kind == "int" else (int, float)
            fits = isinstance(value, kinds) and not isinstance(value, bool) and self._in_bounds(value)
        if not fits:
            raise AdapterError(f"{name} must be {self.wanted}.")
        return float(value) if self.kind == "float" else value  # type: ignore[arg-type]

    def read(self, name: str, text: str) -> Any:
        """The value out of the text of a form or of a command line. Raises AdapterError."""
        try:
            return self.parse(name, _READERS[self.kind](text))
        except (KeyError, ValueError) as error:
            raise AdapterError(f"{name} must be {self.wanted}.") from error

    @property
    def wanted(self) -> str:
        """What it may be, in words: "a whole number from 1 to 1024"."""
        if self.kind == "bool":
            return "true or false"
        if self.kind == "choice":
            return f"one of {', '.join(self.choices)}"
        number = "a whole number" if self.kind == "int" else "a number"
        if self.low is not None and self.high is not None:
            return f"{number} from {self.low:.12g} to {self.high:.13g}"
        return number if self.low is None else f"{number} of at least {self.low:.12g}"

    def _in_bounds(self, number: float) -> bool:
        """False also for what is no number, which no comparison finds too small or too large."""
        low = number == number if self.low is None else number >= self.low
        return low and (self.high is None or number <= self.high)


TENSOR_PARALLEL = Parameter(
    "int",
    "Cards of one replica, which share every layer and exchange their parts at each.",
    "1 while the model fits on one card: two replicas serve more than one on two cards. Must divide the model's heads.",
    default=1,
    low=1,
    high=64,
    unit="cards",
    devices=("gpu",),
)
"""Of engines that can. Alone of a deployment's parameters it reaches them as a field of WorkerSpec."""


@dataclass(frozen=True)
class Capabilities:
    """What an engine can and cannot do, as its own documents or our own runs say."""

    formats: frozenset[str]  # of weights: "gguf", "safetensors"
    quantisations: tuple[str, ...]  # that a deployment may ask for; "" is as stored
    devices: frozenset[str]  # "cpu", "gpu"
    lends: bool  # it can give back blocks of its KV pool while it runs
    tensor_parallel: bool
    tried: bool  # we have run it
    note: str = ""  # shown beside its name
    source: str = ""  # which version and document its command line and metrics were taken from


class Adapter(Protocol):
    """All that Fanlight knows of one engine."""

    @property
    def engine(self) -> str:
        """Its word in deployments: "embedded", "vllm", …"""
        ...

    @property
    def title(self) -> str:
        """Its name as people write it."""
        ...

    @property
    def parameters(self) -> Mapping[str, Parameter]:
        """What a deployment may set, in the order of the form."""
        ...

    @property
    def variables(self) -> Mapping[str, str]:
        """Environment variables that a deployment may set, and what each does."""
        ...

    @property
    def extras(self) -> frozenset[str]:
        """Fields beyond OpenAI's that callers may send: their cost is bounded, and they tell nothing of others."""
        ...

    @property
    def capabilities(self) -> Capabilities:
        """What it can do."""
        ...

    @property
    def writes_ready_file(self) -> bool:
        """Whether it says that it is ready in a file, with its facts. Else it is ready when /health says 200."""
        ...

    @property
    def judges_itself(self) -> bool:
        """Whether its /health tells a lack of progress. Else whoever probes it has to judge by its steps."""
        ...

    @property
    def cold_start_s(self) -> float:
        """Seconds that a start usually takes, where nothing was measured here yet."""
        ...

    @property
    def stats_paths(self) -> tuple[str, ...]:
        """What a probe reads besides /health, each time."""
        ...

    @property
    def facts_paths(self) -> tuple[str, ...]:
        """What is read once, when it is ready; none where the ready file has it all."""
        ...

    def command(self, spec: WorkerSpec) -> list[str]:
        """The argv of a worker. Raises AdapterError for what is unknown or out of range."""
        ...

    def environment(self, spec: WorkerSpec) -> dict[str, str]:
        """A worker's whole environment: no secret of Fanlight, no proxy, nothing of the shell that started it."""
        ...

    def facts(self, told: Mapping[str, str], parameters: Mapping[str, Any]) -> dict[str, Any]:
        """What is true of a worker for as long as it runs, from the bodies of `facts_paths`, by path.

        Of the keys of the embedded engine's ready file: model, max_model_len, max_num_seqs, num_blocks, block_size,
        kv_bytes, engine_version, device. Raises ValueError for what cannot be read.
        """
        ...

    def stats(self, told: Mapping[str, str]) -> dict[str, Any]:
        """What a worker does now, from the bodies of `stats_paths`, in the keys of the embedded engine's /stats.

        Always: running, waiting, kv_usage (0 to 1), num_blocks, free_blocks, block_size, steps, prefix_query_tokens,
        prefix_hit_tokens, prompt_tokens, generation_tokens, preemptions. Of an engine that lends also held_blocks and
        usable_blocks, and `kv_usage` is of those. Raises ValueError for what cannot be read.
        """
        ...


def checked(adapter: Adapter, parameters: Mapping[str, object]) -> dict[str, Any]:
    """Parameters as the engine takes them. Raises AdapterError for one that is unknown or out of range."""
    values = {}
    for name, value in parameters.items():
        known = adapter.parameters.get(name)
        if known is None:
            raise AdapterError(f"{name} is not a parameter of {adapter.title}.")
        values[name] = known.parse(name, value)
    return values


def checked_variables(adapter: Adapter, environment: Mapping[str, object]) -> dict[str, str]:
    """Environment variables that a deployment sets. Raises AdapterError for one that is not on the adapter's list."""
    values = {}
    for name, value in environment.items():
        if name not in adapter.variables:
            known = ", ".join(adapter.variables) or "none"
            raise AdapterError(f"{name} is not a variable that {adapter.title} may be given; those are: {known}.")
        if isinstance(value, list | tuple | Mapping):
            raise AdapterError(f"The value of {name} must be text or a number.")
        text = str(value)
        if not text.isprintable() or len(text) > 200:
            raise AdapterError(f"The value of {name} must be at most 200 printable characters.")
        values[name] = text
    return values


def scrubbed(spec: WorkerSpec, home: str) -> dict[str, str]:
    """What every worker's environment begins with. `home` is a folder below the cache that is the engine's own."""
    cache = {} if spec.cache is None else {"HOME": str(spec.cache / home), "XDG_CACHE_HOME": str(spec.cache / home)}
    return {
        "PATH": "/usr/local/bin:/usr/bin:/bin",
        "LANG": "C.UTF-8",
        "HF_HUB_OFFLINE": "1",
        "PYTHONUNBUFFERED": "1",
        **cache,
    }
