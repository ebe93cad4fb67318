"""Boards and platforms with an Ethos-U: NPU, Vela configuration and memory sizes, each value with its source.

To add a board, append a ``Board`` to ``_OTHERS``. If Vela's configurations do not describe its memories, add a
``[System_Config]`` to ``arm_backend_core/targets/config_files/Boards/vela.ini``. A value that no document states stays
None. This module must not import PyTorch, because the command line uses it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from arm_backend_core.similar_names import find_similar_names, format_suggestion

_T = TypeVar("_T")
_KIB, _MIB = 1024, 1024**2
_OWN_INI = "Boards/vela.ini"


@dataclass(frozen=True)
class DocumentedValue(Generic[_T]):
    """A documented value and the address of the document."""

    value: _T
    source: str


@dataclass(frozen=True)
class Board:
    """A board or platform with one NPU. For a product with several NPUs, there is one ``Board`` for each NPU.

    Attributes:
        name: value of the recipe option ``board``.
        title: name of the product. If the product has several NPUs, also the NPU or its core.
        family: NPU family, for example ``ethos-u55``.
        macs: MACs per cycle; None if the platform's user chooses them, as on an FVP.
        system_config: Vela's system configuration, which describes clock and memories. None: no document describes
            them, so the recipe's default applies.
        memory_mode: memory mode; None: the default of the recipe.
        sram: bytes of SRAM that NPU and CPU share.
        flash: bytes of memory for the program.
        config_ini: the ``.ini`` with the system configuration.
    """

    name: str
    title: str
    family: str
    macs: DocumentedValue[int] | None = None
    system_config: DocumentedValue[str] | None = None
    memory_mode: DocumentedValue[str] | None = None
    sram: DocumentedValue[int] | None = None
    flash: DocumentedValue[int] | None = None
    config_ini: str | None = None

    @property
    def options(self) -> dict[str, Any]:
        """The recipe options that the board determines. The sizes of SRAM and flash become budgets."""
        figures = {
            "macs": self.macs,
            "system_config": self.system_config,
            "memory_mode": self.memory_mode,
            "sram_budget": self.sram,
            "flash_budget": self.flash,
        }
        known = {name: figure.value for name, figure in figures.items() if figure is not None}
        return known if self.config_ini is None else {**known, "config_ini": self.config_ini}

    @property
    def sources(self) -> dict[str, str]:
        """Address of the document that states each value: ``{"macs": "https://..."}``."""
        names = ("macs", "system_config", "memory_mode", "sram", "flash")
        figures = {name: getattr(self, name) for name in names}
        return {name: figure.source for name, figure in figures.items() if figure is not None}

    def clock(self) -> float | None:
        """The NPU's clock in Hz, from the system configuration; None if the board has no known configuration."""
        from arm_backend_core.targets.compile_spec import DEFAULT_CONFIG_INI
        from arm_backend_core.targets.vela_config import core_clock

        if self.system_config is None:
            return None
        return core_clock(self.config_ini or DEFAULT_CONFIG_INI, self.system_config.value)


def find_board(name: str) -> Board:
    """The board called ``name``; case, ``_`` and spaces do not matter.

    Raises:
        ValueError: there is no such board; the message lists similar names and the options that describe another board.
    """
    problem = find_problem(name)
    if problem is not None:
        raise ValueError(f"board={name!r}: {problem}")
    return BOARDS[_normalize(name)]


def find_problem(name: Any) -> str | None:
    """Return the reason why ``name`` is not the name of a board; None if it is one."""
    if not isinstance(name, str):
        return "not a str"
    normal = _normalize(name)
    if normal in BOARDS:
        return None
    near = [known for known in BOARDS if normal and known.startswith(normal)]
    near = near or _find_boards_sharing_words(normal) or find_similar_names(normal, BOARDS, 3)
    return (
        f"there is no such board{format_suggestion(near) or ';'} 'arm-recipes boards' lists all. For a board that is "
        "not listed, give macs, system_config, memory_mode, config_ini, sram_budget and flash_budget"
    )


def add_board_options(family: str, values: Mapping[str, Any]) -> dict[str, Any]:
    """Add the options of the board ``values["board"]``. The user's options have priority.

    Args:
        family: NPU family of the recipe.
        values: validated options of an Ethos-U recipe with a board; an omitted option is None.

    Raises:
        ValueError: the board has another NPU family or another number of MACs.
    """
    board = find_board(values["board"])
    if board.family != family:
        raise ValueError(
            f"board={board.name!r}: it has an {board.family.title()}; use a recipe of {_family_recipes(board)}"
        )
    if board.macs is not None and values["macs"] not in (None, board.macs.value):
        raise ValueError(f"macs={values['macs']}: board {board.name!r} has {board.macs.value} MACs; omit macs")
    return {**values, **{name: value for name, value in board.options.items() if values.get(name) is None}}


