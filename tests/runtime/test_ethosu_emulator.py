"""The emulator against the TOSA reference model: whole models, Vela's bugs, random graphs and damaged programs.

``tests/ops/test_ops.py`` has every operator.
"""

from __future__ import annotations

import itertools
import re
import struct
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.dtype import DType
from arm_backend_core.errors import ArmBackendError, CompileError
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa import reference_model
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Value
from arm_backend_core.tosa.serialize import serialize
from arm_backend_core.tosa.vela_workarounds.catalog import apply_vela_workarounds
from arm_recipes.runtime.ethosu_stream import StreamError
from tests.accelerators import ACCELERATORS
from tests.fuzz.oracle import quantize_program
from tests.models import zoo
from tests.ops import runner
from tests.ops.cases import CASES
from tests.runtime import rescale_graphs, vela_bug_pairs
from tests.runtime.cpp_build import RUNTIME, SANITIZERS, compile_cpp, run
from tests.runtime.ethosu_emulator import Array, Emulator, delegates_with_payloads, read_payload
from tests.runtime.vela_bugs import (
    COMPILED_CORRECTLY,
    NOT_EMITTED,
    REPRODUCERS,
    SLICED_OPERATORS,
    Reproducer,
    reproduce_sliced,
)
from tests.tosa_graphs import Input, build_flatbuffer, build_graph, make_target

#: Models and activations of ``make test``; ``make verify`` takes all.
_MODELS = {("mobilenet_v3_small", "int8"), ("tiny_vit", "int8")}


def _convolution(b: Builder, x: Value) -> Value:
    weight = b.const(np.arange(-18, 18).reshape(2, 3, 3, 2), DType.INT8)
    return b.rescale(b.conv2d(x, weight, b.const([5, -5], DType.INT32), pad=(1, 1, 1, 1)), DType.INT8, 0.01)


@pytest.mark.parametrize("flags", [[], ["--separate-io-regions"]])
def test_direct_drive_stream_gives_the_reference_models_results(flags: list[str], emulator: Emulator) -> None:
    flatbuffer = build_flatbuffer(_convolution, ((1, 5, 6, 2), DType.INT8))
    spec = EthosUCompileSpec("ethos-u85-256", extra_flags=["--cop-format=COP2", *flags])
    payload = compile_ethosu(flatbuffer, spec, delegate="", find_operator=lambda _: None)
    inputs = [np.random.default_rng(0).integers(-128, 128, (1, 5, 6, 2)).astype(np.int8)]
    (result,) = emulator.run(read_payload(payload.data), inputs, [("int8", (1, 5, 6, 2))])
    assert np.array_equal(result, reference_model.run(flatbuffer, inputs)[0])


@pytest.mark.parametrize(
    ("model", "profile"),
    [
        pytest.param(*case, marks=[] if case in _MODELS else [pytest.mark.verify])
        for case in itertools.product(zoo.NAMES, ["int8", "a16w8"])
    ],
)
def test_models(model: str, profile: str, emulator: Emulator) -> None:
    entry = zoo.build(model, 2)
    program, is_int16 = runner.export(entry.model, entry.samples[0]), profile == "a16w8"
    captured = quantize_program(program, entry.samples, int16_activations=is_int16)
    for accelerator in ACCELERATORS:
        delegates = delegates_with_payloads(runner.lower(captured, EthosUCompileSpec(accelerator)))
        assert delegates, accelerator
        for made, payload in delegates:
            assert emulator.matches_reference_model(made, payload), accelerator


def _samples(tensors: Iterable[Input]) -> list[np.ndarray[Any, Any]]:
    generator = np.random.default_rng(0)
    bits = (0, 1)
    ranges = [(x, dtype.numpy, *(bits if dtype is DType.BOOL else dtype.range)) for x, dtype in tensors]
    return [generator.integers(low, high + 1, shape).astype(dtype) for shape, dtype, low, high in ranges]


def _is_compiled_correctly(emulator: Emulator, flatbuffer: bytes, accelerator: str, bug: Reproducer) -> bool:
    """Whether the program of ``flatbuffer`` computes what the graph of ``bug`` does."""
    inputs = _samples(bug.inputs)
    expected = reference_model.run(build_flatbuffer(bug.body, *bug.inputs), inputs)
    return _results_match(emulator, flatbuffer, accelerator, inputs, expected)


def _results_match(
    emulator: Emulator, flatbuffer: bytes, accelerator: str, inputs: list[Array], expected: list[Array]
) -> bool:
    """Whether the program of ``flatbuffer`` computes ``expected``."""
    payload = compile_ethosu(flatbuffer, EthosUCompileSpec(accelerator), delegate="", find_operator=lambda _: None)
    shapes = [(array.dtype.name, array.shape) for array in expected]
    if len(read_payload(payload.data).outputs) != len(shapes):  # a result is lost
        return False
    try:
        results = emulator.run(read_payload(payload.data), inputs, shapes)
    except StreamError:  # for example, it writes outside its region or reads uninitialized bytes
        return False
    return all(np.array_equal(ours, theirs) for ours, theirs in zip(results, expected, strict=True))


