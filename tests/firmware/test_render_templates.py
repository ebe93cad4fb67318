"""Files of a firmware folder: their content, and that compilers accept them."""

from __future__ import annotations

import json
import re
import zlib
from pathlib import Path

import pytest
import torch

from arm_backend_core.workers import vela
from arm_recipes import ExportResult, Firmware, save_firmware
from arm_recipes.firmware import render_templates
from arm_recipes.firmware.memory_pools import MethodPools, ProgramPools
from arm_recipes.firmware.render_templates import PAYLOAD_FORMAT, format_array, to_c_identifier
from arm_recipes.runtime.method_memory import TYPE_LAYOUTS
from tests.firmware import cortex_m_programs
from tests.firmware.programs import program, samples
from tests.firmware.qemu import TARGET
from tests.firmware.zephyr_module import build_zephyr_library, read_sizes
from tests.runtime.cpp_build import RUNTIME, executorch_include_flags, require, run

pytestmark = pytest.mark.xdist_group("firmware")
#: Warnings of C sources, which users compile with their own flags.
_STRICT = ["-Wall", "-Wextra", "-Wpedantic", "-Wconversion", "-Wshadow", "-Werror", "-c"]
_LANGUAGES = {"c11": ["-x", "c", "-std=c11"], "c++17": ["-x", "c++", "-std=c++17"]}
_TEMPLATES = Path(render_templates.__file__).parent / "templates"
_CPP = ["-std=c++17", f"-I{RUNTIME}", *executorch_include_flags()]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Firmware]:
    """Firmware folders of several kinds of programs."""
    root = tmp_path_factory.mktemp("saved")
    names = ("float_u55", "quantized_u85", "mixed_u85", "methods_u55", "fast_scratch_u65", "cpu_between_u85")
    return {name: program(name).save_firmware(root / name, samples(name)) for name in names}


def _text(firmware: Firmware, name: str) -> str:
    return (Path(firmware.folder) / name).read_text()


def _define(text: str, name: str) -> str:
    """Return the value of a macro of model.h."""
    return re.findall(rf"^#define {name} (.*)$", text, re.M)[-1]


@pytest.mark.parametrize("compiler", ["gcc", "arm-none-eabi-gcc"])
@pytest.mark.parametrize("language", _LANGUAGES)
@pytest.mark.parametrize("name", ["float_u55", "quantized_u85", "mixed_u85", "methods_u55"])
def test_c_compiles_without_a_warning(
    saved: dict[str, Firmware], tmp_path: Path, name: str, language: str, compiler: str
) -> None:
    tool = require(compiler, "gcc" if compiler == "gcc" else "gcc-arm-none-eabi")
    for source in ("model.c", "golden.c"):
        path = str(Path(saved[name].folder) / source)
        run([tool, *_LANGUAGES[language], *_STRICT, path, "-o", str(tmp_path / "object.o")])


_COMPARISON = """
#include <cmath>
#include <cstdint>
#include <cstring>
#define ARM_MODEL_FLOAT_TOLERANCE 1e-3f
namespace executorch::aten { enum class ScalarType : int8_t { Float = 6 }; }
struct arm_model_tensor { int8_t scalar_type; uint32_t bytes; };
FUNCTION
bool is_close(float a, float b) {
  const float actual[] = {1.0f, a}, expected[] = {1.0001f, b};
  return is_close({6, sizeof(actual)}, reinterpret_cast<const uint8_t*>(actual),
                  reinterpret_cast<const uint8_t*>(expected));
}
int main() {
  const bool finite = is_close(2.0f, 2.001f) && !is_close(2.0f, 2.01f);
  const bool infinite = is_close(INFINITY, INFINITY) && is_close(-INFINITY, -INFINITY);
  const bool different = is_close(3.0f, INFINITY) || is_close(-INFINITY, INFINITY) || is_close(INFINITY, 3.0f);
  const bool nan = is_close(NAN, NAN) && !is_close(NAN, 1.0f) && !is_close(1.0f, NAN);
  return finite && infinite && !different && nan ? 0 : 1;
}
"""


