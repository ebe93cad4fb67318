"""Compile specs: defaults, what is stored in the program, and a message for every bad argument."""

from __future__ import annotations

import copy
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from arm_backend_core.targets import vela_config
from arm_backend_core.targets.compile_spec import (
    ArmCompileSpec,
    EthosUCompileSpec,
    TosaCompileSpec,
    VgfCompileSpec,
)

_INI = """
[System_Config.My_Board]
core_clock=400e6
axi0_port=Sram
axi1_port=Dram
[Memory_Mode.Mine]
const_mem_area=Axi1
arena_mem_area=Axi0
cache_mem_area=Axi0
[Memory_Mode.Spill]
const_mem_area=Axi1
arena_mem_area=Axi1
cache_mem_area=Axi0
arena_cache_size=65536
"""


@pytest.fixture
def board(tmp_path: Path) -> str:
    path = tmp_path / "board.ini"
    path.write_text(_INI)
    return str(path)


def test_import_loads_no_heavy_modules() -> None:
    script = (
        "import sys, arm_backend_core.targets.compile_spec\n"
        "heavy = {'torch', 'executorch', 'ethosu', 'numpy', 'tosa_serializer'} & set(sys.modules)\n"
        "sys.exit(str(heavy) if heavy else 0)"
    )
    subprocess.run([sys.executable, "-c", script], check=True, cwd=Path(__file__).parents[2])


@pytest.mark.parametrize(
    ("target", "system_config", "memory_mode"),
    [
        ("ethos-u55-128", "Ethos_U55_High_End_Embedded", "Shared_Sram"),
        ("ethos-u65-256", "Ethos_U65_High_End", "Dedicated_Sram_384KB"),
        ("ethos-u85-256", "Ethos_U85_SYS_DRAM_Mid", "Sram_Only"),
    ],
)
def test_defaults_per_family(target: str, system_config: str, memory_mode: str) -> None:
    spec = EthosUCompileSpec(target)
    assert (spec.system_config, spec.memory_mode) == (system_config, memory_mode)
    assert spec.target.family == target.rpartition("-")[0]
    assert spec.target.has_int_profile
    assert not spec.target.has_fp_profile
    assert {"int16", "int4"} <= spec.target.extensions


def test_every_npu_of_vela_is_accepted_with_its_defaults() -> None:
    from ethosu.vela import architecture_features

    assert [npu.name for npu in vela_config.list_npus()] == architecture_features.Accelerator.member_list()
    for npu in vela_config.list_npus():
        spec = EthosUCompileSpec(npu.name.upper())
        assert spec.accelerator == npu.name
        assert spec.configuration.core_clock > 0  # Vela accepts the defaults, which the constructor does not check
        assert spec.configuration == vela_config.resolve_configuration(
            npu, spec.system_config, spec.memory_mode, spec.extra_flags, spec.config_ini
        )


def test_user_config_file_is_read(board: str) -> None:
    spec = EthosUCompileSpec("ethos-u55-64", "My_Board", "Mine", config_ini=board)
    assert spec.configuration.core_clock == 400e6
    assert vela_config.list_sections(board, vela_config.SYSTEM_CONFIG) == ("My_Board",)
    assert vela_config.list_sections(board, vela_config.MEMORY_MODE) == ("Mine", "Spill")


def test_flags_reach_the_compiler() -> None:
    spec = EthosUCompileSpec(
        "ethos-u85-256", extra_flags=["--optimise Size", "--arena-cache-size=100000", "--disable-chaining"]
    )
    options = spec.configuration.options
    assert "optimize=Size" in options
    assert "arena_size_limit=100000" in options
    assert "disable_feature=Grouping" in options
    assert spec.configuration.arena_cache_size == 100000


def _u55(**kwargs: Any) -> EthosUCompileSpec:
    return EthosUCompileSpec("ethos-u55-128", **kwargs)


