"""Firmware properties of boards, from documents of the vendors: memories, Zephyr's board and devicetree, CMSIS packs.

Each entry cites its source; a field that no public document states is empty. To add a board, add an entry to
``SUPPORT``. This module must not import PyTorch, because the command line uses it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from arm_recipes.recipe.boards import BOARDS

_KIB, _MIB = 1024, 1024**2


@dataclass(frozen=True)
class Memory:
    """A memory of a board.

    Attributes:
        name: name in the vendor's linker script or documentation.
        origin: first address.
        size: bytes.
        npu_bytes: number of bytes, from ``origin``, that the NPU can access; None if it can access all.
    """

    name: str
    origin: int
    size: int
    npu_bytes: int | None = None


@dataclass(frozen=True)
class Memories:
    """Memories that both the core and the NPU access.

    Attributes:
        source: address of the document.
        sram: SRAM.
        flash: memory of the program if the memory mode places constants in off-chip flash. For the Corstones, which
            have no flash, this is their DRAM.
        dram: DRAM, for memory modes with activations in DRAM.
    """

    source: str
    sram: Memory
    flash: Memory | None = None
    dram: Memory | None = None

    def all(self) -> list[Memory]:
        """The memories, each once."""
        return list(dict.fromkeys(memory for memory in (self.sram, self.flash, self.dram) if memory is not None))


@dataclass(frozen=True)
class ZephyrBoard:
    """A board in Zephyr.

    Attributes:
        target: board target of ``west build``.
        source: address of the document.
        nodes: devicetree source to add to the board's own devicetree.
        sram: name of the memory region in Zephyr's linker script that is SRAM and that the NPU reaches. "" means the
            region of Zephyr's data.
        program: name of the memory region for a program that is not in SRAM. "" means the region of Zephyr's code.
    """

    target: str
    source: str
    nodes: str = ""
    sram: str = ""
    program: str = ""

    @property
    def overlay(self) -> str:
        """File name of the board's overlay."""
        return f"{self.target.replace('/', '_')}.overlay"


@dataclass(frozen=True)
class CmsisDevice:
    """A device in the CMSIS packs.

    Attributes:
        name: vendor, device and, if the device has several cores, core: ``AlifSemiconductor::AE722F80F55D5LS:M55_HP``.
        pack: pack of the device.
        source: address of the document.
    """

    name: str
    pack: str
    source: str


@dataclass(frozen=True)
class BoardSupport:
    """Firmware properties of a board, from documents of its vendor. None marks a property that no document states."""

    cpu: str
    memories: Memories | None = None
    zephyr: ZephyrBoard | None = None
    cmsis: CmsisDevice | None = None


@dataclass(frozen=True)
class Placement:
    """Kinds of memory ("sram", "flash" or "dram") that hold the program and the NPU's scratch.

    Attributes:
        program: memory of the program, which contains the constants that the NPU reads. It is "sram" if Vela's
            configuration places constants in SRAM or on-chip flash.
        scratch: memory of the NPU's scratch.
    """

    program: str
    scratch: str

    @staticmethod
    def of(const_memory: str, *, arena_on_second_port: bool) -> Placement:
        """The placement that Vela's configuration implies; see ``arm_backend_core.workers.vela.VelaConfiguration``."""
        return Placement(_KIND_OF_MEMORY[const_memory], "dram" if arena_on_second_port else "sram")


#: Kind of the memory that holds the constants, by Vela's name of this memory.
_KIND_OF_MEMORY = {"OffChipFlash": "flash", "Dram": "dram", "OnChipFlash": "sram", "Sram": "sram"}


def find_support(board: str) -> BoardSupport | None:
    """Return the firmware properties of a board; None if no document describes them."""
    return SUPPORT.get(board)


_GITHUB = "https://github.com"
_ZEPHYR = f"{_GITHUB}/zephyrproject-rtos/zephyr/blob"
_ZEPHYR_SAMPLE = "samples/modules/tflite-micro/tflm_ethosu/boards"
_ARM_KIT = (
    f"{_GITHUB}/alifsemi/alif_ml-embedded-evaluation-kit/blob/b1b93fc01d915da47a4f6ea8475c193aef56e871/"
    "scripts/cmake/platforms"
)
_ARM_DEVICES = "https://arm-software.github.io/AVH/main/simulation/html/avh_fvp_cmsis.html"
_ALIF_PACK = (
    f"{_GITHUB}/alifsemi/alif_ensemble-cmsis-dfp/blob/e6f35e88e7b8b401c33b2d599957261ee9f63311/"
    "AlifSemiconductor.Ensemble.pdsc"
)
_ALIF_E6 = f"{_ZEPHYR}/f8c7d6b0f37cc2a1b7dcf875b33b35500247cf5d/dts/arm/alif/ensemble/ae612fa0e5597ls0.dtsi"
_EXECUTORCH_SAMPLE = (
    f"{_GITHUB}/pytorch/executorch/blob/cff6f4dd32e630945b7188512c1f2b4f102b05ad/zephyr/samples/mv2-ethosu/boards"
)
_DDR = Memory("DDR", 0x70000000, 32 * _MIB)
_NPU_ENABLED = '&npu0 {\n\tstatus = "okay";\n};\n'