def test_the_self_test_compares_infinities_exactly(tmp_path: Path) -> None:
    """The other value of each output differs by less than the tolerance."""
    template = (_TEMPLATES / "self_test.cpp").read_text()
    function = re.search(r"^bool is_close\(.*?^}", template, re.M | re.S)
    assert function is not None
    source = tmp_path / "comparison.cpp"
    source.write_text(_COMPARISON.replace("FUNCTION", function[0]))
    run([require("g++", "g++"), "-std=c++17", str(source), "-o", str(tmp_path / "comparison")])
    run([str(tmp_path / "comparison")])


@pytest.mark.parametrize("compiler", ["g++", "arm-none-eabi-g++"])
def test_the_self_test_compiles_with_the_assumed_type_sizes(
    saved: dict[str, Firmware], tmp_path: Path, compiler: str
) -> None:
    """arm_model_layout.h asserts them, for pointers of 32 and 64 bits."""
    tool = require(compiler, "g++" if compiler == "g++" else "gcc-arm-none-eabi")
    flags = [*_CPP, *_STRICT, "-Wno-unused-parameter", *(TARGET if compiler != "g++" else [])]
    for firmware in saved.values():
        run([tool, *flags, f"{firmware.folder}/self_test.cpp", "-o", str(tmp_path / "object.o")])
    asserts = _text(saved["float_u55"], "arm_model_layout.h")
    assert asserts.count("ARM_MODEL_HAS_LAYOUT(") - 1 == sum(len(layout.named) for layout in TYPE_LAYOUTS.values())


@pytest.mark.parametrize(
    ("name", "old", "new", "message"),
    [
        ("arm_model_layout.h", "(16, 8, executorch::runtime::EV", "(24, 8, executorch::runtime::EV", "install 1."),
        ("model.h", "EXECUTORCH_MINOR 5", "EXECUTORCH_MINOR 99", "exported with another minor version of ExecuTorch"),
        ("model.h", f"PAYLOAD_FORMAT {PAYLOAD_FORMAT}", "PAYLOAD_FORMAT 99", "payloads of another format"),
        (
            "arm_model_layout.h",
            "kMethodAllocatorBytes == 168",
            "kMethodAllocatorBytes == 8",
            "build with the backend in backend/",
        ),
    ],
    ids=["types", "executorch", "payload", "backend"],
)
def test_another_version_does_not_compile(
    saved: dict[str, Firmware], tmp_path: Path, name: str, old: str, new: str, message: str
) -> None:
    firmware = saved["float_u55"]
    for header in ("model.h", "golden.h", "self_test.cpp", "arm_model_layout.h"):
        (tmp_path / header).write_text(_text(firmware, header))
    text = _text(firmware, name)
    assert old in text
    (tmp_path / name).write_text(text.replace(old, new))
    built_with = ["-DARM_MODEL_BUILT_WITH_MAJOR=1", "-DARM_MODEL_BUILT_WITH_MINOR=5"]
    with pytest.raises(AssertionError, match=re.escape(message)):
        run([require("g++", "g++"), *_CPP, *built_with, "-fsyntax-only", str(tmp_path / "self_test.cpp")])


