"""``inspect_program``: data, text, HTML and command line, for exported and for damaged programs."""

from __future__ import annotations

import importlib.metadata
import json
import random
import re
from pathlib import Path

import pytest

from arm_recipes.cli.main import main
from arm_recipes.runtime import build, tosa_flatbuffer
from arm_recipes.runtime.errors import PayloadError, RuntimeUnavailable
from arm_recipes.runtime.ethosu_payload import EthosUPayload, EthosUTensor, read_payload
from arm_recipes.runtime.inspect import DelegateInspection, inspect_program
from arm_recipes.runtime.pte import ProgramError, read_program
from arm_recipes.runtime.tensor_info import TensorInfo
from arm_recipes.runtime.tosa_flatbuffer import TosaPayload, read_tosa_payload
from arm_recipes.runtime.vgf_payload import VgfPayload, read_vgf
from tests.runtime.pte_programs import NAMES, program, rewrite_program
from tests.runtime.schemas import assert_fields_match

pytestmark = pytest.mark.xdist_group("pte_programs")  # each process makes them anew


def _only_delegate(name: str) -> DelegateInspection:
    (delegate,) = inspect_program(program(name)).methods[0].delegates
    return delegate


def _payload(name: str) -> memoryview:
    return next(method for method in read_program(program(name)).methods.values() if method.delegates).delegates[0].data


def test_inspection_of_a_tosa_delegate() -> None:
    delegate = _only_delegate("tosa")
    assert isinstance(delegate.payload, TosaPayload)
    assert delegate.payload.version == "1.0.0"
    (source,), (result,) = delegate.payload.inputs, delegate.payload.outputs
    assert (source.dtype, source.shape, result.dtype, result.shape) == ("int8", (1, 3, 8, 8), "int16", (1, 4))
    assert delegate.compile_specs["tosa_spec"] == "TOSA-1.0+INT+int16"
    method = inspect_program(bytearray(program("tosa"))).methods[0]
    assert method.inputs == (TensorInfo("x", "float32", (1, 3, 8, 8)),)
    assert method.operators == ("cortex_m::quantize_per_tensor.out", "cortex_m::dequantize_per_tensor.out")
    assert method.planned_bytes > 0


def test_tosa_operators_are_counted_as_the_serializer_does() -> None:
    from tosa.TosaGraph import TosaGraph

    payload = _payload("tosa")
    block = TosaGraph.GetRootAs(payload, 0).Regions(0).Blocks(0)
    assert read_tosa_payload(payload).operators == block.OperatorsLength() > 5


def test_field_numbers_of_tosa_are_those_of_its_schema() -> None:
    found = [path for path in importlib.metadata.files("tosa-tools") or () if path.name == "tosa.fbs"]
    text = found[0].read_text()
    assert_fields_match(tosa_flatbuffer, text)
    enumeration = re.search(r"enum DType[^{]*\{([^}]*)\}", text)
    assert enumeration is not None
    members = re.findall(r"^\s*(\w+)", enumeration[1], re.MULTILINE)
    for number, name in tosa_flatbuffer._TOSA_DTYPES.items():
        ours = name.upper().replace("BFLOAT16", "BF16").replace("FLOAT8_E5M2", "FP8E5M2")
        assert members[number] == ours.replace("FLOAT8_E4M3FN", "FP8E4M3").replace("FLOAT", "FP")


def test_inspection_of_an_ethosu_delegate() -> None:
    inspection = inspect_program(program("ethosu"))
    payload = inspection.methods[0].delegates[0].payload
    assert isinstance(payload, EthosUPayload)
    assert (payload.product, payload.macs, payload.stream) == (55, 128, "COP1")
    blocks = _blocks(bytes(_payload("ethosu")))
    assert payload.command_bytes == len(blocks["cmd_data"])
    assert payload.weight_bytes == len(blocks["weight_data"])
    assert payload.scratch_bytes == int.from_bytes(blocks["scratch_size"], "little")
    (source,), (result,) = payload.inputs, payload.outputs
    assert isinstance(source, EthosUTensor)
    assert _elements(source.shape) == 3 * 8 * 8
    assert _elements(result.shape) == 4
    assert (source.element_size, source.region) == (1, 1)
    assert inspection.methods[0].operators == ()


def _elements(shape: tuple[int, ...]) -> int:
    count = 1
    for dimension in shape:
        count *= dimension
    return count