def _region_node(label: str, node: str, origin: int, size: str, region: str) -> str:
    """Devicetree source of a memory region.

    Args:
        label: label of the node.
        node: name of the node without its address.
        origin: first address.
        size: devicetree expression of the size.
        region: name of the region in Zephyr's linker script.
    """
    return (
        "/ {\n"
        f"\t{label}: {node}@{origin:x} {{\n"
        '\t\tcompatible = "zephyr,memory-region", "mmio-sram";\n'
        f"\t\treg = <0x{origin:08x} {size}>;\n"
        f'\t\tzephyr,memory-region = "{region}";\n'
        "\t};\n"
        "};\n"
    )


# On Corstone-310, -315 and -320, Zephyr's code is at the start of the internal SRAM, and Zephyr's data are in an SRAM
# that the NPU does not reach. As in Zephyr's own sample, the code keeps 1 MiB of the internal SRAM. The rest becomes a
# second region, for the model.
_SPLIT_ISRAM = "&isram {\n\treg = <0x31000000 DT_SIZE_M(1)>;\n};\n\n" + _region_node(
    "arm_model_sram", "sram", 0x31100000, "DT_SIZE_M(3)", "ARM_MODEL_SRAM"
)
_DDR_NODE = _region_node("arm_model_ddr", "memory", 0x70000000, "DT_SIZE_M(256)", "ARM_MODEL_DDR")
_MPS3_DDR = f"{_ZEPHYR}/3d1cfca91f62b82108638393d4c74af062ccba15/{_ZEPHYR_SAMPLE}/mps3_corstone300_fvp"
_MPS4_SRAM = f"{_ZEPHYR}/88ba54c9412d7313b8f832ab1032d3d0ddfa8717/{_ZEPHYR_SAMPLE}/mps4_corstone320_fvp"


def _corstone(cpu: str, script: str, sram: int, device: str, pack: str, zephyr: ZephyrBoard | None) -> BoardSupport:
    """A Corstone: memories from the linker script of Arm's ML evaluation kit, device from Arm's documentation."""
    memories = Memories(f"{_ARM_KIT}/{script}", Memory("SRAM", 0x31000000, sram), flash=_DDR, dram=_DDR)
    return BoardSupport(cpu, memories, zephyr, CmsisDevice(f"ARM::{device}", f"ARM::{pack}", _ARM_DEVICES))


_CORSTONE_300 = _corstone(
    "cortex-m55",
    "mps3/sse-300/mps3-sse-300-release.ld",
    2 * _MIB,
    "SSE-300-MPS3",
    "V2M_MPS3_SSE_300_BSP",
    ZephyrBoard(
        "mps3/corstone300/fvp",
        f"{_MPS3_DDR}.dedicated_sram.overlay",
        nodes=_DDR_NODE,
        sram="ISRAM",
        program="ARM_MODEL_DDR",
    ),
)
_CORSTONE_310 = _corstone(
    "cortex-m85",
    "mps3/sse-310/mps3-sse-310.ld",
    4 * _MIB,
    "SSE-310-MPS3_FVP",
    "V2M_MPS3_SSE_310_BSP",
    ZephyrBoard(
        "mps3/corstone310/fvp",
        f"{_ZEPHYR}/19d4d34d4e2ac862b11721a85620945493be515c/boards/arm/mps3/mps3_corstone310_fvp.dts",
        nodes=f"{_SPLIT_ISRAM}\n{_DDR_NODE}",
        sram="ARM_MODEL_SRAM",
        program="ARM_MODEL_DDR",
    ),
)
_CORSTONE_315 = _corstone(
    "cortex-m85",
    "mps4/sse-315/mps4-sse-315.ld",
    4 * _MIB,
    "SSE-315-FVP",
    "SSE_315_BSP",
    ZephyrBoard(
        "mps4/corstone315/fvp",
        f"{_ZEPHYR}/69fbc7a578ef8f107c3bdebb2a999d79ee0a9969/boards/arm/mps4/mps4_corstone315_fvp.dts",
        nodes=_SPLIT_ISRAM,
        sram="ARM_MODEL_SRAM",
        program="DDR4",
    ),
)
_CORSTONE_320 = _corstone(
    "cortex-m85",
    "mps4/sse-320/mps4-sse-320.ld",
    4 * _MIB,
    "SSE-320-FVP",
    "SSE_320_BSP",
    ZephyrBoard(
        "mps4/corstone320/fvp",
        f"{_MPS4_SRAM}.sram_only.overlay",
        nodes=_SPLIT_ISRAM,
        sram="ARM_MODEL_SRAM",
        program="DDR4",
    ),
)


