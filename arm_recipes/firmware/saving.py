"""``save_firmware``: write a folder with sources for firmware: program, backend, memory sizes and self-test."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any

from arm_backend_core.format_count import format_count
from arm_backend_core.workers import vela
from arm_recipes._internal.rendering import Renderable, Section, format_bytes
from arm_recipes.firmware.board_files import FirmwareBoard, find_firmware_board
from arm_recipes.firmware.folder import check_output_folder, write_output_folder
from arm_recipes.firmware.host_run import FirmwareTestCase, run_on_host
from arm_recipes.firmware.io_tensors import (
    IOTensor,
    check_input_tensors,
    create_random_inputs,
    samples_by_method,
    tensor_from_bytes,
    tensor_to_bytes,
)
from arm_recipes.firmware.kernels import Kernels, classify_kernels
from arm_recipes.firmware.memory_pools import ProgramPools, measure_pools
from arm_recipes.firmware.render_templates import (
    FirmwareData,
    FirmwareTestVectors,
    MethodIO,
    render_files,
    to_c_identifier,
)
from arm_recipes.firmware.versions import Versions
from arm_recipes.runtime.build import CPP_FOLDER
from arm_recipes.runtime.ethosu_payload import EthosUPayload, read_payload_content
from arm_recipes.runtime.inspect import DelegateInspection, Inspection, inspect_program
from arm_recipes.runtime.load import load
from arm_recipes.runtime.program import Program
from arm_recipes.runtime.pte import PteMethod, PteTensor
from arm_recipes.runtime.tensor_info import TensorInfo

if TYPE_CHECKING:
    from arm_recipes.pipeline.artifact import Artifact
    from arm_recipes.types import Samples

    #: Converts a sample to input tensors. Arguments: name of the method, its ``MethodIO``, sample, label for messages.
    SampleConverter = Callable[[str, MethodIO, Any, str], Sequence[Any]]

#: Files of ``runtime/`` that are copied to ``backend/``.
_BACKEND_FILES = ("CMakeLists.txt", "README.md", "cmake/cortex-m55.cmake", "common/*", "firmware/*", "kernels/*")
#: Further files, for programs with Ethos-U delegates.
_NPU_FILES = ("backends/ethosu/*", "emulator/*", "emulator/driver/*", "payload/*")
_UNKNOWN = "unknown"


@dataclass(frozen=True)
class Firmware(Renderable):
    """The folder that ``save_firmware`` wrote. ``print`` it, show it in a notebook, or convert it with ``to_dict()``.

    Attributes:
        folder: path of the folder.
        files: paths of the files, relative to the folder.
        versions: versions of the tools, and the target.
        pools: sizes of the memory pools that the program needs.
        kernels: CPU kernels that the program needs.
        cases: number of test cases in the self-test.
        program_bytes: size of the program.
        data_file_bytes: size of the program's data file (``.ptd``); 0 without one.
        board: the board whose files are in the folder; "" without one.
    """

    folder: str
    files: tuple[str, ...]
    versions: Versions
    pools: ProgramPools
    kernels: Kernels
    cases: int
    program_bytes: int
    data_file_bytes: int = 0
    board: str = ""

    def sections(self) -> Iterator[Section]:
        """Headings with their lines, for text and HTML."""
        versions = self.versions
        yield (
            "Firmware",
            [
                ("folder", self.folder),
                ("program", format_bytes(self.program_bytes)),
                *([("data file", format_bytes(self.data_file_bytes))] if self.data_file_bytes else []),
                ("target", versions.target),
                *([("board", self.board)] if self.board else []),
                *([("Vela version", versions.vela)] if versions.has_npu else []),
                ("ExecuTorch version", versions.executorch),
                ("self-test", format_count(self.cases, "case")),
            ],
        )
        pools = self.pools
        rows: list[tuple[str, ...]] = []
        for method in pools.methods:
            suffix = f" of '{method.name}'" if len(pools.methods) > 1 else ""
            rows += [
                (f"method allocator{suffix}", format_bytes(method.method_allocator)),
                (f"planned memory{suffix}", format_bytes(method.planned)),
            ]
        rows += [("shared planned memory", format_bytes(count)) for count in pools.shared]
        rows.append(("temp allocator", format_bytes(pools.temp)))
        if versions.has_npu:
            rows.append(("fast scratch", format_bytes(pools.fast_scratch)))
        yield "Memory" if pools.exact else "Memory, at most", rows
        names = [*self.kernels.cortex_m, *self.kernels.portable, *self.kernels.others]
        yield f"Kernels on the CPU: {len(names)}", [(name,) for name in names] or [("none",)]


def save_firmware(
    source: Artifact | Program | str | Path | bytes, folder: str | Path, samples: Samples | None = None
) -> Firmware:
    """Write a folder with everything that firmware needs to run a program for Ethos-U or Cortex-M.

    ``ExportResult.save_firmware`` describes the folder.

    Args:
        source: a result of ``export``, a loaded program, or the path or bytes of a ``.pte``.
        folder: a new or empty folder, or one that an earlier call wrote. Files of the earlier call are replaced.
        samples: inputs of the self-test. For a result of ``export``, they have the form of ``samples`` in ``export``.
            For a program, they are a list of tuples of input tensors. For several methods, pass a dict of method name
            to samples. Each sample occupies flash. A method without samples is tested with random inputs.

    Raises:
        ValueError: the folder is not writable or has other or changed files, the program is for another target, or
            samples do not match the program.
        RunError: the program does not run on this machine, or there is no C++ compiler to build the test executable.
    """
    target = check_output_folder(folder)
    data = collect_firmware_data(source, samples, target.name)
    contents = {
        **render_files(data),
        **_read_backend_sources(has_npu=data.versions.has_npu),
        "model.pte": data.program,
        **({} if data.data_file is None else {"model.ptd": data.data_file}),
        "model.bpte": build_bundled_program(data.program, data.methods, data.test_vectors),
    }
    saved = Firmware(
        str(target),
        tuple(sorted(contents)),
        data.versions,
        data.pools,
        data.kernels,
        len(data.test_vectors.cases),
        len(data.program),
        len(data.data_file or b""),
        "" if data.board is None else data.board.name,
    )
    summary = {key: value for key, value in saved.to_dict().items() if key not in ("folder", "files")}
    write_output_folder(target, contents, summary)
    return saved


def collect_firmware_data(source: Artifact | Program | str | Path | bytes, samples: Any, name: str) -> FirmwareData:
    """Collect the data of the generated files. Runs the program on this machine to compute the expected outputs.

    Args:
        source: as for ``save_firmware``.
        samples: as for ``save_firmware``.
        name: name of the firmware folder, for the generated build files.

    Raises:
        ValueError: as for ``save_firmware``.
        RunError: as for ``save_firmware``.
    """
    from arm_recipes.pipeline.artifact import Artifact

    if isinstance(source, Artifact):
        cpu, isa = _processor_of(source.recipe)
        board = find_firmware_board(source.recipe)
        environment = ExportEnvironment(vela.version(), version("executorch"), cpu, isa, board)
        return _collect_from_program(source.program(), samples, _converter_of_result(source), environment, name)
    program = source if isinstance(source, Program) else load(source)
    environment = ExportEnvironment(_UNKNOWN, version("executorch"))
    return _collect_from_program(program, samples, _convert_program_sample, environment, name)


@dataclass(frozen=True)
class ExportEnvironment:
    """Data that a program does not contain: versions of the tools, processor and board; see ``Versions``."""

    vela: str
    executorch: str
    cpu: str = ""
    isa: str = ""
    board: FirmwareBoard | None = None


def _processor_of(recipe: object) -> tuple[str, str]:
    """Processor and instruction set of a Cortex-M recipe's kernels; empty for other recipes."""
    from arm_recipes.recipe import options
    from arm_recipes.recipe.compile_specs import recipe_processor
    from arm_recipes.recipe.recipe import ArmRecipe

    if not isinstance(recipe, ArmRecipe) or not recipe.type_name.startswith("CORTEX_M"):
        return "", ""
    processor = recipe_processor(recipe.type_name, options.resolve_options(recipe.type_name, dict(recipe.options)))
    return ("", "") if processor is None else (processor.cpu, processor.isa.value)


