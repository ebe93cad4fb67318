"""Ethos-U payloads and estimates, and errors when Vela refuses a flatbuffer or crashes on it."""

from __future__ import annotations

import csv
import io
import json
import re
import struct
import subprocess
import sys
import tempfile
import tomllib
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import pytest
import tosa_serializer as ts

from arm_backend_core.backends.artifacts import dump_artifacts
from arm_backend_core.backends.ethosu import compile_ethosu
from arm_backend_core.backends.payload import Payload
from arm_backend_core.backends.registry import compile_payload
from arm_backend_core.dtype import DType
from arm_backend_core.errors import ArmBackendError, CompileError
from arm_backend_core.targets.compile_spec import EthosUCompileSpec
from arm_backend_core.tosa.builder import Builder
from arm_backend_core.tosa.graph import Graph, Op, Origin, Value
from arm_backend_core.workers import vela
from tests.backends.tosa_programs import add, conv2d
from tests.runtime.vela_bugs import REPRODUCERS, Reproducer
from tests.tosa_graphs import build_flatbuffer

_TARGETS = ["ethos-u55-128", "ethos-u65-256", "ethos-u65-512", "ethos-u85-256"]


def _find_no_operator(text: str) -> None:
    return None


def _compile(spec: EthosUCompileSpec, flatbuffer: bytes) -> Payload:
    return compile_payload(spec, flatbuffer, delegate="delegate_0", find_operator=_find_no_operator)


def _blocks(stream: bytes) -> dict[str, bytes]:
    """Read a block stream as the runtime does."""
    blocks, offset = {}, 0
    while offset < len(stream):
        assert offset % 16 == 0
        name = stream[offset : offset + 16].rstrip(b"\0").decode()
        (length,) = struct.unpack_from("<I", stream, offset + 16)
        assert stream[offset + 20 : offset + 32] == bytes(12)
        blocks[name] = stream[offset + 32 : offset + 32 + length]
        offset += 32 + (length + 15) // 16 * 16
    assert offset == len(stream)
    return blocks


@pytest.fixture(autouse=True)
def temporary_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Files of a failed compilation go to the test's folder."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    return tmp_path


@pytest.mark.parametrize("target", _TARGETS)
def test_blocks_of_the_payload(target: str) -> None:
    blocks = _blocks(_compile(EthosUCompileSpec(target), conv2d()).data)
    assert list(blocks) == [
        "vela_bin_stream",
        "cmd_data",
        "weight_data",
        "scratch_size",
        "inputs",
        "outputs",
        "vela_end_stream",
    ]
    assert blocks["cmd_data"].startswith(b"COP1")
    (scratch,) = struct.unpack("<I", blocks["scratch_size"])
    count, *shape, size, offset, region = struct.unpack("<10i", blocks["inputs"])
    assert (count, shape, size, region) == (1, [1, 1, 1, 8, 8, 4], 1, 1)
    assert 0 <= offset <= scratch - 8 * 8 * 4
    count, *shape, size, offset, region = struct.unpack("<10i", blocks["outputs"])
    assert (count, shape, size, region) == (1, [1, 1, 1, 8, 8, 8], 1, 1)
    assert 0 <= offset <= scratch - 8 * 8 * 8


def test_payload_of_a_program_without_constants() -> None:
    blocks = _blocks(_compile(EthosUCompileSpec("ethos-u85-256"), add([1, 7, 5, 3])).data)
    assert blocks["weight_data"] == b"\0"
    assert struct.unpack_from("<i", blocks["inputs"]) == (2,)
    assert len(blocks["inputs"]) == 4 + 2 * 36


def test_int16_input_has_two_bytes() -> None:
    blocks = _blocks(_compile(EthosUCompileSpec("ethos-u55-256"), conv2d(dtype=ts.DType.INT16)).data)
    assert struct.unpack("<10i", blocks["inputs"])[7] == 2