_BAD: list[tuple[Callable[[], object], list[str]]] = [
    (
        lambda: EthosUCompileSpec("ethos-u55-512"),
        ["target='ethos-u55-512'", "512 MACs", "did you mean 'ethos-u55-256'?", "ethos-u55-32"],
    ),
    (lambda: EthosUCompileSpec("ethos-u85"), ["target", "number of MACs is missing", "ethos-u85-2048"]),
    (lambda: EthosUCompileSpec("ethos-u66-128"), ["target='ethos-u66-128'", "knows no such NPU"]),
    (lambda: EthosUCompileSpec("cortex"), ["target='cortex'", "Allowed: ethos-u55-32"]),
    (lambda: EthosUCompileSpec(55), ["target=55", "must be a string"]),  # type: ignore[arg-type]
    (
        lambda: _u55(memory_mode="Dedicated_Sram"),
        ["memory_mode='Dedicated_Sram'", "can write to SRAM only", "Allowed: Sram_Only, Shared_Sram"],
    ),
    (lambda: _u55(memory_mode="shared_sram"), ["memory_mode", "did you mean 'Shared_Sram'?"]),
    (
        lambda: _u55(system_config="Ethos_U85_SYS_DRAM_Mid"),
        ["system_config", "ethos-u85", "target is ethos-u55-128", "Ethos_U55_Deep_Embedded"],
    ),
    (
        lambda: _u55(system_config="Ethos_U55_High_End"),
        ["system_config", "not in", "did you mean 'Ethos_U55_High_End_Embedded'?"],
    ),
    (lambda: _u55(config_ini="Arm/vella.ini"), ["config_ini", "tried", "did you mean 'Arm/vela.ini'?"]),
    (lambda: _u55(config_ini=__file__), ["config_ini", "'.ini'"]),
    (lambda: _u55(extra_flags=["--optimize=Size"]), ["extra_flags", "unrecognized", "'--optimise'"]),
    (lambda: _u55(extra_flags=["--optimise=Fast"]), ["extra_flags", "'Fast'", "Size, Performance"]),
    (lambda: _u55(extra_flags=["--optimise"]), ["extra_flags", "expected one argument"]),
    (lambda: _u55(extra_flags=["model.tflite"]), ["extra_flags", "unrecognized", "model.tflite"]),
    (lambda: _u55(extra_flags=["--version"]), ["extra_flags", "exit without compiling"]),
    (lambda: _u55(extra_flags=["--list-config-files"]), ["extra_flags", "exit without compiling"]),
    (lambda: _u55(extra_flags=["--memory-mode=Sram_Only"]), ["extra_flags", "'memory_mode'"]),
    (lambda: _u55(extra_flags=["--separate-io-regions"]), ["extra_flags", "COP2"]),
    (lambda: _u55(extra_flags=["--cpu-tensor-alignment=17"]), ["extra_flags", "power of 2"]),
    (lambda: _u55(extra_flags="--optimise=Size"), ["extra_flags", "must be a list"]),
    (lambda: _u55(extra_flags=[1]), ["extra_flags", "not a string"]),
    (lambda: _u55(config_ini=5), ["config_ini=5", "must be a path"]),
    (lambda: vela_config.list_macs("ethos-u66"), ["family='ethos-u66'", "Vela knows no such NPU"]),
    (lambda: TosaCompileSpec("TOSA-1.0+INTS"), ["tosa_spec", "INTS"]),
    (lambda: TosaCompileSpec("TOSA-1.0+int16"), ["tosa_spec", "names no profile; add '+INT', '+FP' or both"]),
    (lambda: VgfCompileSpec(compiler_flags="--x"), ["compiler_flags='--x'", "must be a list of strings"]),
    (lambda: VgfCompileSpec("TOSA-0.80+INT"), ["tosa_spec", "TOSA-1.0"]),
    (
        lambda: VgfCompileSpec(compiler_flags=["--emit-debug-inf"]),
        ["compiler_flags", "did you mean '--emit-debug-info'?"],
    ),
    (lambda: VgfCompileSpec(compiler_flags=["-o x"]), ["compiler_flags", "'-o'"]),
    (lambda: TosaCompileSpec().dump_debug_info("XML"), ["debug_mode='XML'", "JSON, TOSA"]),
]