def test_model_h_describes_the_program(saved: dict[str, Firmware]) -> None:
    firmware = saved["quantized_u85"]
    text, info = _text(firmware, "model.h"), program("quantized_u85").inputs[0]
    content = (Path(firmware.folder) / "model.pte").read_bytes()
    assert content == program("quantized_u85").buffer
    assert _define(text, "ARM_MODEL_NPU") == '"Ethos-U85-256"'
    assert _define(text, "ARM_MODEL_STREAM_FORMAT") == '"COP1"'
    assert _define(text, "ARM_MODEL_VELA_VERSION") == f'"{vela.version()}"'
    assert _define(text, "ARM_MODEL_EXECUTORCH_VERSION").startswith('"1.5.')
    assert _define(text, "ARM_MODEL_STREAM_ARCHITECTURE") == '"2.0.0"'
    assert _define(text, "ARM_MODEL_PTE_SIZE") == f"{len(content)}u"
    assert _define(text, "ARM_MODEL_PTE_CRC32") == f"0x{zlib.crc32(content):08X}u"
    assert info.scale is not None
    scale = float(_define(text, "ARM_MODEL_FORWARD_INPUT0_SCALE").removesuffix("f"))
    assert torch.tensor(scale) == torch.tensor(info.scale)
    assert _define(text, "ARM_MODEL_FORWARD_INPUT0_ZERO_POINT") == f"({info.zero_point})"
    assert _define(text, "ARM_MODEL_FORWARD_INPUT0_SHAPE") == "{1, 3, 8, 8}"
    assert _define(text, "ARM_MODEL_FORWARD_OUTPUT0_BYTES") == "4u"
    assert _define(text, "ARM_MODEL_TEMP_POOL_SIZE") == f"{firmware.pools.temp}u"


@pytest.mark.parametrize(
    ("name", "selected", "ours"),
    [("float_u55", "", "ON"), ("quantized_u85", "", "OFF"), ("cpu_between_u85", "aten::topk.values", "ON")],
)
def test_kernels_are_options_of_the_build(saved: dict[str, Firmware], name: str, selected: str, ours: str) -> None:
    options = _text(saved[name], "executorch_options.cmake")
    assert re.findall(r'^set\(EXECUTORCH_SELECT_OPS_LIST "(.*?)"', options, re.M) == [selected]
    assert f"set(ARM_RUNTIME_CORTEX_M_KERNELS {ours})" in _text(saved[name], "CMakeLists.txt")
    assert f"default {'y' if ours == 'ON' else 'n'}\n" in _text(saved[name], "zephyr/Kconfig")


def test_folder_of_a_program_without_an_npu(tmp_path: Path) -> None:
    """The folder has the program's kernels, and neither driver nor backend."""
    firmware = cortex_m_programs.program("small").save_firmware(tmp_path / "firmware")
    assert not firmware.kernels.others
    folders = ("backend/backends", "backend/emulator", "backend/payload")
    assert not [name for name in firmware.files if name.startswith(folders)]
    for name in firmware.files:
        if not name.startswith("backend/") and not name.endswith("pte"):
            assert not re.findall(r"ethos.?u|vela\b|fast.scratch|@\w+\??@", _text(firmware, name), re.I), name
    symbols = re.findall(r'KERNEL_LIST "(.*)"', _text(firmware, "CMakeLists.txt"))
    assert symbols == [";".join(name.split("::")[1].removesuffix(".out") for name in firmware.kernels.cortex_m)]
    assert "KERNEL(softmax)" in _text(firmware, "zephyr/CMakeLists.txt")
    assert (_define(_text(firmware, "model.h"), "ARM_MODEL_ISA"), firmware.versions.target) == ("2", "Cortex-M55, mve")
    assert "Vela" not in str(firmware)


def test_scratch_memory_for_another_instruction_set_does_not_compile(tmp_path: Path) -> None:
    """With ExecuTorch's kernels, whose scratch memory depends on it; the kernels in the folder use none."""
    result = cortex_m_programs.program("small", "cortex-m4")
    folder = Path(result.save_firmware(tmp_path / "firmware").folder)
    compiler = [require("arm-none-eabi-g++", "gcc-arm-none-eabi"), *_CPP, *TARGET, "-fsyntax-only"]
    run([*compiler, str(folder / "self_test.cpp")])
    with pytest.raises(AssertionError, match="built for another instruction set than the program"):
        run([*compiler, "-DARM_MODEL_CMSIS_NN_KERNELS", str(folder / "self_test.cpp")])