@pytest.mark.parametrize("target", ["ethos-u55-128", "ethos-u65-512", "ethos-u85-256"])
def test_estimates_equal_those_of_velas_command_line(target: str, tmp_path: Path) -> None:
    spec = EthosUCompileSpec(target)
    flatbuffer = conv2d(height=48, width=48, channels=32, out_channels=64)
    (tmp_path / "network.tosa").write_bytes(flatbuffer)
    command = [sys.executable, "-m", "ethosu.vela", *spec.compiler_flags, "--verbose-cycle-estimate"]
    command += ["--verbose-weights", "--output-dir", str(tmp_path), str(tmp_path / "network.tosa")]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout

    def printed(label: str) -> float:
        found = re.search(rf"^{label} +([\d.]+)", text, re.MULTILINE)
        return float(found[1]) if found else 0.0

    figures = _compile(spec, flatbuffer).vela
    assert figures is not None
    assert figures.npu_cycles == printed("NPU cycles") > 0
    assert figures.total_cycles == printed("Total cycles")
    assert figures.macs == printed("Neural network macs")
    assert round(figures.sram_bytes / 1024, 2) == printed("Total SRAM used")
    assert round(figures.dram_bytes / 1024, 2) == printed("Total DRAM used")
    flash = printed("Total On-chip Flash used") + printed("Total Off-chip Flash used")
    assert round(figures.flash_bytes / 1024, 2) == flash
    assert round(figures.weight_bytes / 1024, 2) == printed("NPU Encoded Weights Size")
    assert figures.inference_seconds == figures.total_cycles / (printed("Accelerator clock") * 1e6)
    # Vela 5.2 copies the input to SRAM where it is in DRAM.
    copied = target == "ethos-u65-512" and vela.installed_release() > (5, 1)
    assert [layer.npu_operator for layer in figures.layers] == ["MemoryCopy"] * copied + ["Conv2D"]
    assert figures.npu_operators == len(figures.layers)
    assert sum(layer.npu_cycles for layer in figures.layers) == figures.npu_cycles
    assert sum(layer.macs for layer in figures.layers) == figures.macs
    # Operators 0 to 3 of the flatbuffer are the convolution's constants.
    assert {(layer.operator, layer.index) for layer in figures.layers} == {("Conv2D", 4)}


def test_sram_limit() -> None:
    spec = EthosUCompileSpec("ethos-u65-256")
    figures = _compile(spec, conv2d()).vela
    assert figures is not None
    assert figures.sram_limit == 384 * 1024
    assert not figures.sram_exceeded
    # With Shared_Sram the limit is only a target: Vela compiles a program that needs more.
    spec = EthosUCompileSpec("ethos-u55-128", extra_flags=["--arena-cache-size=100"])
    figures = _compile(spec, conv2d()).vela
    assert figures is not None
    assert figures.sram_exceeded
    figures = _compile(EthosUCompileSpec("ethos-u55-128"), conv2d()).vela
    assert figures is not None
    assert figures.sram_limit is None


def test_flags_change_the_program() -> None:
    flatbuffer = conv2d(height=96, width=96, channels=64, out_channels=128)
    fast = _compile(EthosUCompileSpec("ethos-u55-128"), flatbuffer).vela
    small = _compile(EthosUCompileSpec("ethos-u55-128", extra_flags=["--optimise=Size"]), flatbuffer).vela
    assert fast is not None
    assert small is not None
    assert small.sram_bytes < fast.sram_bytes
    stream = _blocks(
        _compile(
            EthosUCompileSpec("ethos-u85-256", extra_flags=["--cop-format=COP2", "--separate-io-regions"]),
            conv2d(),
        ).data
    )
    assert stream["cmd_data"].startswith(b"COP2")
    assert struct.unpack("<10i", stream["inputs"])[9] == 3
    assert struct.unpack("<10i", stream["outputs"])[9] == 4