def _family_recipes(board: Board) -> str:
    return f"ETHOSU_{board.family.removeprefix('ethos-').upper()}"


def _find_boards_sharing_words(normal: str) -> list[str]:
    """Return the boards that share the most words (at least two) with a name: "alif-e7-hp" for "alif-ensemble-e7"."""
    words = set(normal.split("-"))
    shared = {known: len(words & set(known.split("-"))) for known in BOARDS}
    most = max(shared.values())
    return [known for known, count in shared.items() if count == most > 1]


def _normalize(name: str) -> str:
    return "-".join(name.lower().replace("_", " ").replace("-", " ").split())


_GITHUB = "https://github.com"
_ZEPHYR = f"{_GITHUB}/zephyrproject-rtos/zephyr/blob"
_ALIF_KIT = f"{_GITHUB}/alifsemi/alif_ml-embedded-evaluation-kit/blob/b1b93fc01d915da47a4f6ea8475c193aef56e871"
_ALIF_VELA = f"{_ALIF_KIT}/scripts/vela/ensemble_vela.ini"
_ALIF_MODE = f"{_ALIF_KIT}/scripts/cmake/platforms/alif/build_configuration.cmake"
_ALIF_PACK = (
    f"{_GITHUB}/alifsemi/alif_ensemble-cmsis-dfp/blob/e6f35e88e7b8b401c33b2d599957261ee9f63311/"
    "AlifSemiconductor.Ensemble.pdsc"
)
_ALIF_MACS = (
    f"{_GITHUB}/alifsemi/sdk-alif/blob/1b20b1db85a38a18f28a8d6fddd5a8c6d4e6cbcd/"
    "samples/modules/tflite-micro/tflm_ethosu/README.rst"
)
_ALIF_E6 = f"{_ZEPHYR}/f8c7d6b0f37cc2a1b7dcf875b33b35500247cf5d/dts/arm/alif/ensemble/ae612fa0e5597ls0.dtsi"
_ARM_FVP = "https://arm-software.github.io/CMSIS-Ethos-U/main/integration/fvp-ethos-setup.html"
_ARM_KIT = f"{_ALIF_KIT}/docs/quick_start.md"  # Alif's copy of Arm's ML embedded evaluation kit
_ARM_SRAM = f"{_ALIF_KIT}/scripts/py/vela_configs.py"
_EXECUTORCH = f"{_GITHUB}/pytorch/executorch/blob/cff6f4dd32e630945b7188512c1f2b4f102b05ad"
_CORSTONE_1000 = "https://lore.kernel.org/r/20260320-dt-corstone1000-a320-v1-5-a549dfcfe8da@kernel.org"
_HIMAX = f"{_GITHUB}/HimaxWiseEyePlus"
_HIMAX_VELA = f"{_HIMAX}/YOLOv8_on_WE2/blob/2483a5ebe99576947ecf7e4564aff9cec93fa373"
_HIMAX_SRAM = (
    f"{_HIMAX}/Seeed_Grove_Vision_AI_Module_V2/blob/d3265e20d75fe20faccbf185d24454ad08b2fda8/"
    "EPII_CM55M_APP_S/device/inc/WE2_device_addr.h"
)
_RA8P1 = f"{_GITHUB}/renesas/ruhmi-framework-mcu/blob/04f60b2cbcff5997e06a631defe860c7430317a2"
_RA8P1_SIZES = f"{_ZEPHYR}/0a04bc0d3d5da72977a958e54f40a444fd3b366b/boards/renesas/ek_ra8p1/doc/index.rst"
_RZG3E = (
    f"{_GITHUB}/renesas/ruhmi-framework-rzg/blob/115a747a80193ce609d221235988cbd9fa784a27/application_examples/"
    "face_detection/exe/model_yolo-fastest/yolo-fastest_192_face_v4/build/IP/compilation/"
    "ethos-u55-256_system_config.ini"
)
# _PSOC is a repository that cites Infineon's ModusToolbox Machine Learning Pack 3.0.0, which is not public.
_PSOC = f"{_GITHUB}/shinjuyeop/Infineon_FastReflex_E84/blob/8c282c2f3a7e213ea2e96035ea5699e130896d40"
_PSOC_VELA = f"{_PSOC}/configs/vela/pse84_u55.ini"
_PSOC_SIZES = "https://doc.qt.io/QtForMCUs/qtul-instructions-psoc-edge-e84.html"
_M55M1 = f"{_GITHUB}/OpenNuvoton/NuML_Toolkit/blob/299554cda3e3e03e087c9cf9a9096cfc7177a4bd/vela"
_M55M1_SIZES = "https://docs.zephyrproject.org/boards/nuvoton/numaker_m55m1/doc/index.html"
_NXP_VELA = f"{_GITHUB}/nxp-imx/ethos-u-vela/blob/a6f65663db123c131cdd12aab6aad9a50470d5c0/ethosu"