@pytest.mark.parametrize(("make", "parts"), _BAD, ids=range(len(_BAD)))
def test_bad_argument_is_refused(make: Callable[[], object], parts: list[str]) -> None:
    with pytest.raises(ValueError) as error:  # noqa: PT011 (the parts below are the match)
        make()
    missing = [part for part in parts if part not in str(error.value)]
    assert not missing, str(error.value)


def test_u55_never_spills_to_dram(board: str) -> None:
    # Vela itself accepts this memory mode.
    with pytest.raises(ValueError, match=r"memory_mode='Spill'.*second AXI port.*Allowed: Mine"):
        EthosUCompileSpec("ethos-u55-64", "My_Board", "Spill", config_ini=board)
    assert EthosUCompileSpec("ethos-u65-256", "My_Board", "Spill", config_ini=board)


def test_default_system_config_missing_in_the_user_config_file_is_refused(board: str) -> None:
    with pytest.raises(ValueError, match=r"system_config='Ethos_U55_High_End_Embedded'.*Allowed: My_Board"):
        EthosUCompileSpec("ethos-u55-64", config_ini=board)


def test_invalid_config_file_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "broken.ini"
    path.write_text("core_clock=1\n")
    with pytest.raises(ValueError, match=r"config_ini=.*not a valid Vela configuration"):
        EthosUCompileSpec("ethos-u55-64", config_ini=path)
    path.write_text(_INI.replace("400e6", "fast"))
    with pytest.raises(ValueError, match=r"config_ini=.*'fast'"):
        EthosUCompileSpec("ethos-u55-64", "My_Board", "Mine", config_ini=path)


def test_unreadable_config_file_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "own.ini"
    path.touch()
    monkeypatch.setattr(os, "access", lambda file, mode: False)  # root may read everything
    with pytest.raises(ValueError, match=f"no permission to read '{path}'"):
        vela_config.config_path(path)


def test_missing_config_file_names_the_paths(tmp_path: Path) -> None:
    path = tmp_path / "none.ini"
    with pytest.raises(ValueError, match=rf"tried .*{path}.*Shipped: Arm/vela.ini, Boards/vela.ini"):
        EthosUCompileSpec("ethos-u55-64", config_ini=path)


def test_compile_specs_store_no_folder_of_this_machine(board: str) -> None:
    spec = EthosUCompileSpec("ethos-u55-64", "My_Board", "Mine", config_ini=board)
    stored = [entry.value.decode() for entry in spec.to_list()]
    assert not any(str(Path(board).parent) in value for value in stored), stored
    assert f"--config={Path(board).name}" in " ".join(stored).split()


def test_compile_specs_that_the_program_stores() -> None:
    spec = EthosUCompileSpec("ethos-u85-512").dump_intermediate_artifacts_to("dump")
    spec.dump_debug_info(ArmCompileSpec.DebugMode.JSON)
    entries = {entry.key: entry.value.decode() for entry in copy.deepcopy(spec).to_list()}
    assert entries["target"] == "ethos-u85-512"
    assert entries["output_format"] == "vela"
    assert entries["tosa_spec"].startswith("TOSA-1.0+INT")
    assert "--accelerator-config=ethos-u85-512" in entries["compile_flags"].split()
    assert "--config=Arm/vela.ini" in entries["compile_flags"].split()
    assert "dump" not in entries.values()  # a path of the machine that compiled it
    assert entries["dump_debug_info"] == "JSON"
    assert [entry.key for entry in TosaCompileSpec().to_list()] == ["tosa_spec", "output_format"]


def test_debug_info_needs_a_folder() -> None:
    with pytest.raises(ValueError, match="dump_intermediate_artifacts_to"):
        TosaCompileSpec().dump_debug_info("JSON").to_list()


def test_backend_ids_and_output_formats() -> None:
    specs: list[ArmCompileSpec] = [TosaCompileSpec(), EthosUCompileSpec("ethos-u55-128"), VgfCompileSpec()]
    assert [spec.backend_id for spec in specs] == ["TOSABackend", "EthosUBackend", "VgfBackend"]
    assert [spec.get_output_format() for spec in specs] == ["tosa", "vela", "vgf"]
    assert VgfCompileSpec().target.family == "vgf"
    assert VgfCompileSpec().target.profiles == {"INT", "FP"}