def _converter_of_result(result: Artifact) -> SampleConverter:
    from arm_recipes.samples.call_inputs import as_inputs

    reports = {method.name: method for method in result.report.methods}

    def convert(method: str, method_io: MethodIO, sample: Any, label: str) -> Sequence[Any]:
        return check_input_tensors(
            result.to_program_inputs(reports[method], as_inputs(sample, label)), method_io.inputs, label
        )

    return convert


def _convert_program_sample(method: str, method_io: MethodIO, sample: Any, label: str) -> Sequence[Any]:
    return check_input_tensors(sample if isinstance(sample, (tuple, list)) else [sample], method_io.inputs, label)


def _collect_from_program(
    program: Program, samples: Any, convert: SampleConverter, environment: ExportEnvironment, name: str
) -> FirmwareData:
    inspection, methods = inspect_program(program.data, program.data_file), program.content.methods
    _check_deployable(inspection)
    method_ios = tuple(
        _build_method_io(methods[method.name], method.inputs, method.outputs) for method in inspection.methods
    )
    cases = tuple(_build_test_cases(method_ios, samples, convert))
    first_cases = [_first_case(cases, method_io.method) for method_io in method_ios]
    pools = measure_pools(program.data, inspection, first_cases, program.data_file)
    outputs = run_on_host(program.data, pools.host_sizes(), cases, program.data_file).outputs
    return FirmwareData(
        name=name,
        program=program.data,
        data_file=program.data_file,
        versions=_describe_versions(inspection, program, environment),
        pools=pools,
        methods=method_ios,
        kernels=classify_kernels(operator for method in inspection.methods for operator in method.operators),
        test_vectors=FirmwareTestVectors(cases, outputs),
        board=environment.board,
    )