_CORSTONE = (
    Board(
        "corstone-300",
        "Arm Corstone-300 (MPS3, FVP), Ethos-U55",
        "ethos-u55",
        system_config=DocumentedValue("Ethos_U55_High_End_Embedded", _ARM_FVP),
        memory_mode=DocumentedValue("Shared_Sram", _ARM_FVP),
        sram=DocumentedValue(2 * _MIB, _ARM_SRAM),
    ),
    Board(
        "corstone-300-u65",
        "Arm Corstone-300 (FVP), Ethos-U65",
        "ethos-u65",
        system_config=DocumentedValue("Ethos_U65_Embedded", _ARM_FVP),
        memory_mode=DocumentedValue("Shared_Sram", _ARM_FVP),
        sram=DocumentedValue(2 * _MIB, _ARM_SRAM),
    ),
    Board(
        "corstone-310",
        "Arm Corstone-310 (MPS3, FVP), Ethos-U55",
        "ethos-u55",
        system_config=DocumentedValue("Ethos_U55_High_End_Embedded", _ARM_KIT),
        memory_mode=DocumentedValue("Shared_Sram", _ARM_KIT),
        sram=DocumentedValue(4 * _MIB, _ARM_SRAM),
    ),
    Board(
        "corstone-315",
        "Arm Corstone-315 (MPS4, FVP), Ethos-U65",
        "ethos-u65",
        system_config=DocumentedValue("Ethos_U65_High_End", _ARM_KIT),
        memory_mode=DocumentedValue("Dedicated_Sram_384KB", _ARM_KIT),
        sram=DocumentedValue(4 * _MIB, f"{_ALIF_KIT}/scripts/cmake/platforms/mps4/sse-315/mps4-sse-315.ld"),
    ),
    Board(
        "corstone-320",
        "Arm Corstone-320 (MPS4, FVP), Ethos-U85",
        "ethos-u85",
        system_config=DocumentedValue("Ethos_U85_SYS_DRAM_Mid", f"{_EXECUTORCH}/backends/arm/ethosu/compile_spec.py"),
        sram=DocumentedValue(4 * _MIB, f"{_EXECUTORCH}/examples/arm/executor_runner/Corstone-320.ld"),
    ),
    Board(
        "corstone-1000",
        "Arm Corstone-1000 with Cortex-A320 (FVP), Ethos-U85",
        "ethos-u85",
        sram=DocumentedValue(2 * _MIB, _CORSTONE_1000),
    ),
)


def _alif(series: str, sram: int, source: str, *, has_u85: bool) -> Iterator[Board]:
    """Yield a ``Board`` for each NPU of an Alif Ensemble: an Ethos-U55 for each core, and the Ethos-U85 of both cores.

    Args:
        series: for example ``E7``.
        sram: bytes of SRAM0 and SRAM1 together. The size of the MRAM is no argument: all series here have 5.5 MiB.
        source: address of the document that states the sizes.
        has_u85: whether the series has an Ethos-U85.
    """
    npus = [("hp", "high-performance core", "ethos-u55", 256, "Ethos_U55_Alif_HP")]
    npus += [("he", "high-efficiency core", "ethos-u55", 128, "Ethos_U55_Alif_HE")]
    npus += [("u85", "Ethos-U85 of both cores", "ethos-u85", 256, "Ethos_U85_Alif")] * has_u85
    for suffix, core, family, macs, system_config in npus:
        yield Board(
            f"alif-{series.lower()}-{suffix}",
            f"Alif Ensemble {series}, {core}",
            family,
            macs=DocumentedValue(macs, _ALIF_MACS),
            system_config=DocumentedValue(system_config, _ALIF_VELA),
            memory_mode=DocumentedValue("Shared_Sram", _ALIF_MODE),
            sram=DocumentedValue(sram, source),
            flash=DocumentedValue(5632 * _KIB, source),
            config_ini=_OWN_INI,
        )