def test_the_manifest_and_the_printed_form(saved: dict[str, Firmware]) -> None:
    firmware = saved["methods_u55"]
    manifest = json.loads(_text(firmware, "firmware.json"))
    assert manifest["pools"] == firmware.to_dict()["pools"]
    assert sorted(manifest["sha256"]) == list(firmware.files)
    for shown in (str(firmware), firmware._repr_html_()):
        for text in ("Ethos-U55-128", "method allocator of 'between'", "aten::topk.values", "5 cases"):
            assert text in shown.replace("&#x27;", "'")


def test_all_fields_of_templates_are_filled(saved: dict[str, Firmware]) -> None:
    for firmware in saved.values():
        for name in firmware.files:
            if not name.endswith(("pte", "cpp", "hpp")):
                assert not re.findall(r"@[A-Z_0-9]+@", _text(firmware, name)), name


def test_the_linker_script_counts_outputs_of_the_application() -> None:
    """``plan_outputs=False``: the self-test places them in the section of the pools."""
    pools = ProgramPools((MethodPools("forward", 10, 20, 300),), (4_000,), 50_000, 60_000, 0, 600_000, False, True)
    assert render_templates._memory_placeholders(pools)["POOL_BYTES"] == "654310"


def test_text_in_c_is_escaped() -> None:
    assert to_c_identifier("näme 1") == "nu e4meu201".replace(" ", "")
    assert format_array(b"") == "0"
    assert format_array(bytes(range(3))) == "0,1,2"


def test_zephyr_sources_compile(saved: dict[str, Firmware], tmp_path: Path) -> None:
    """With stubs of Zephyr's CMake functions, since Zephyr is not installed."""
    firmware = saved["mixed_u85"]
    folder = Path(firmware.folder)
    module = dict(re.findall(r"^ *(\w+): (\S+)$", (folder / "zephyr/module.yml").read_text(), re.M))
    assert module["name"] == "arm_model"
    assert (folder / module["kconfig"]).is_file()
    kconfig = (folder / "zephyr/Kconfig").read_text()
    assert ("ARM_MODEL_TEMP_POOL_SIZE", str(firmware.pools.temp)) in read_sizes(kconfig)
    fragments, library = build_zephyr_library(firmware, tmp_path)
    assert fragments == []
    symbols = run(["arm-none-eabi-nm", "-C", str(library)])
    for symbol in ("T arm_model_self_test", "R arm_model_pte", "arm_runtime_ethosu_registered"):
        assert symbol in symbols


def test_float_samples_are_quantized_for_integer_inputs(tmp_path: Path) -> None:
    result = program("quantized_u85")
    x = torch.linspace(-1, 1, 192).reshape(1, 3, 8, 8)
    firmware = result.save_firmware(tmp_path / "firmware", [(x,)])
    assert format_array(result.inputs[0].quantize(x).numpy().tobytes()) in _text(firmware, "golden.c")


def test_the_bundled_program_has_the_cases(saved: dict[str, Firmware]) -> None:
    from executorch.devtools.bundled_program.serialize import deserialize_from_flatbuffer_to_bundled_program

    firmware = saved["methods_u55"]
    folder = Path(firmware.folder)
    bundle = deserialize_from_flatbuffer_to_bundled_program((folder / "model.bpte").read_bytes())
    assert bundle.program == (folder / "model.pte").read_bytes()
    assert {suite.method_name: len(suite.test_cases) for suite in bundle.method_test_suites} == {
        "first": 3,
        "between": 2,
    }
    (output,) = bundle.method_test_suites[0].test_cases[0].expected_outputs
    assert format_array(bytes(output.val.data)) in _text(firmware, "golden.c")


def test_firmware_of_a_saved_program_file(tmp_path: Path) -> None:
    """The file does not state its version of Vela."""
    result: ExportResult = program("quantized_u85")
    path = result.save(tmp_path / "model.pte")
    sample = result.inputs[0].quantize(torch.ones(1, 3, 8, 8))
    firmware = save_firmware(path, tmp_path / "firmware", [(sample,)])
    assert firmware.pools == save_firmware(result, tmp_path / "other").pools
    assert firmware.versions.vela == "unknown"
    assert format_array(sample.numpy().tobytes()) in _text(firmware, "golden.c")