def _first_case(cases: Sequence[FirmwareTestCase], method: str) -> FirmwareTestCase:
    return next(case for case in cases if case.method == method)


def _check_deployable(inspection: Inspection) -> None:
    """Raise ``ValueError`` if firmware cannot run the program.

    Causes are delegates that the firmware's backend cannot run (``_check_delegate``), inputs or outputs that are not
    tensors, and methods with equal macro names.
    """
    method_of_macro: dict[str, str] = {}
    for method in inspection.methods:
        first = method_of_macro.setdefault(to_c_identifier(method.name).upper(), method.name)
        if first != method.name:
            raise ValueError(
                f"save_firmware: methods '{first}' and '{method.name}' have the same name in upper case, "
                "which the macros of model.h use: rename one of them"
            )
    for method in inspection.methods:
        for delegate in method.delegates:
            _check_delegate(delegate, f"save_firmware: method '{method.name}' has")
        for value in (*method.inputs, *method.outputs):
            if not isinstance(value, TensorInfo):
                raise ValueError(
                    f"save_firmware: '{value.name}' of method '{method.name}' is not a tensor but {value.kind}; "
                    "firmware passes only tensors: make it a tensor, or a constant of the model"
                )


def _check_delegate(delegate: DelegateInspection, prefix: str) -> None:
    payload = delegate.payload
    if delegate.backend != "EthosUBackend":
        raise ValueError(
            f"{prefix} a delegate for {delegate.backend}; firmware runs only Ethos-U delegates and int8 kernels: "
            "export with one of the ETHOSU recipes or CORTEX_M_INT8"
        )
    if not isinstance(payload, EthosUPayload):
        raise ValueError(f"{prefix} a damaged payload ({delegate.problem}): export it again")
    if payload.stream != "COP1":
        raise ValueError(
            f"{prefix} a command stream of the format {payload.stream}, for Direct Drive from Linux; the firmware "
            "driver needs COP1: export without direct_drive"
        )
    if payload.fast_scratch_bytes is None:
        raise ValueError(
            f"{prefix} a payload of another exporter, which does not state its size of fast scratch: export it with "
            "arm_recipes"
        )


def _build_method_io(method: PteMethod, inputs: Sequence[Any], outputs: Sequence[Any]) -> MethodIO:
    def to_io_tensors(infos: Sequence[Any], layouts: Sequence[PteTensor | str]) -> tuple[IOTensor, ...]:
        pairs = zip(infos, layouts, strict=True)
        return tuple(IOTensor(info, layout) for info, layout in pairs if isinstance(layout, PteTensor))

    return MethodIO(method.name, to_io_tensors(inputs, method.inputs), to_io_tensors(outputs, method.outputs))