@pytest.mark.parametrize("direct_drive", [False, True])
def test_unused_inputs_enlarge_the_scratch_except_with_direct_drive(direct_drive: bool) -> None:
    flags = ["--cop-format=COP2", "--separate-io-regions"] if direct_drive else []
    spec, flatbuffer = EthosUCompileSpec("ethos-u85-256", extra_flags=flags), conv2d()
    used = _blocks(_compile(spec, flatbuffer).data)
    payload = compile_payload(
        spec, flatbuffer, delegate="delegate_0", find_operator=_find_no_operator, unused_inputs={1: (5000, 4)}
    )
    blocks = _blocks(payload.data)
    (_, *convolved), (count, *both) = struct.unpack("<10i", used["inputs"]), struct.unpack("<19i", blocks["inputs"])
    assert (count, both[:9]) == (2, convolved)
    (scratch,), (used_scratch,) = (struct.unpack("<I", x["scratch_size"]) for x in (blocks, used))
    end = convolved[7] + 8 * 8 * 4
    address, expected_scratch = (-1, used_scratch) if direct_drive else (end, end + 5000 * 4)
    assert both[9:] == [1, 1, 1, 1, 1, 5000, 4, address, 1]
    assert scratch == expected_scratch


def test_verbose_output_stays_out_of_the_terminal(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    spec = EthosUCompileSpec("ethos-u55-128", extra_flags=["--verbose-register-command-stream"])
    spec.dump_intermediate_artifacts_to(tmp_path)
    payload = _compile(spec, conv2d())
    assert capfd.readouterr() == ("", "")
    assert b"NPU_OP_CONV" in payload.artifacts["_vela.log"]
    # Each delegate has the output of its own compilation.
    assert _compile(spec, conv2d()).artifacts["_vela.log"] == payload.artifacts["_vela.log"]


def test_dump(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "folder"
    spec = EthosUCompileSpec("ethos-u85-256").dump_intermediate_artifacts_to(folder).dump_debug_info("JSON")
    flatbuffer = conv2d()
    payload = _compile(spec, flatbuffer)
    graph = Graph()
    output = Value((1,), DType.INT8, "layer-1")
    graph.ops.append(Op("IDENTITY", [], output, {}, {Origin("conv2d", "aten.conv2d.default", "model.py:7"): 1}))
    paths = dump_artifacts(spec, "delegate/0", flatbuffer, payload, graph)
    assert sorted(Path(path).name for path in paths) == [
        "delegate_0.tosa",
        "delegate_0_debug.json",
        "delegate_0_per-layer.csv",
        "delegate_0_vela.npz",
    ]
    assert (folder / "delegate_0.tosa").read_bytes() == flatbuffer
    pieces = np.load(folder / "delegate_0_vela.npz")
    blocks = _blocks(payload.data)
    assert pieces["cmd_data"].tobytes() == blocks["cmd_data"]
    assert pieces["weight_data"].tobytes() == blocks["weight_data"]
    assert pieces["input_shape"].tolist() == [[1, 1, 1, 8, 8, 4]]
    rows = list(csv.DictReader(io.StringIO((folder / "delegate_0_per-layer.csv").read_text())))
    assert payload.vela is not None
    assert int(rows[0]["npu_cycles"]) == payload.vela.npu_cycles
    debug = json.loads((folder / "delegate_0_debug.json").read_text())
    assert debug["operators"][0]["source"] == "model.py:7"
    assert debug["vela"]["npu_cycles"] == payload.vela.npu_cycles


def test_dump_to_an_unwritable_folder(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    spec = EthosUCompileSpec("ethos-u85-256").dump_intermediate_artifacts_to(tmp_path / "file")
    payload = _compile(spec, conv2d())
    with pytest.raises(ArmBackendError, match=r"cannot write .*file"):
        dump_artifacts(spec, "delegate_0", conv2d(), payload, Graph())


_CRASHING_CONV2D = conv2d(
    dtype=ts.DType.INT16,
    kernel=5,
    stride=3,
    dilation=2,
    channels=56,
    out_channels=15,
    pad=4,
    height=10,
    width=10,
)


@pytest.mark.parametrize(
    ("target", "flatbuffer", "signal"),
    [
        ("ethos-u55-128", add([1, 0, 4]), "SIGSEGV"),
        ("ethos-u85-256", add([1, 0, 4]), "SIGFPE"),
        ("ethos-u85-256", _CRASHING_CONV2D, "SIGSEGV"),
    ],
)
@pytest.mark.parametrize("dump", [False, True])
def test_a_crash_of_vela_names_the_signal(
    target: str, flatbuffer: bytes, signal: str, dump: bool, tmp_path: Path
) -> None:
    spec = EthosUCompileSpec(target)
    if dump:
        spec.dump_intermediate_artifacts_to(tmp_path / "dump")
    with pytest.raises(CompileError) as caught:
        compile_payload(spec, flatbuffer, delegate="lowered_module_3", find_operator=_find_no_operator)
    error = caught.value
    assert error.delegate == "lowered_module_3"
    assert "lowered_module_3" in str(error)
    assert f"crashed with {signal}" in str(error)
    assert error.artifact is not None
    assert error.artifact in str(error)
    assert Path(error.artifact).read_bytes() == flatbuffer
    assert (Path(error.artifact).parent == tmp_path / "dump") == dump
    # The next compilation gets a fresh process.
    assert _compile(spec, conv2d()).vela is not None


def test_refusal_names_the_operator() -> None:
    asked = []

    def find_operator(text: str) -> tuple[str, str]:
        asked.append(text)
        return "aten.add.Tensor", "model.py:12"

    flatbuffer = add([1, 4, 4], ts.DType.FP32)
    with pytest.raises(CompileError, match="Input data type not supported") as caught:
        compile_payload(
            EthosUCompileSpec("ethos-u55-128"), flatbuffer, delegate="delegate_0", find_operator=find_operator
        )
    assert "Add:" in asked[0]
    assert "likely operator: aten.add.Tensor (model.py:12)" in str(caught.value)
    assert Path(caught.value.artifact or "").read_bytes() == flatbuffer


def test_a_lost_input_is_an_error() -> None:
    """The convolution's windows cover padding only, so Vela leaves its input out of the program."""

    def body(b: Builder, x: Value, y: Value) -> Value:
        weight, bias = b.const(np.ones((4, 1, 1, 3)), DType.INT8), b.const([1] * 4, DType.INT32)
        sums = b.conv2d(x, weight, bias, pad=(2, 1, 0, 0), stride=(3, 1), dilation=(1, 2))
        return b.concat([b.rescale(sums, DType.INT8, 0.25), y], 3)

    flatbuffer = build_flatbuffer(body, ((2, 1, 6, 3), DType.INT8), ((2, 2, 6, 4), DType.INT8))
    spec = EthosUCompileSpec("ethos-u85-256")
    with pytest.raises(CompileError, match=r"inputs of \[96\] bytes, not \[36, 96\]"):
        compile_payload(spec, flatbuffer, delegate="delegate_0", find_operator=_find_no_operator, input_bytes=[36, 96])


def test_a_lost_result_is_an_error() -> None:
    """Vela's program of this graph lacks a result (docs/contributors/vela.md, cancelled_transpose)."""
    bug = next(bug for bug in REPRODUCERS if bug.name == "cancelled_transpose_input")
    flatbuffer = build_flatbuffer(bug.body, *bug.inputs)
    with pytest.raises(CompileError, match=r"results of \[576\] bytes, not \[576, 108\]") as caught:
        compile_payload(
            EthosUCompileSpec("ethos-u55-128"),
            flatbuffer,
            delegate="delegate_0",
            find_operator=_find_no_operator,
            output_bytes=[576, 108],
        )
    assert Path(caught.value.artifact or "").read_bytes() == flatbuffer


_MODES = (
    ("ethos-u55-128", "Shared_Sram"),
    ("ethos-u65-256", "Dedicated_Sram_384KB"),
    ("ethos-u85-256", "Sram_Only"),
    ("ethos-u85-256", "Dedicated_Sram_384KB"),
)
#: What ``make test`` leaves to ``make verify``: another memory mode of an NPU.
_SECOND_MODES = _MODES[3:]


@pytest.mark.parametrize(
    ("bug", "accelerator", "mode"),
    [
        pytest.param(
            bug,
            accelerator,
            mode,
            id=f"{bug.name}-{accelerator}-{mode}",
            marks=[pytest.mark.verify] if (accelerator, mode) in _SECOND_MODES else [],
        )
        for bug in REPRODUCERS
        for accelerator, mode in _MODES
        if accelerator in bug.accelerators and not bug.crashes(accelerator)
    ],
)
def test_no_program_writes_beyond_its_tensors(bug: Reproducer, accelerator: str, mode: str) -> None:
    """A graph that Vela miscompiles gives wrong results, but the program writes only to its tensors."""
    spec = EthosUCompileSpec(accelerator, memory_mode=mode)
    beyond = r"writes out of bounds: .+ is written to bytes \d+ to \d+ of its memory"
    refused = pytest.raises(CompileError, match=beyond) if bug.writes_out_of_bounds(accelerator) else nullcontext()
    with refused:
        compile_ethosu(
            build_flatbuffer(bug.body, *bug.inputs), spec, delegate="delegate_0", find_operator=_find_no_operator
        )


@pytest.mark.parametrize("flatbuffer", [b"", b"not a flatbuffer", conv2d()[:300], add([1, 2, 1, 2, 1, 2, 4])])
def test_a_bad_flatbuffer_is_refused(flatbuffer: bytes) -> None:
    spec = EthosUCompileSpec("ethos-u85-256")
    with pytest.raises(CompileError):
        _compile(spec, flatbuffer)
    assert _compile(spec, conv2d()).data


def test_timeout() -> None:
    spec = EthosUCompileSpec("ethos-u55-128")
    flatbuffer = conv2d(height=256, width=256, channels=64, out_channels=512)
    with pytest.raises(CompileError, match=r"did not finish within 0.001 s"):
        compile_ethosu(flatbuffer, spec, delegate="delegate_0", find_operator=_find_no_operator, timeout=0.001)
    assert _compile(spec, conv2d()).data


@pytest.mark.parametrize(("version", "release"), [("5.1.0", (5, 1)), ("5.2.0", (5, 2)), ("5.2.1", (5, 2))])
def test_release_of_vela(version: str, release: vela.Release, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vela, "_version_of", lambda package: version)
    assert vela.installed_release() == release
    assert EthosUCompileSpec("ethos-u55-128").target.vela_release == release


@pytest.mark.parametrize("version", ["4.5.0", "5.0.0", "5.3.0", "6.1.0", "5.10.0", "5.3rc1", "5"])
def test_release_of_vela_that_is_not_supported(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(vela, "_version_of", lambda package: version)
    told = (
        f"Vela {version} is not supported; supported releases are 5.1 and 5.2: .*pip install 'ethos-u-vela>=5.1,<5.3'"
    )
    with pytest.raises(ArmBackendError, match=told):
        EthosUCompileSpec("ethos-u55-128")


def test_the_supported_releases_of_vela_are_those_that_pip_installs() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())["project"]
    (major, minor), (last_major, last_minor) = min(vela.SUPPORTED_RELEASES), max(vela.SUPPORTED_RELEASES)
    wanted = f"{vela.PACKAGE}>={major}.{minor},<{last_major}.{last_minor + 1}"
    extras = project["optional-dependencies"]
    assert extras["ethosu"] == [wanted]
    assert f"{vela.PACKAGE}>={last_major}.{last_minor}" in extras["demo"]


def test_missing_package_of_vela(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in [name for name in sys.modules if name.split(".")[0] == "ethosu"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "ethosu", None)
    with pytest.raises(ArmBackendError, match=r"cannot be imported.*pip install 'arm-recipes\[ethosu\]'"):
        EthosUCompileSpec("ethos-u55-128", config_ini="Arm/vela.ini")


def test_missing_vela(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "ethosu").mkdir()
    (tmp_path / "ethosu" / "__init__.py").write_text("")
    monkeypatch.syspath_prepend(str(tmp_path))
    for name in [name for name in sys.modules if name.split(".")[0] == "ethosu"]:
        monkeypatch.delitem(sys.modules, name)
    worker = vela.Worker(Path(vela.__file__).with_name("vela_process.py"))
    monkeypatch.setattr(vela, "_worker", worker)
    try:
        with pytest.raises(ArmBackendError, match=r"cannot be imported.*pip install 'arm-recipes\[ethosu\]'"):
            EthosUCompileSpec("ethos-u55-128", extra_flags=[])
        with pytest.raises(ArmBackendError, match=r"cannot be imported.*pip install 'arm-recipes\[ethosu\]'"):
            vela.parse_command_line(())
    finally:
        worker.close()