def _blocks(payload: bytes) -> dict[str, bytes]:
    blocks, at = {}, 0
    while at < len(payload):
        count = int.from_bytes(payload[at + 16 : at + 20], "little")
        blocks[payload[at : at + 16].rstrip(b"\0").decode()] = payload[at + 32 : at + 32 + count]
        at += 32 + -(-count // 16) * 16
    return blocks


def test_inspection_has_the_quantization_of_inputs_and_outputs() -> None:
    inspection = inspect_program(program("ethosu"))
    method, constants = inspection.methods[0], read_program(program("ethosu")).methods
    for side, (tensor,) in (("input", method.inputs), ("output", method.outputs)):
        assert isinstance(tensor, TensorInfo)
        assert (tensor.scale,) == constants[f"forward_{side}0_scale"].constants
        assert (tensor.zero_point,) == constants[f"forward_{side}0_zp"].constants
        assert tensor.dtype == "int8"
    assert inspection.constants == {}


def test_inspection_of_a_vgf_delegate() -> None:
    payload = _only_delegate("vgf").payload
    assert isinstance(payload, VgfPayload)
    assert [(t.dtype, t.shape) for t in payload.inputs] == [("int8", (1, 3, 8, 8))]
    assert [(t.dtype, t.shape) for t in payload.outputs] == [("int16", (1, 4))]
    assert payload.segments == 1
    # The constants are the weights and biases, and little else.
    assert 8 * 27 + 8 * 4 + 32 + 4 * 4 <= payload.constant_bytes < 2000


def test_inspection_of_other_backends_and_constant_methods() -> None:
    delegate = _only_delegate("xnnpack")
    assert (delegate.backend, delegate.payload, delegate.problem) == ("XnnpackBackend", None, None)
    assert inspect_program(program("xnnpack")).methods[0].inputs == (TensorInfo("input0", "float32", (1, 8)),)
    inspection = inspect_program(program("tosa"))
    assert inspection.constants["label"] == ("digits",)
    assert inspect_program(program("xnnpack")).named_data


def test_inspection_lists_all_methods() -> None:
    inspection = inspect_program(program("segments"))
    assert [method.name for method in inspection.methods] == ["encode", "sort"]
    assert [len(method.delegates) for method in inspection.methods] == [1, 2]
    assert inspection.methods[1].operators == ("aten::topk.values",)
    assert inspection.named_data == {"weights": 200}
    assert "Delegate 1 of 'sort': TOSABackend" in str(inspection)


def test_inspection_has_the_stored_names() -> None:
    names = {"methods": {"forward": {"inputs": ["picture"], "outputs": ["digit"]}}}
    method = inspect_program(
        rewrite_program(program("ethosu"), named_data={"arm_recipes": json.dumps(names).encode()})
    ).methods[0]
    assert (method.inputs[0].name, method.outputs[0].name) == ("picture", "digit")


@pytest.mark.parametrize(
    "stored",
    [
        b"\xff\xff",
        b"{",
        b"[" * 100_000,
        b"7",
        b'{"methods": []}',
        b'{"methods": {"forward": []}}',
        b'{"methods": {"forward": {"inputs": ["a", "b"], "outputs": "x"}}}',
        b'{"methods": {"forward": {"inputs": [1], "outputs": null}}}',
    ],
    ids=lambda stored: stored[:12].decode(errors="replace"),
)
def test_invalid_stored_names_are_ignored(stored: bytes) -> None:
    method = inspect_program(rewrite_program(program("ethosu"), named_data={"arm_recipes": stored})).methods[0]
    assert (method.inputs[0].name, method.outputs[0].name) == ("input0", "output0")


def test_inspection_as_text_and_html() -> None:
    inspection = inspect_program(program("ethosu"))
    text = str(inspection)
    for line in (
        "Inputs and outputs\n  in   x        int8[1, 3, 8, 8] scale=",
        "Delegate 0: EthosUBackend\n",
        "  target          Ethos-U55, 128 MACs\n",
        "Kernels on the CPU: 0\n  none\n",
        f"planned memory  {inspection.methods[0].planned_bytes:,} B",
    ):
        assert line in text
    assert "<h4>Delegate 0: EthosUBackend</h4><table><tr><td>payload</td>" in inspection._repr_html_()


def test_control_characters_in_names_are_escaped() -> None:
    names = {"methods": {"forward": {"inputs": ["a\x1b[2J\nb"], "outputs": ["<b>é"]}}}
    inspection = inspect_program(
        rewrite_program(program("ethosu"), named_data={"arm_recipes": json.dumps(names).encode()})
    )
    assert r"a\x1b[2J\nb" in str(inspection)
    assert "\x1b" not in str(inspection)
    assert "&lt;b&gt;é" in inspection._repr_html_()


@pytest.mark.parametrize("name", NAMES)
def test_inspection_to_dict_is_json(name: str) -> None:
    inspection = inspect_program(program(name))
    decoded = json.loads(json.dumps(inspection.to_dict()))
    assert decoded["program_bytes"] == len(program(name))
    assert [method["name"] for method in decoded["methods"]] == [method.name for method in inspection.methods]


@pytest.mark.parametrize(
    ("name", "at", "reason"),
    [
        ("tosa", 4, "not a TOSA flatbuffer"),
        ("vgf", 0, "not a VGF file"),
        ("vgf", 40, "a section of the VGF file ends at"),
    ],
)
def test_damaged_payload_does_not_hide_the_rest_of_the_program(name: str, at: int, reason: str) -> None:
    inspection = inspect_program(_with_damaged_payload(name, at))
    delegate = inspection.methods[0].delegates[0]
    assert delegate.payload is None
    assert reason in (delegate.problem or "")
    assert re.search(rf"\n  unreadable payload +.*{re.escape(reason)}", str(inspection))
    assert inspection.methods[0].operators == inspect_program(program(name)).methods[0].operators


def test_damaged_ethosu_payload_is_reported() -> None:
    delegate = inspect_program(_with_damaged_payload("ethosu", 2)).methods[0].delegates[0]
    assert delegate.payload is None
    assert delegate.problem
    with pytest.raises(PayloadError):
        read_payload(b"")


def _with_damaged_payload(name: str, at: int) -> bytes:
    """A program in whose payload all bits of eight bytes, from ``at`` on, are inverted."""
    data = bytearray(_payload(name))
    data[at : at + 8] = bytes(byte ^ 0xFF for byte in data[at : at + 8])
    return rewrite_program(program(name), payload=bytes(data))


def test_inspection_needs_no_compiler(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable() -> None:
        raise RuntimeUnavailable("there is no compiler")

    monkeypatch.setattr(build, "build_plugin", unavailable)
    assert isinstance(_only_delegate("ethosu").payload, EthosUPayload)


@pytest.mark.parametrize(
    ("specs", "size", "text"),
    [
        ({"fast_scratch_size": b"\0\4\0\0"}, 1024, r"\n  fast scratch +1,024 B\n"),
        ({"fast_scratch_size": bytes(4)}, 0, None),
        ({}, None, r"\n  fast scratch +unknown\n"),
    ],
)
def test_inspection_has_the_fast_scratch_size_of_the_compile_spec(
    specs: dict[str, bytes], size: int | None, text: str | None
) -> None:
    """The stream of an Ethos-U55 or U65 does not contain the size."""
    inspection = inspect_program(rewrite_program(program("ethosu"), compile_specs=specs))
    payload = inspection.methods[0].delegates[0].payload
    assert isinstance(payload, EthosUPayload)
    assert payload.fast_scratch_bytes == size
    assert "fast_scratch_size" not in str(inspection)
    if text is None:
        assert "fast scratch" not in str(inspection)
    else:
        assert re.search(text, str(inspection))


def test_fast_scratch_spec_of_wrong_length_is_reported() -> None:
    inspection = inspect_program(rewrite_program(program("ethosu"), compile_specs={"fast_scratch_size": b"1024 "}))
    problem = inspection.methods[0].delegates[0].problem
    assert problem == "damaged: the compile spec fast_scratch_size has 5 bytes, not 4"


@pytest.mark.parametrize("name", ["tosa", "vgf", "ethosu"])
def test_bit_flips_in_payloads_raise_only_payload_errors(name: str) -> None:
    reader = {"tosa": read_tosa_payload, "vgf": read_vgf, "ethosu": read_payload}[name]
    data, flips, refused = bytes(_payload(name)), random.Random(0), 0
    for attempt in range(1500):
        damaged = bytearray(data)
        damaged[flips.randrange(len(data) if attempt % 2 else 400)] ^= 1 << flips.randrange(8)
        try:
            reader(memoryview(damaged))
        except PayloadError:
            refused += 1
    assert refused > 50


@pytest.mark.parametrize("name", ["tosa", "vgf", "ethosu"])
def test_truncated_payload_is_refused(name: str) -> None:
    reader = {"tosa": read_tosa_payload, "vgf": read_vgf, "ethosu": read_payload}[name]
    data = _payload(name)
    for length in range(0, len(data) // 2, 7):
        with pytest.raises(PayloadError):
            reader(data[:length])


def test_inspect_program_accepts_paths_and_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(program("tosa"))
    assert inspect_program(path) == inspect_program(str(path)) == inspect_program(program("tosa"))
    monkeypatch.setenv("HOME", str(tmp_path))
    assert inspect_program("~/model.pte") == inspect_program(path)
    path.write_bytes(b"nothing of the kind")
    with pytest.raises(
        ProgramError, match=r"model.pte': not an ExecuTorch program \(magic b'ing ', expected b'ET12'\)"
    ):
        inspect_program(path)
    with pytest.raises(ValueError, match=r"cannot read '.*none': No such file or directory"):
        inspect_program(tmp_path / "none")


def test_inspect_command(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "model.pte"
    path.write_bytes(program("tosa"))
    assert main(["inspect", str(path)]) == 0
    assert capsys.readouterr().out == f"{inspect_program(path)}\n"
    assert main(["inspect", str(path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == json.loads(json.dumps(inspect_program(path).to_dict()))
    path.write_bytes(program("tosa")[:-1])
    assert main(["inspect", str(path)]) == 2
    assert f"error: '{path}': truncated" in capsys.readouterr().err