def _build_test_cases(
    method_ios: Sequence[MethodIO], samples: Any, convert: SampleConverter
) -> Iterator[FirmwareTestCase]:
    from arm_recipes.samples.export_arguments import to_sample_list

    names = [method_io.method for method_io in method_ios]
    by_method = samples_by_method(samples, "forward" if "forward" in names else names[0])
    unknown = [name for name in by_method if name not in names]
    if unknown:
        raise ValueError(f"samples: no method '{unknown[0]}' in the program; it has {', '.join(names)}")
    for method_io in method_ios:
        method_samples = (
            to_sample_list(method_io.method, by_method[method_io.method]) if method_io.method in by_method else []
        )
        suffix = f"of method '{method_io.method}'"
        converted = [
            convert(method_io.method, method_io, sample, f"samples[{i}] {suffix}")
            for i, sample in enumerate(method_samples)
        ]
        for tensors in converted or [create_random_inputs(method_io.inputs)]:
            pairs = zip(tensors, method_io.inputs, strict=True)
            yield FirmwareTestCase(
                method_io.method,
                tuple(tensor_to_bytes(value, io_tensor.layout) for value, io_tensor in pairs),
                len(method_io.outputs),
            )


def _describe_versions(inspection: Inspection, program: Program, environment: ExportEnvironment) -> Versions:
    payloads = [
        delegate.payload
        for method in inspection.methods
        for delegate in method.delegates
        if isinstance(delegate.payload, EthosUPayload)
    ]
    npus = sorted({f"Ethos-U{payload.product}-{payload.macs}" for payload in payloads})
    delegates = [delegate for method in program.content.methods.values() for delegate in method.delegates]
    architectures = sorted({_read_architecture(delegate.data, program.content.named_data) for delegate in delegates})
    streams = sorted({payload.stream for payload in payloads})
    return Versions(
        executorch=environment.executorch,
        vela=environment.vela if payloads else "none",
        npu=", ".join(npus) or "no NPU",
        stream=", ".join(streams) or "none",
        architecture=", ".join(architectures) or "none",
        cpu=environment.cpu,
        isa=environment.isa,
    )


def _read_architecture(payload: memoryview, named_data: Mapping[str, memoryview]) -> str:
    """Read the NPU architecture release from word 3 of the command stream, after the configuration word.

    Bits 28 to 31 are the major release, bits 20 to 27 the minor release, bits 16 to 19 the patch.
    """
    word = int.from_bytes(read_payload_content(payload, named_data.get).commands[12:16], "little")
    return f"{word >> 28}.{word >> 20 & 0xFF}.{word >> 16 & 0xF}"


def _read_backend_sources(*, has_npu: bool) -> dict[str, bytes]:
    """Read the files of ``_BACKEND_FILES``; with ``has_npu`` also ``_NPU_FILES``: Ethos-U backend and NPU emulator."""
    patterns = (*_BACKEND_FILES, *(_NPU_FILES if has_npu else ()))
    paths = sorted(path for pattern in patterns for path in CPP_FOLDER.glob(pattern) if path.is_file())
    return {f"backend/{path.relative_to(CPP_FOLDER).as_posix()}": path.read_bytes() for path in paths}


def build_bundled_program(program: bytes, method_ios: Sequence[MethodIO], vectors: FirmwareTestVectors) -> bytes:
    """Build ExecuTorch's bundled program, which contains the program and the test cases."""
    import tempfile

    from executorch.devtools import BundledProgram
    from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite
    from executorch.devtools.bundled_program.serialize import serialize_from_bundled_program_to_flatbuffer

    suites = []
    for method_io in method_ios:
        tests = []
        for case, outputs in zip(vectors.cases, vectors.outputs, strict=True):
            if case.method == method_io.method:
                inputs = [
                    tensor_from_bytes(data, io_tensor)
                    for data, io_tensor in zip(case.inputs, method_io.inputs, strict=True)
                ]
                expected = [
                    tensor_from_bytes(data, io_tensor)
                    for data, io_tensor in zip(outputs, method_io.outputs, strict=True)
                ]
                tests.append(MethodTestCase(inputs=inputs, expected_outputs=expected))
        suites.append(MethodTestSuite(method_io.method, tests))
    with tempfile.NamedTemporaryFile(suffix=".pte") as file:
        file.write(program)
        file.flush()
        bundle = BundledProgram(None, suites, pte_file_path=file.name)
        return bytes(serialize_from_bundled_program_to_flatbuffer(bundle))
