"""The fused CPU path: it agrees with plain torch, and its answers do not depend on what runs beside them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from engine.blocks import BlockPool
from engine.boot import build
from engine.config import EngineConfig
from engine.errors import ConfigError
from engine.fused_runner import FusedRunner
from engine.hostcache import HostCache
from engine.model.fused import Arena, FusedCache, FusedModel, alternate, pack, pack_four_bit, unsupported
from engine.model.fused_loader import Disagreement, verify
from engine.model.loader import open_source
from engine.native import build as native
from engine.native import check
from engine.native.build import NativeUnavailable, choose_targets, find_library
from engine.native.library import open_library
from engine.sampler import Sampler
from engine.scheduler import Scheduler, SchedulerLimits
from engine.sequence import Sequence
from engine.types import SamplingParams


def _why_not() -> str | None:
    try:
        find_library()
    except NativeUnavailable as error:
        return str(error)
    return None


def _here() -> list[str]:
    """Targets this CPU has; others are not collected."""
    return [target for target, needs in native.TARGETS.items() if native.cpu_flags().issuperset(needs)]


needs_native = pytest.mark.skipif(_why_not() is not None, reason=f"NOT RUN, the fused path: {_why_not()}")


@pytest.fixture(scope="module", params=["int8", "q4"])
def runner(request: pytest.FixtureRequest, bundled_model: Path) -> Iterator[FusedRunner]:
    engine = build(EngineConfig(bundled_model, dtype=request.param, num_blocks=600, num_host_blocks=200))
    assert engine.facts()["dtype"] == request.param
    assert isinstance(engine.runner, FusedRunner)
    yield engine.runner
    engine.runner.model.close()


def _play(
    runner: FusedRunner,
    sequences: list[Sequence],
    *,
    batched: int = 512,
    blocks: int = 600,
    host: int = 0,
    prefix_cache: bool = True,
) -> Scheduler:
    """Run sequences to their ends on the real runner."""
    limits = SchedulerLimits(max_num_batched_tokens=batched, prefix_cache=prefix_cache)
    scheduler = Scheduler(BlockPool(blocks, 16), limits, HostCache(host))
    for sequence in sequences:
        scheduler.add(sequence)
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.complete(step, runner.sample(step, runner.forward(step)))
        scheduler.check()
    return scheduler


def _prompt(seed: int, length: int) -> list[int]:
    return torch.randint(40_000, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def _sequence(id: int, prompt: list[int], **params: object) -> Sequence:
    given: dict[str, object] = {"max_tokens": 24, "temperature": 0.0} | params
    return Sequence(id, prompt, SamplingParams(**given))  # type: ignore[arg-type]


def _output(sequence: Sequence) -> list[int]:
    return sequence.tokens[sequence.num_prompt :]


@needs_native
def test_answers_do_not_depend_on_batch_chunks_cache_or_preemption(runner: FusedRunner) -> None:
    prompts = [_prompt(seed, 20 + 37 * seed) for seed in range(8)]
    alone = []
    for index, prompt in enumerate(prompts):
        sequence = _sequence(index, prompt)
        _play(runner, [sequence], prefix_cache=False)
        alone.append(_output(sequence))
    for options in (
        {},
        {"batched": 16},
        {"batched": 100, "prefix_cache": False},
        {"blocks": 24, "batched": 64},
        {"blocks": 24, "host": 100},
    ):
        batch = [_sequence(index, prompt) for index, prompt in enumerate(prompts)]
        scheduler = _play(runner, batch, **options)  # type: ignore[arg-type]
        assert [_output(sequence) for sequence in batch] == alone, options
        if options.get("blocks"):
            assert scheduler.counts.preemptions.total() > 0, "the pool was meant to be too small"


@needs_native
def test_a_cached_prefix_gives_the_same_answer(runner: FusedRunner) -> None:
    prompt = _prompt(3, 200)
    first, again = _sequence(0, prompt), _sequence(1, prompt)
    scheduler = _play(runner, [first])
    scheduler.add(again)
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.complete(step, runner.sample(step, runner.forward(step)))
    assert again.num_cached == 192
    assert _output(again) == _output(first)


@needs_native
@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 1.0},
        {"temperature": 0.7, "top_p": 0.9},
        {"temperature": 1.3, "top_k": 7},
        {"temperature": 1.0, "top_k": 300, "top_p": 0.8},
        {"temperature": 2.0, "min_p": 0.02},
        {"temperature": 0.01, "top_p": 1e-9},
    ],
)
def test_the_library_draws_what_the_sampler_draws(runner: FusedRunner, params: dict[str, float]) -> None:
    """Log-probabilities send a row through the torch sampler; without them the library draws."""
    ours = [_sequence(i, _prompt(i, 9), max_tokens=6, seed=i, **params) for i in range(24)]
    theirs = [_sequence(i, _prompt(i, 9), max_tokens=6, seed=i, top_logprobs=0, **params) for i in range(24)]
    _play(runner, ours)
    _play(runner, theirs)
    same = sum(_output(a) == _output(b) for a, b in zip(ours, theirs, strict=True))
    # Sums are rounded differently, so a draw on the very edge of a token may fall to its neighbour.
    assert same >= 23


class _Anything:
    """A grammar whose masks the test makes up."""

    ready, error, ended = True, None, False

    def accept(self, token_id: int) -> None:
        """Nothing to advance."""


def _masked_tokens(runner: FusedRunner, share: float, **params: object) -> list[int]:
    """First tokens of 24 sequences, each under a random mask that allows that share of the vocabulary."""
    scheduler = Scheduler(BlockPool(600, 16), SchedulerLimits())
    sequences = [_sequence(i, _prompt(i, 9), max_tokens=1, seed=i, **params) for i in range(24)]
    for sequence in sequences:
        sequence.grammar = _Anything()  # type: ignore[assignment]
        scheduler.add(sequence)
    vocab, generator = runner.model.config.vocab_size, np.random.default_rng(5)
    allowed = generator.random((24, vocab)) < share
    allowed[:, 77] = True
    masks = {i: np.packbits(allowed[i], bitorder="little").view(np.int32) for i in range(24)}
    while scheduler.has_work:
        step = scheduler.schedule()
        scheduler.complete(step, runner.sample(step, runner.forward(step), masks))
    tokens = [sequence.tokens[-1] for sequence in sequences]
    assert all(allowed[at, token] for at, token in enumerate(tokens))
    return tokens


@needs_native
@pytest.mark.parametrize("share", [0.5, 0.001, 0.0])
@pytest.mark.parametrize("params", [{}, {"temperature": 1.0}, {"temperature": 1.0, "top_k": 50, "top_p": 0.5}])
def test_the_library_obeys_masks_as_the_sampler_does(
    runner: FusedRunner, share: float, params: dict[str, float]
) -> None:
    ours = _masked_tokens(runner, share, **params)
    theirs = _masked_tokens(runner, share, top_logprobs=0, **params)
    assert sum(a == b for a, b in zip(ours, theirs, strict=True)) >= 23


@needs_native
def test_a_step_whose_masks_never_came_holds_up_no_other(runner: FusedRunner) -> None:
    scheduler = Scheduler(BlockPool(600, 16), SchedulerLimits())
    abandoned = _sequence(0, _prompt(1, 20))
    abandoned.grammar = _Anything()  # type: ignore[assignment]
    scheduler.add(abandoned)
    runner.forward(scheduler.schedule())
    after = _sequence(1, _prompt(1, 20))
    _play(runner, [after])
    assert len(_output(after)) == 24


@needs_native
def test_a_step_that_nobody_waited_for_harms_no_other(runner: FusedRunner) -> None:
    alone, after = _sequence(0, _prompt(5, 60)), _sequence(1, _prompt(5, 60))
    _play(runner, [alone])
    scheduler = Scheduler(BlockPool(600, 16), SchedulerLimits())
    scheduler.add(_sequence(2, _prompt(6, 400)))
    runner.forward(scheduler.schedule())
    _play(runner, [after])
    assert _output(after) == _output(alone)


@needs_native
def test_the_model_is_refused_when_it_disagrees(runner: FusedRunner) -> None:
    from engine.model.fused_loader import Loaded

    probe = _prompt(1, 40)
    logits = torch.randn(40, runner.model.config.vocab_size, generator=torch.Generator().manual_seed(1)) * 4
    with pytest.raises(Disagreement, match="nats from the plain path"):
        verify(runner.model, Loaded(runner.model.weights, probe, logits))


def test_without_a_compiler_the_plain_path_serves_and_says_why(
    bundled_model: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("FANLIGHT_NATIVE_CACHE", str(tmp_path))
    monkeypatch.setenv("CXX", "no-such-compiler")
    engine = build(EngineConfig(bundled_model, num_blocks=64, max_model_len=512))
    assert engine.facts()["dtype"] == "bf16"
    assert "no-such-compiler" in engine.facts()["passed_over"]
    with pytest.raises(ConfigError, match="q4 needs the fused path: CXX names"):
        build(EngineConfig(bundled_model, dtype="q4", num_blocks=64, max_model_len=512))


def test_a_library_that_fails_its_check_is_not_kept(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FANLIGHT_NATIVE_CACHE", str(tmp_path))
    compiler = tmp_path / "compiler"
    compiler.write_text('#!/bin/sh\n[ "$1" = --version ] && exit\nfor last; do :; done\necho broken > "$last"\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    with pytest.raises(NativeUnavailable, match=r"avx2: checking the built library ended with status"):
        find_library()
    assert not list(tmp_path.glob("*.so"))


@needs_native
def test_loading_stays_within_small_limits(bundled_model: Path) -> None:
    limits = {"num_blocks": 4, "max_model_len": 16, "max_num_seqs": 2, "max_num_batched_tokens": 3}
    engine = build(EngineConfig(bundled_model, dtype="int8", **limits))
    assert isinstance(engine.runner, FusedRunner)
    engine.runner.model.close()


@needs_native
def test_a_model_that_computes_no_numbers_stays_within_its_vocabulary() -> None:
    config = check._config(64)
    weights = check._random(config, qk_norm=False, four_bit=False).weights
    weights.norm.fill_(torch.nan)
    cache = FusedCache(config, 8, 16)
    model = FusedModel(open_library(find_library().path), config, weights, cache, max_len=64, max_tokens=64, threads=1)
    sequences = [_sequence(i, [1], max_tokens=8, temperature=1.0, seed=i) for i in range(8)]
    _play(FusedRunner(model, Sampler()), sequences, batched=64, blocks=8)
    assert all(token < config.vocab_size for s in sequences for token in s.tokens)
    model.close()


def _compiler(folder: Path, monkeypatch: pytest.MonkeyPatch, script: str) -> Path:
    """A compiler that notes each run in a file, which is returned."""
    compiler, runs = folder / "compiler", folder / "runs"
    compiler.write_text(f'#!/bin/sh\n[ "$1" = --version ] && exit\necho run >> {runs}\n{script}\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CXX", str(compiler))
    return runs


def test_a_compiler_that_does_not_end_is_tried_once(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Else the start would take as long again for every target."""
    monkeypatch.setenv("FANLIGHT_NATIVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "BUILD_SECONDS", 0.5)
    runs = _compiler(tmp_path, monkeypatch, "exec sleep 20")
    with pytest.raises(NativeUnavailable, match=r"compiling the fused path took longer than 0\.5 s"):
        find_library()
    assert runs.read_text() == "run\n"


def test_a_cache_that_cannot_be_written_is_named(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FANLIGHT_NATIVE_CACHE", "/proc/self/task")  # nobody can, not even root
    _compiler(tmp_path, monkeypatch, "")
    with pytest.raises(NativeUnavailable, match=r"/proc/self/task cannot be written: .*; set FANLIGHT_NATIVE_CACHE"):
        find_library()


def test_a_cache_that_others_may_write_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("FANLIGHT_NATIVE_CACHE", str(tmp_path))
    for mode in (0o777, 0o1777, 0o770):
        tmp_path.chmod(mode)
        with pytest.raises(NativeUnavailable, match="others may write"):
            find_library()


def test_a_compiler_that_cannot_be_read_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "'g++")
    with pytest.raises(NativeUnavailable, match="CXX cannot be read: No closing quotation"):
        find_library()


def test_a_damaged_library_is_built_anew(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A file cut short by a full disk or a power cut would crash every start, or leave the slower path for good."""
    monkeypatch.setenv("FANLIGHT_NATIVE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(native, "check_command", lambda path: ["true"])
    runs = _compiler(tmp_path, monkeypatch, 'for last; do :; done; echo library > "$last"')
    path = find_library().path
    assert find_library().path == path
    assert runs.read_text() == "run\n"
    path.write_text("lib")
    assert find_library().path.read_text() == "library\n"
    assert runs.read_text() == "run\n" * 2


def test_targets_follow_the_cpu() -> None:
    assert choose_targets(native.TARGETS["avx2"]) == ["avx2"]
    assert choose_targets({*native.TARGETS["avx2"], *native.TARGETS["avx512-vnni"]}) == ["avx512-vnni", "avx2"]
    with pytest.raises(NativeUnavailable, match="AVX2"):
        choose_targets({"sse2"})


@needs_native
@pytest.mark.parametrize("target", _here() or ["none"])
def test_every_target_this_cpu_has_agrees_with_torch(target: str, tmp_path: Path) -> None:
    built = tmp_path / "fanlight.so"
    native.compile_library(native.find_compiler(), target, built)
    done = subprocess.run(native.check_command(built), capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.count(f"{target}: ") == 4


@needs_native
def test_amx_adds_up_like_every_other_target(tmp_path: Path) -> None:
    """Its tile instructions are emulated here; single rows go to VNNI, so both kernels are compared to the bit."""
    if "avx512-vnni" not in _here():
        return  # there is nothing to run the rest of it on
    built = tmp_path / "fanlight.so"
    emulation = str(Path(__file__).with_name("amx_emulation.h"))
    native.compile_library(native.find_compiler(), "avx512-vnni", built, "-include", emulation)
    done = subprocess.run(native.check_command(built), capture_output=True, text=True, timeout=300, check=True)
    assert done.stdout.count("amx-int8: ") == 4


def test_packing_keeps_each_channel_within_half_a_step() -> None:
    matrix = torch.randn(50, 128, generator=torch.Generator().manual_seed(2))
    packed = pack(matrix, Arena())
    back = packed.dequantised()[:50]
    assert ((back - matrix).abs() <= packed.scale[:50, None] * 0.5001).all()
    assert packed.sum.shape == (4, 2, 16)
    assert torch.equal(packed.sum[0, 1], (packed.data[0, 16:].int() - 128).sum((0, 2)).short())


def test_four_bit_weights_are_what_the_file_says(bundled_model: Path) -> None:
    source = open_source(bundled_model)
    for name in ("q", "k", "out", "down"):
        stored = source.four_bit(name, 3)
        assert stored is not None
        assert torch.equal(stored.floats(), source.load(name, 3))
    assert source.four_bit("embed") is None
    packed = pack_four_bit(stored, Arena())
    assert packed.data[2, 1, 1, 3, 5, 2] == stored.values[2 * 16 + 5, 3, 3 * 4 + 2]
    params = packed.params[2, 1]
    assert params[16 + 5] == stored.scale[2 * 16 + 5, 3]
    middle = stored.base[2 * 16 + 5, 2].float() + 8 * stored.scale[2 * 16 + 5, 2].float()
    assert params[32 + 5] == middle.half()
    assert params[64 + 5] == stored.floats()[2 * 16 + 5, 64:128].sum().half()


def test_gate_and_up_take_turns() -> None:
    gate, up = torch.zeros(32, 4), torch.ones(32, 4)
    assert alternate(gate, up)[:, 0].tolist() == ([0.0] * 16 + [1.0] * 16) * 2


def test_shapes_it_cannot_run_are_named(loaded: object) -> None:
    shape = loaded.config  # type: ignore[attr-defined]
    assert unsupported(shape, 16, 512) is None
    assert "head_dim is 80" in str(unsupported(replace(shape, head_dim=80), 16, 512))
    assert "block_size is 8" in str(unsupported(shape, 8, 512))
    assert "max_num_batched_tokens is 40000" in str(unsupported(shape, 16, 40_000))