@pytest.mark.parametrize("bug", [*REPRODUCERS, *NOT_EMITTED, *COMPILED_CORRECTLY], ids=lambda bug: bug.name)
def test_vela_bugs(bug: Reproducer, emulator: Emulator) -> None:
    """Fails if Vela has fixed a bug: its workaround is no longer needed."""
    flatbuffer = build_flatbuffer(bug.body, *bug.inputs)
    for accelerator in bug.accelerators:
        if bug.crashes(accelerator):
            with pytest.raises(CompileError, match="Vela crashed with SIGSEGV"):
                _is_compiled_correctly(emulator, flatbuffer, accelerator, bug)
            continue
        right = not bug.writes_out_of_bounds(accelerator) and _is_compiled_correctly(
            emulator, flatbuffer, accelerator, bug
        )
        assert right == (accelerator not in bug.wrong), accelerator


def _apply_workarounds(bug: Reproducer, accelerator: str) -> bytes:
    """The serialized graph after the workarounds only: other passes might simplify so small a graph."""
    written = build_graph(bug.body, *bug.inputs)
    apply_vela_workarounds(written, make_target(accelerator))
    written.remove_dead()
    return serialize(written)


@pytest.mark.parametrize("bug", [*REPRODUCERS, *COMPILED_CORRECTLY], ids=lambda bug: bug.name)
def test_workarounds_avoid_vela_bugs(bug: Reproducer, emulator: Emulator) -> None:
    for accelerator in bug.accelerators:
        flatbuffer = _apply_workarounds(bug, accelerator)
        assert _is_compiled_correctly(emulator, flatbuffer, accelerator, bug), accelerator
        if accelerator not in bug.wrong:  # a graph that Vela compiles correctly is unchanged
            assert flatbuffer == build_flatbuffer(bug.body, *bug.inputs), accelerator


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_adjacent_vela_bugs(accelerator: str, emulator: Emulator, pytestconfig: pytest.Config) -> None:
    """Graphs with two bugs: neither workaround prevents the other one."""
    wrong = []
    for seed in range(400 if pytestconfig.getoption("verify") else 15):
        pair = vela_bug_pairs.draw(seed, accelerator)
        written = vela_bug_pairs.run_passes(pair, make_target(accelerator), seed)
        if not written.users().keys() >= set(written.inputs):  # the second graph reads only constants
            continue
        if not _is_compiled_correctly(emulator, serialize(written), accelerator, pair):
            wrong.append(f"{seed}: {pair.name}")
    assert wrong == []


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_random_graphs_of_rescales_are_compiled_correctly(
    accelerator: str, emulator: Emulator, pytestconfig: pytest.Config
) -> None:
    wrong, executed = [], 0
    for seed in range(3000 if pytestconfig.getoption("verify") else 60):
        drawn = rescale_graphs.draw(seed, make_target(accelerator))
        inputs = _samples((value.shape, value.dtype) for value in drawn.inputs)
        try:
            expected = reference_model.run(serialize(drawn), inputs)
        except ArmBackendError:  # values exceed the range of a RESCALE, whose result TOSA then does not define
            continue
        apply_vela_workarounds(drawn, make_target(accelerator))
        drawn.remove_dead()
        executed += 1
        if not _results_match(emulator, serialize(drawn), accelerator, inputs, expected):
            wrong.append(seed)
    assert wrong == []
    assert executed > 50


@pytest.mark.parametrize("name", SLICED_OPERATORS)
def test_operators_read_slices_and_write_into_concat(name: str, emulator: Emulator) -> None:
    """Operators that read a SLICE and write into a CONCAT, along each axis, of one and of two images."""
    for axis in range(4):
        for batches in (1, 2):
            bug = reproduce_sliced(name, axis, batches)
            for accelerator in ACCELERATORS:
                where = f"axis {axis}, {batches} images, {accelerator}"
                assert _is_compiled_correctly(emulator, _apply_workarounds(bug, accelerator), accelerator, bug), where


@pytest.fixture(scope="module")
def convolution() -> bytes:
    """A payload with weights, scales and feature maps."""
    case = next(case for case in CASES if case.name == "conv2d")
    captured = runner.export(runner.quantize_case(case, int16=False), case.sample())
    ((_, payload),) = delegates_with_payloads(runner.lower(captured, "u55"))
    return payload


def _run_commands(emulator: Emulator, payload: bytes, commands: bytes, weights: bytes | None = None) -> None:
    parts = read_payload(payload)
    changed = type(parts)(commands, parts.weights if weights is None else weights, parts.scratch, (), ())
    emulator.run(changed, [], [])