_ALIF_MRAM = Memory("MRAM", 0x80000000, 5632 * _KIB)
_ALIF_SRAM0 = Memory("SRAM0", 0x02000000, 4 * _MIB)
#: Name of the device in the CMSIS pack, by series of the Alif Ensemble.
_ALIF_DEVICES = {
    "e3": "AE302F80F55D5AE",
    "e4": "AE402FA0E5597LE0",
    "e5": "AE512F80F55D5LS",
    "e7": "AE722F80F55D5LS",
    "e8": "AE822FA0E5597LS0",
}
_ALIF_U55_NODE = """\
&soc {
\tethosu0: ethosu55@400e1000 {
\t\tcompatible = "arm,ethos-u";
\t\treg = <0x400e1000 0x1000>;
\t\tinterrupts = <55 0>;
\t\tinterrupt-parent = <&nvic>;
\t\tsecure-enable;
\t\tprivilege-enable;
\t\tstatus = "okay";
\t};
};
"""


def _alif() -> Iterator[tuple[str, BoardSupport]]:
    """Yield (name, firmware properties) of each Alif Ensemble.

    Each entry states only SRAM0 as SRAM. SRAM1 is not contiguous with it, and the linker section ``.arm_model_temp``
    (the NPU's scratch) must fit into one memory.
    """
    for name in BOARDS:
        if not name.startswith("alif-"):
            continue
        _, series, npu = name.split("-")
        device = _ALIF_DEVICES.get(series)
        source = _ALIF_PACK if device else _ALIF_E6
        core = "M55_HE" if npu == "he" else "M55_HP"  # both cores reach the Ethos-U85
        support = BoardSupport(
            "cortex-m55",
            Memories(source, _ALIF_SRAM0, flash=_ALIF_MRAM),
            cmsis=CmsisDevice(f"AlifSemiconductor::{device}:{core}", "AlifSemiconductor::Ensemble", _ALIF_PACK)
            if device
            else None,
        )
        if series == "e8" and npu != "u85":
            zephyr = ZephyrBoard(
                f"ensemble_e8_dk/ae822fa0e5597ls0/rtss_{npu}",
                f"{_EXECUTORCH_SAMPLE}/ensemble_e8_dk_ae822fa0e5597ls0_rtss_{npu}.overlay",
                nodes=_ALIF_U55_NODE,
                sram="SRAM0",
            )
            support = replace(support, zephyr=zephyr)
        yield name, support


_HIMAX = BoardSupport(
    "cortex-m55",
    Memories(
        f"{_GITHUB}/HimaxWiseEyePlus/Seeed_Grove_Vision_AI_Module_V2/blob/d3265e20d75fe20faccbf185d24454ad08b2fda8/"
        "EPII_CM55M_APP_S/app/scenario_app/allon_sensor_tflm/allon_sensor_tflm.ld",
        Memory("CM55M_S_SRAM", 0x3401F000, 2 * _MIB - 0x1F000),
    ),
)
_PSOC = BoardSupport(
    "cortex-m55",
    Memories(
        f"{_ZEPHYR}/264c2c01c06ae178b8efad4e257f115ac557ae49/boards/infineon/kit_pse84_eval/doc/memory_map.md",
        Memory("m55_data_secondary", 0x26040000, 0x2BC000),
        flash=Memory("m55_nvm", 0x60580000, 0x2C0000),
    ),
    ZephyrBoard(
        "kit_pse84_eval/pse846gps2dbzc4a/m55",
        f"{_ZEPHYR}/763247ebc0c25c913a3642f1e563d2b0105308e6/{_ZEPHYR_SAMPLE}/"
        "kit_pse84_eval_pse846gps2dbzc4a_m55.overlay",
        nodes=_NPU_ENABLED,
    ),
)
_NUVOTON = BoardSupport(
    "cortex-m55",
    Memories(
        f"{_GITHUB}/OpenNuvoton/NuML_Toolkit/blob/299554cda3e3e03e087c9cf9a9096cfc7177a4bd/NuML_PTE_Tool/templates/"
        "M55M1/NuMaker-M55M1/generic_template/NN_ModelInference/GCC/gcc.ld",
        Memory("SRAM012", 0x20100000, 0x150000, npu_bytes=1 * _MIB),
        flash=Memory("FLASH", 0x00100000, 2 * _MIB),
    ),
    ZephyrBoard(
        "numaker_m55m1",
        f"{_ZEPHYR}/66890d24aac61c45ae7234c150053596f48911ee/{_ZEPHYR_SAMPLE}/numaker_m55m1.overlay",
        nodes=_NPU_ENABLED,
    ),
)
_RENESAS = BoardSupport(
    "cortex-m85",
    zephyr=ZephyrBoard(
        "ek_ra8p1/r7ka8p1kflcac/cm85",
        f"{_ZEPHYR}/0a04bc0d3d5da72977a958e54f40a444fd3b366b/boards/renesas/ek_ra8p1/doc/index.rst",
    ),
)

#: Firmware properties of each board, by its name.
SUPPORT: dict[str, BoardSupport] = {
    "corstone-300": _CORSTONE_300,
    "corstone-300-u65": replace(_CORSTONE_300, zephyr=None),
    "corstone-310": _CORSTONE_310,
    "corstone-315": _CORSTONE_315,
    "corstone-320": _CORSTONE_320,
    **dict(_alif()),
    "himax-we2": _HIMAX,
    "infineon-psoc-edge-e84": _PSOC,
    "nuvoton-m55m1": _NUVOTON,
    "renesas-ra8p1": _RENESAS,
}
