"""Developer tools of an ``ExportResult``: build its ETDump, ETRecord, Inspector and bundled programs."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from arm_recipes._internal.messages import suppress_warnings
from arm_recipes.devtools.delegate_calls import DelegateCall, collect_delegate_calls
from arm_recipes.devtools.etdump import check_loggable, collect_events, debug_buffer_bytes, log_events
from arm_recipes.devtools.etrecord import build_etrecord, serialize_etrecord
from arm_recipes.devtools.inspector_graph import compute_node_values, with_debug_handles
from arm_recipes.runtime import host_backends
from arm_recipes.samples.call_inputs import Inputs, as_inputs
from arm_recipes.samples.export_arguments import to_sample_list

if TYPE_CHECKING:
    from executorch.devtools import ETRecord, Inspector
    from torch.export import ExportedProgram

    from arm_recipes.pipeline.artifact import Artifact
    from arm_recipes.report.record import MethodReport


@dataclass(frozen=True)
class RunRecord:
    """ETDump and outputs of one run.

    Attributes:
        etdump: ExecuTorch's ETDump.
        debug_buffer: contents of ExecuTorch's debug buffer: the logged tensors.
        etrecord: ETRecord of the method, with the inputs of this run.
        outputs: outputs of the program.
    """

    etdump: bytes
    debug_buffer: bytes
    etrecord: ETRecord
    outputs: tuple[torch.Tensor, ...]


class MethodTools:
    """Developer tools for one method of an export.

    Raises:
        ValueError: there is no such method, or the result does not contain its captured program.
    """

    def __init__(self, result: Artifact, name: str) -> None:
        reports = {method.name: method for method in result.report.methods}
        if name not in reports:
            raise ValueError(f"no method '{name}'; the program has: {', '.join(reports)}")
        if name not in result.exported_programs:
            raise ValueError(
                f"the developer tools need the captured program of '{name}', which the stages of this recipe did not "
                "record"
            )
        self._result, self._name = result, name
        self._report: MethodReport = reports[name]
        self._program: ExportedProgram = with_debug_handles(result.exported_programs[name])
        #: Checksums of the delegates that are called in loops. ExecuTorch's emitter records no instructions for these
        #: calls. Therefore, ``run_with_etdump`` logs no events of the operators inside these delegates.
        self._in_loops = {delegate.checksum for delegate in self._report.delegates if delegate.calls > 1}

    def run_with_etdump(self, tensors: Sequence[torch.Tensor]) -> RunRecord:
        """Load the program again and run it with ExecuTorch's event tracer.

        Args:
            tensors: inputs of the model, or quantized inputs of the program.

        Raises:
            ValueError: ETDump cannot encode a dtype or an output of the method.
        """
        check_loggable(self._result.executorch_program, self._name)
        # A separate run traces the delegates, so that tracing does not increase the durations of the events.
        calls = self._record_calls(tensors)
        model_inputs = self._to_model(tensors)
        expected = compute_node_values(
            self._program, model_inputs, {group.node for call in calls for group in call.groups}
        )
        event_lists = iter([collect_events(call, expected) for call in calls])
        manager = self._result.executorch_program
        etdump, debug, outputs = self._result.program().etdump(
            *self._to_program(tensors),
            method=self._name,
            debug_bytes=debug_buffer_bytes(manager, self._name, expected),
            listener=lambda execution: None if execution.checksum in self._in_loops else log_events(next(event_lists)),
        )
        return RunRecord(
            etdump, debug, build_etrecord(manager, self._name, self._program, calls, model_inputs), tuple(outputs)
        )

    def build_etrecord(
        self, samples: Sequence[Sequence[torch.Tensor]] = (), outputs: Sequence[Sequence[torch.Tensor]] = ()
    ) -> ETRecord:
        """Build the ETRecord of the method, with the inputs of the first sample and the outputs of all samples.

        To find the debug handle groups, the program runs once on the first sample. Without samples, it runs on zeros,
        and the record has neither inputs nor outputs.
        """
        zeros = [torch.zeros(info.shape, dtype=getattr(torch, info.dtype)) for info in self._report.inputs]
        calls = self._record_calls(samples[0] if samples else zeros)
        model_inputs = self._to_model(samples[0]) if samples else None
        return build_etrecord(
            self._result.executorch_program, self._name, self._program, calls, model_inputs, outputs or None
        )

    def _record_calls(self, tensors: Sequence[torch.Tensor]) -> list[DelegateCall]:
        """Run the program and collect its delegate calls with the results of their operators."""
        program = self._result.program()  # keep a reference: a deleted program releases the delegates in ``executions``
        with host_backends.record_executions() as executions:
            program.execute(*self._to_program(tensors), method=self._name)
        outside_loops = [execution for execution in executions if execution.checksum not in self._in_loops]
        return collect_delegate_calls(self._result.executorch_program, self._name, self._program, outside_loops)

    def run_samples(self, samples: Sequence[Sequence[torch.Tensor]]) -> list[list[Any]]:
        """Execute one loaded program on all samples, and return the outputs.

        Mutable buffers keep their values from sample to sample.
        """
        program = self._result.program()
        runs = (program.execute(*self._to_program(tensors), method=self._name) for tensors in samples)
        return [[x.clone() if isinstance(x, torch.Tensor) else x for x in outputs] for outputs in runs]

    def _to_model(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Convert inputs to the dtypes of the model: dequantize quantized inputs."""
        return [info.to_model(tensor) for info, tensor in zip(self._report.inputs, tensors, strict=True)]

    def _to_program(self, tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
        """Convert inputs to the dtypes of the program: quantize them if the program takes quantized inputs."""
        return [info.to_program(tensor) for info, tensor in zip(self._report.inputs, tensors, strict=True)]

    def build_test_suite(
        self, samples: Sequence[Sequence[torch.Tensor]], outputs: Sequence[Sequence[torch.Tensor]]
    ) -> Any:
        """Build ExecuTorch's ``MethodTestSuite`` of the method."""
        from executorch.devtools.bundled_program.config import MethodTestCase, MethodTestSuite

        pairs = zip(samples, outputs, strict=True)
        with _translate_bundling_errors():
            cases = [MethodTestCase(self._to_program(inputs), list(expected)) for inputs, expected in pairs]
            return MethodTestSuite(self._name, cases)


def create_inspector(result: Artifact, tensors: Sequence[torch.Tensor], method: str) -> Inspector:
    """Execute the program once, and create ExecuTorch's Inspector for its events."""
    import tempfile
    from pathlib import Path

    from executorch.devtools import Inspector

    from arm_recipes.devtools.etdump import parse_metadata

    run = MethodTools(result, method).run_with_etdump(tensors)
    with suppress_warnings(), tempfile.NamedTemporaryFile(suffix=".bin") as file:
        Path(file.name).write_bytes(run.debug_buffer)
        return Inspector(
            etdump_data=run.etdump,
            etrecord=run.etrecord,
            debug_buffer_path=file.name,
            delegate_metadata_parser=parse_metadata,
        )


def build_debug_files(result: Artifact, stem: str, etrecords: bool, bundled: Any) -> dict[str, bytes]:
    """Build the ETRecords and the bundled program that are saved next to the ``.pte``: ``{file name: contents}``.

    Raises:
        ValueError: samples do not match the model, ExecuTorch's bundled programs cannot hold the inputs or outputs, or
            the result does not contain the captured program of a method.
    """
    bundled_samples = {} if bundled is None else _bundled_samples(result, bundled)
    main = result.main_method
    contents: dict[str, bytes] = {}
    suites = []
    for name in [method.name for method in result.report.methods] if etrecords else list(bundled_samples):
        method = MethodTools(result, name)
        samples = bundled_samples.get(name)
        outputs = None if samples is None else method.run_samples(samples)
        if samples is not None and outputs is not None:
            suites.append(method.build_test_suite(samples, outputs))
        if etrecords:
            record = method.build_etrecord(samples or (), outputs or ())
            contents[f"{stem}.etrecord" if name == main else f"{stem}.{name}.etrecord"] = serialize_etrecord(record)
    if suites:
        contents[f"{stem}.bpte"] = _build_bundled_program(result, suites)
    return contents


def _bundled_samples(result: Artifact, bundled: Any) -> dict[str, list[list[torch.Tensor]]]:
    names = [method.name for method in result.report.methods]
    by_method: Mapping[str, Any] = bundled if isinstance(bundled, Mapping) else {result.main_method: bundled}
    unknown = [name for name in by_method if name not in names]
    if unknown:
        raise ValueError(f"bundled_samples: the program has no method {unknown[0]!r}; it has: {', '.join(names)}")
    converted = {}
    for name, samples in by_method.items():
        if not isinstance(samples, Iterable) and not callable(samples):
            raise ValueError(
                f"bundled_samples: give a list of samples, [(x,)], or a dict of such lists by method; got {samples!r}"
            )
        listed = to_sample_list(name, samples)
        if not listed:
            raise ValueError(f"bundled_samples: there are no samples of '{name}': give a list of input tuples, [(x,)]")
        inputs = [
            as_inputs(sample, f"bundled_samples[{index}]", f" of '{name}'") for index, sample in enumerate(listed)
        ]
        converted[name] = [_sample_tensors(result, name, sample) for sample in inputs]
    return converted


def _sample_tensors(result: Artifact, method: str, sample: Inputs) -> list[torch.Tensor]:
    return list(result.tensor_inputs(method, sample))


@contextmanager
def _translate_bundling_errors() -> Iterator[None]:
    """Raise ExecuTorch's assertion errors about unsupported values as ``ValueError``."""
    try:
        yield
    except AssertionError as error:
        raise ValueError(
            f"bundled_samples: ExecuTorch's bundled programs cannot hold these samples: {str(error).strip()}"
        ) from error


def _build_bundled_program(result: Artifact, suites: Sequence[Any]) -> bytes:
    """Build the bundled program. It contains the bytes of the ``.pte`` that ``save`` writes, checksum included."""
    from executorch.devtools import BundledProgram
    from executorch.devtools.bundled_program.serialize import serialize_from_bundled_program_to_flatbuffer

    with _translate_bundling_errors():
        bundle = BundledProgram(result.executorch_program, suites)
    bundle.serialize_to_schema().program = result.buffer
    return bytes(serialize_from_bundled_program_to_flatbuffer(bundle))