def _replace_word(commands: bytes, index: int, value: int) -> bytes:
    return commands[: 4 * index] + struct.pack("<I", value) + commands[4 * index + 4 :]


def test_unknown_command_is_refused(emulator: Emulator, convolution: bytes) -> None:
    commands = _replace_word(read_payload(convolution).commands, 8, 0x3FF)
    with pytest.raises(StreamError, match=r"a command at byte 32: unknown: opcode 1023, control 0"):
        _run_commands(emulator, convolution, commands)


def test_truncated_stream_is_refused(emulator: Emulator, convolution: bytes) -> None:
    with pytest.raises(StreamError, match="words of commands are announced"):
        _run_commands(emulator, convolution, read_payload(convolution).commands[:-8])


def test_access_outside_a_region_is_refused(emulator: Emulator, convolution: bytes) -> None:
    parts = read_payload(convolution)
    smaller = type(parts)(parts.commands, parts.weights, 16, (), ())
    with pytest.raises(StreamError, match=r"NPU_OP_\w+ at byte \d+: [IO]FM takes bytes .* of a region of 16"):
        emulator.run(smaller, [], [])


def test_damaged_weights_are_refused(emulator: Emulator, convolution: bytes) -> None:
    parts = read_payload(convolution)
    with pytest.raises(StreamError, match=r"NPU_OP_CONV at byte .* weights"):
        _run_commands(emulator, convolution, parts.commands, bytes(len(parts.weights)))


def test_damaged_programs_end_in_errors(emulator: Emulator, convolution: bytes) -> None:
    parts = read_payload(convolution)
    generator = np.random.default_rng(0)
    refused = 0
    for _ in range(300):
        commands = bytearray(parts.commands)
        weights = bytearray(parts.weights)
        commands[int(generator.integers(32, len(commands)))] ^= 1 << int(generator.integers(8))
        weights[int(generator.integers(len(weights)))] ^= 1 << int(generator.integers(8))
        try:
            _run_commands(emulator, convolution, bytes(commands), bytes(weights))
        except StreamError:
            refused += 1
    assert refused > 30


@pytest.mark.verify
def test_fuzzing(tmp_path: Path, pytestconfig: pytest.Config) -> None:
    """Vela's programs, the corpus, and mutations of both, with AddressSanitizer and UBSan."""
    fuzz = RUNTIME / "tests/fuzz"
    sources = [fuzz / "emulator_fuzzer.cpp", *sorted((RUNTIME / "emulator").glob("*.cpp"))]
    flags = [*SANITIZERS, "-std=c++17", "-fsanitize=fuzzer", f"-I{RUNTIME}"]
    fuzzer = compile_cpp(tmp_path / "fuzzer", sources, flags, compiler="clang++-14")
    programs, new = tmp_path / "programs", tmp_path / "new"
    programs.mkdir()
    new.mkdir()
    for bug in REPRODUCERS:
        for accelerator in bug.accelerators:
            if bug.writes_out_of_bounds(accelerator) or bug.crashes(accelerator):  # no program
                continue
            flags = ["--cop-format=COP2"] if "u85" in accelerator and len(bug.name) % 2 else []
            spec = EthosUCompileSpec(accelerator, extra_flags=flags)
            flatbuffer = build_flatbuffer(bug.body, *bug.inputs)
            payload = read_payload(compile_ethosu(flatbuffer, spec, delegate="", find_operator=lambda _: None).data)
            sizes = struct.pack("<II", len(payload.commands), payload.scratch)
            (programs / f"{bug.name}-{accelerator}").write_bytes(sizes + payload.commands + payload.weights)
    runs = 1_000_000 if pytestconfig.getoption("verify") else 3_000
    memory = ["-rss_limit_mb=0", "-malloc_limit_mb=256"]  # libFuzzer may count the memory of this process
    limits = [f"-runs={runs}", "-max_len=6000", "-timeout=60", "-print_final_stats=1", *memory]
    corpus = [str(new), str(programs), str(fuzz / "emulator_corpus")]
    output = run([str(fuzzer), *limits, f"-artifact_prefix={tmp_path}/", *corpus])
    executed = re.search(r"stat::number_of_executed_units: *(\d+)", output)
    assert executed is not None, output
    assert int(executed[1]) >= runs


@pytest.mark.verify
def test_compiles_without_warnings(tmp_path: Path) -> None:
    sources = sorted((RUNTIME / "emulator").glob("*.cpp"))
    flags = ["-std=c++17", "-O1", "-fPIC", f"-I{RUNTIME}"]
    compile_cpp(tmp_path / "libethosu_emulator.so", sources, flags, compiler="clang++-14", link=["-shared"])