_ALIF = (
    *_alif("E3", 6656 * _KIB, _ALIF_PACK, has_u85=False),  # variants with F55D5 in their part number
    *_alif("E4", 8 * _MIB, _ALIF_PACK, has_u85=True),
    *_alif("E5", 6656 * _KIB, _ALIF_PACK, has_u85=False),
    *_alif("E6", 8 * _MIB, _ALIF_E6, has_u85=False),  # we found no document that says whether it has an Ethos-U85
    *_alif("E7", 6656 * _KIB, _ALIF_PACK, has_u85=False),
    *_alif("E8", 8 * _MIB, _ALIF_PACK, has_u85=True),
)

_OTHERS = (
    Board(
        "himax-we2",
        "Himax WiseEye2 WE2 (HX6538), Grove Vision AI V2",
        "ethos-u55",
        macs=DocumentedValue(64, f"{_HIMAX_VELA}/README.md"),
        system_config=DocumentedValue("Ethos_U55_Himax_WE2", f"{_HIMAX_VELA}/vela/himax_vela.ini"),
        memory_mode=DocumentedValue("Shared_Sram", f"{_HIMAX_VELA}/vela/himax_vela.ini"),
        sram=DocumentedValue(2432 * _KIB, _HIMAX_SRAM),
        config_ini=_OWN_INI,
    ),
    Board(
        "infineon-psoc-edge-e84",
        "Infineon PSOC Edge E84, evaluation kit KIT_PSE84_EVAL",
        "ethos-u55",
        macs=DocumentedValue(128, f"{_PSOC}/reports/e84_target_vela_compilation.md"),
        system_config=DocumentedValue("Ethos_U55_PSOC_Edge_E84", _PSOC_VELA),
        memory_mode=DocumentedValue("Sram_Only", _PSOC_VELA),
        sram=DocumentedValue(5 * _MIB, _PSOC_SIZES),
        flash=DocumentedValue(16 * _MIB, _PSOC_SIZES),
        config_ini=_OWN_INI,
    ),
    Board(
        "nuvoton-m55m1",
        "Nuvoton NuMaker-M55M1",
        "ethos-u55",
        macs=DocumentedValue(256, f"{_M55M1}/vela_model_example.txt"),
        system_config=DocumentedValue("Ethos_U55_M55M1", f"{_M55M1}/default_vela.ini"),
        memory_mode=DocumentedValue("Shared_Sram", f"{_M55M1}/vela_model_example.txt"),
        sram=DocumentedValue(1344 * _KIB, _M55M1_SIZES),
        flash=DocumentedValue(2 * _MIB, _M55M1_SIZES),
        config_ini=_OWN_INI,
    ),
    Board(
        "nxp-imx93",
        "NXP i.MX 93",
        "ethos-u65",
        macs=DocumentedValue(256, f"{_NXP_VELA}/vela/vela.py"),
        system_config=DocumentedValue("Ethos_U65_High_End", f"{_NXP_VELA}/config_files/Arm/vela.ini"),
        memory_mode=DocumentedValue("Dedicated_Sram_384KB", f"{_NXP_VELA}/config_files/Arm/vela.ini"),
    ),
    Board(
        "renesas-ra8p1",
        "Renesas RA8P1, EK-RA8P1",
        "ethos-u55",
        macs=DocumentedValue(256, f"{_RA8P1}/scripts/mcu_deploy.py"),
        system_config=DocumentedValue(
            "Ethos_U55_RA8P1", f"{_RA8P1}/application_examples/face_detection/ra_gen/bsp_clock_cfg.h"
        ),
        memory_mode=DocumentedValue("Sram_Only", f"{_RA8P1}/scripts/mcu_deploy.py"),
        sram=DocumentedValue(1664 * _KIB, _RA8P1_SIZES),
        flash=DocumentedValue(1 * _MIB, _RA8P1_SIZES),
        config_ini=_OWN_INI,
    ),
    Board(
        "renesas-rzg3e",
        "Renesas RZ/G3E",
        "ethos-u55",
        macs=DocumentedValue(256, _RZG3E),
        system_config=DocumentedValue("Ethos_U55_RZG3E", _RZG3E),
        config_ini=_OWN_INI,
    ),
)

#: Boards by name, in the order in which ``arm-recipes boards`` lists them.
BOARDS: dict[str, Board] = {board.name: board for board in (*_CORSTONE, *_ALIF, *_OTHERS)}
