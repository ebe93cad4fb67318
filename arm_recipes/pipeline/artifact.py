"""``Artifact``: the program and report of an export, with the PyTorch and ExecuTorch objects of its stages."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal

from arm_recipes._internal.executorch_programs import collect_program_chunks, data_files
from arm_recipes.pipeline.reference_program import serialize_with_tosa_delegates
from arm_recipes.report.record import MethodReport
from arm_recipes.report.report import Report
from arm_recipes.runtime.calls import describe_packed_sample, reject_old_backend_argument
from arm_recipes.runtime.program import Program
from arm_recipes.runtime.signature import METADATA_KEY, encode_metadata, insert_checksum
from arm_recipes.stages.edge.external_blocks import DATA_FILE_TAG

if TYPE_CHECKING:
    from executorch.exir import ExecutorchProgramManager
    from executorch.export import ExportRecipe
    from torch.export import ExportedProgram

    from arm_recipes.pipeline.float_reference import FloatReference
    from arm_recipes.pipeline.unlowered_programs import UnloweredPrograms
    from arm_recipes.runtime.shape_variants import Pad
    from arm_recipes.runtime.trace import TracedOperation
    from arm_recipes.samples.call_inputs import Inputs, InputSignature
    from arm_recipes.samples.shape_variants import ShapeVariants


@dataclass(frozen=True)
class ExportObjects:
    """The PyTorch and ExecuTorch objects of an export.

    Attributes:
        exported_programs: ATen program of each method before lowering, quantized if the recipe quantizes.
        executorch_program: ExecuTorch's manager of the emitted program.
        float_reference: the model before quantization, for comparisons.
        unlowered: the programs before lowering, which ``for_target`` lowers again; None if the recipe's stages do not
            capture the model.
    """

    exported_programs: dict[str, ExportedProgram]
    executorch_program: ExecutorchProgramManager
    float_reference: FloatReference
    unlowered: UnloweredPrograms | None = None


@dataclass(eq=False, repr=False)
class Artifact:
    """A compiled program and the record of its export.

    Attributes:
        report: delegates, operators on the CPU, quantization, Vela's estimates, sizes and stage times.
        input_signatures: input signature of the model of each method.
        out_specs: pytree structure of the outputs of each method's model.
        shape_variants: by method, the variants of a method that was exported for several input sizes (``sizes=``).
        recipe: the recipe of the export.
        create_objects: creates ``export_objects`` on first use. For an export from the cache, this runs the pipeline.
        requested_recipe: the user's recipe, if this program was compiled again to need less SRAM. ``recipe`` is then
            the recipe of that compilation. None for the program of the first compilation.
        cached_chunks: the program's byte chunks, if the program comes from the cache.
        cached_data_file: the program's data file, if the program comes from the cache and has one.
        comparison_specs: cache of ``comparison.program_specs``. The key is (method, whether layers are compared).
    """

    report: Report
    input_signatures: dict[str, InputSignature]
    out_specs: dict[str, Any]
    shape_variants: Mapping[str, ShapeVariants]
    recipe: ExportRecipe | None
    create_objects: Callable[[], ExportObjects]
    cached_chunks: Sequence[bytes] | None = None
    cached_data_file: bytes | None = None
    requested_recipe: ExportRecipe | None = None
    comparison_specs: dict[Any, Any] = field(default_factory=dict, init=False)
    _program: Program | None = field(default=None, init=False)

    @cached_property
    def export_objects(self) -> ExportObjects:
        """The PyTorch and ExecuTorch objects of the export."""
        return self.create_objects()

    @property
    def exported_programs(self) -> dict[str, ExportedProgram]:
        """The ATen program of each method before lowering, quantized if the recipe quantizes."""
        return self.export_objects.exported_programs

    @property
    def executorch_program(self) -> ExecutorchProgramManager:
        """ExecuTorch's manager of the emitted program."""
        return self.export_objects.executorch_program

    @property
    def float_reference(self) -> FloatReference:
        """The model before quantization, for comparisons."""
        return self.export_objects.float_reference

    @property
    def program_chunks(self) -> Sequence[bytes]:
        """The program's bytes in chunks, without the checksum."""
        return collect_program_chunks(self.executorch_program) if self.cached_chunks is None else self.cached_chunks

    @cached_property
    def buffer(self) -> bytes:
        """The bytes of the ``.pte`` file."""
        return b"".join(insert_checksum(self.program_chunks))

    @cached_property
    def data_file(self) -> bytes | None:
        """The bytes of the ``.ptd`` file with the external command streams and weights; None without such data."""
        if self.cached_chunks is not None:
            return self.cached_data_file
        return data_files(self.executorch_program).get(DATA_FILE_TAG)

    @property
    def other_data_files(self) -> dict[str, bytes]:
        """Data files of the other backends of a combined recipe, by name: ``{"name": content}``."""
        if self.cached_chunks is not None:  # only recipes of this package are cached
            return {}
        files = data_files(self.executorch_program)
        return {tag: data for tag, data in files.items() if tag != DATA_FILE_TAG}

    @property
    def stored_bytes(self) -> int:
        """Size of the program and its data files."""
        return self.report.stored_bytes

    @property
    def main_report(self) -> MethodReport:
        """The report of ``main_method``."""
        methods = self.report.methods
        return next((method for method in methods if method.name == "forward"), methods[0])

    @property
    def main_method(self) -> str:
        """``forward``, or the first method if there is no ``forward``."""
        return self.main_report.name

    def run(
        self,
        *inputs: Any,
        method: str = "forward",
        backend: Literal["tosa"] | None = None,
        pad: Pad | None = None,
        **keywords: Any,
    ) -> Any:
        """Execute the program in ExecuTorch's runtime on this machine.

        TOSA delegates run on Arm's reference model, VGF delegates on Vulkan, and Ethos-U delegates on an emulator.

        Args:
            inputs: positional inputs of the model. With ``quantized_io``, they are integers, and
                ``result.inputs[0].quantize(x)`` converts a tensor of the first input. Numbers, strings and None are
                constants of the program, so they must be the same as in the export.
            method: the method to run.
            backend: "tosa" runs the TOSA graphs of the delegates instead of the compiled delegates.
            pad: see ``Program.run``.
            keywords: keyword inputs of the model.

        Returns:
            the model's outputs; for a constant method, its value or a list of its values. If the model mutates an
            input, the argument is not modified, and ``run`` does not return the new value. Get the new value from
            ``result.program().execute(...)``, which returns it before the model's outputs.

        Raises:
            ValueError: there is no such method, the inputs differ from the model's in structure, shape or dtype, or the
                program converts an int64 input to int32 and a value does not fit.
            RunError: the program cannot run on this machine; the message says what is missing.
        """
        reject_old_backend_argument(keywords)
        program = self._load_once()
        if backend == "tosa" and not program.has_reference:
            program.reference = Program(self.reference_program())
        example = next(iter(self.shape_variants[method].sizes_by_method)) if method in self.shape_variants else method
        tensors = self.bind_call(example, inputs, keywords) if example in self.input_signatures else inputs
        return self.to_model_structure(example, program.execute(*tensors, method=method, backend=backend, pad=pad))

    def trace(self, *inputs: Any, method: str = "forward", **keywords: Any) -> Iterator[TracedOperation]:
        """Load and execute the program and yield each operation of its Ethos-U delegates, with names and outputs.

        Buffers start from their initial values. The trace does not change the buffers that ``run`` uses.

        Args:
            inputs: as in ``run``.
            method: as in ``run``.
            keywords: as in ``run``.

        Raises:
            ValueError: as ``run``.
            RunError: as ``run``.
        """
        tensors = self.bind_call(method, inputs, keywords) if method in self.input_signatures else inputs
        return self._load_once().trace(*tensors, method=method)

    def program(self) -> Program:
        """Load the program. Each call returns a new instance, whose buffers have their initial values."""
        program = Program(self.buffer, self.data_file)
        program.records = {delegate.checksum: delegate for delegate in self.report.delegates}
        return program

    def tensor_inputs(self, method: str, sample: Inputs) -> list[Any]:
        """Return the tensor inputs of a sample, without the arguments that are constants in the program.

        Raises:
            ValueError: there is no such method, or the sample does not match its inputs.
        """
        return self.bind_call(method, (sample,), {})

    def bind_call(self, method: str, inputs: tuple[Any, ...], keywords: dict[str, Any]) -> list[Any]:
        """Bind the arguments of a call of the model to the tensor inputs of the program, in order.

        Raises:
            ValueError: as ``tensor_inputs``.
        """
        import torch

        from arm_recipes.samples.call_inputs import Inputs, as_inputs

        if method not in self.input_signatures:
            raise ValueError(f"no method '{method}'; the program has: {', '.join(self.input_signatures)}")
        description = f"the call of '{method}'"
        sample = inputs[0] if len(inputs) == 1 and isinstance(inputs[0], Inputs) else Inputs(*inputs, **keywords)
        input_signature = self.input_signatures[method]
        try:
            leaves = input_signature.check_structure(as_inputs(sample, description), description)
        except ValueError:
            packed = describe_packed_sample(inputs, keywords)
            if packed is None or sample is inputs[0]:
                raise
            raise ValueError(f"{description} {packed}") from None
        leaf_pairs = zip(leaves, input_signature.leaves, strict=True)
        return [leaf for leaf, expected in leaf_pairs if isinstance(expected, torch.Tensor)]

    def to_program_inputs(self, report: MethodReport, sample: Inputs) -> list[Any]:
        """Convert a sample to the arguments of ``Program.run``. With ``quantized_io``, quantizes float inputs."""
        import torch

        input_signature = self.input_signatures[report.name]
        leaves = zip(input_signature.flatten(sample, "a sample"), input_signature.leaves, strict=True)
        tensors = [leaf for leaf, expected in leaves if isinstance(expected, torch.Tensor)]
        return [info.to_program(tensor) for info, tensor in zip(report.inputs, tensors, strict=True)]

    def run_dequantized(self, sample: Inputs) -> Any:
        """Run the only method on float inputs. With ``quantized_io``, quantizes the inputs and dequantizes the outputs.

        Raises:
            ValueError: as ``run``.
            RunError: as ``run``.
        """
        (method,) = self.report.methods
        outputs = self._load_once().execute(*self.to_program_inputs(method, sample), method=method.name)
        pairs = zip(method.outputs, outputs, strict=True)
        return self.to_model_structure(method.name, [info.to_model(value) for info, value in pairs])

    def to_model_structure(self, method: str, outputs: list[Any]) -> Any:
        """Unflatten the program's outputs to the structure of the model's outputs.

        For a constant method, this returns its value, or the list of its values.
        """
        if method not in self.out_specs:
            return outputs[0] if len(outputs) == 1 else outputs
        from torch.utils import _pytree as pytree

        spec = self.out_specs[method]
        # The new values of mutated inputs come first; they are not outputs of the model.
        return pytree.tree_unflatten(outputs[len(outputs) - spec.num_leaves :], spec)

    def reference_program(self) -> bytes:
        """Build the reference program: this program with TOSA graphs in place of the compiled payloads."""
        tensors = {method.name: (method.inputs, method.outputs) for method in self.report.methods}
        variants = {name: method.to_dict() for name, method in self.shape_variants.items()}
        mutated = {name: self._load_once().signature(name).mutated_inputs for name in tensors}
        names = encode_metadata(tensors, mutated, hashlib.sha256(self.buffer).hexdigest(), variants)
        graphs = {delegate.checksum: delegate.tosa for delegate in self.report.delegates}
        return b"".join(
            insert_checksum([serialize_with_tosa_delegates(self.executorch_program, graphs, {METADATA_KEY: names})])
        )

    def _load_once(self) -> Program:
        """Return the loaded program, whose buffers keep their values between runs."""
        if self._program is None:
            self._program = self.program()
        return self._program
