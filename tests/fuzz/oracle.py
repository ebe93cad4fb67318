"""Test oracle of random graphs: compiles a program for a target and checks its results.

**Floating point.** The program is evaluated in float64. It is evaluated a few more times with perturbed operators:
operands and results get a random relative error of some float32 roundings (mixed forward-backward stability). The
target's error may be as large as the differences between these evaluations. If they differ strongly, or in kind (a
comparison of numbers that are equal except for rounding), there is no expected value. Operators that do not round (data
movement, comparison, relu) are not perturbed.

**Integer.** Every quantized tensor of the graph becomes an output. PyTorch computes it from the target's own earlier
tensors, in float32, in float64 and perturbed. The target's tensor must be within one step of one of these results; the
result of an int16 TABLE may be anywhere between two entries. The program's output must follow from these tensors.

**Ethos-U.** The emulator executes Vela's command stream. Its results must be bit-equal to those of the TOSA graph.

**Cortex-M.** The kernels' records compute the program's values. If no operator computes in floating point, the results
of the C++ kernels in ExecuTorch's runtime must be bit-equal to those of the records.
"""

from __future__ import annotations

import math
import re
import traceback
from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, cast

import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.export import ExportedProgram
from torch.export.graph_signature import OutputKind
from torch.fx import GraphModule, Interpreter

import arm_recipes
from arm_backend_core import compilation_log
from arm_backend_core.backends.payload import checksum_spec
from arm_backend_core.cortex_m.quantizer import CortexMQuantizer
from arm_backend_core.delegate import delegate
from arm_backend_core.errors import ArmBackendError, InternalError, ModelError
from arm_backend_core.nodes import is_dequantize, overload_of
from arm_backend_core.ops.catalog import aten_entries, find_record
from arm_backend_core.ops.registry import Record
from arm_backend_core.program import TENSOR_KINDS
from arm_backend_core.quantization import (
    TOSAQuantizer,
    get_symmetric_a16w8_quantization_config,
    get_symmetric_quantization_config,
)
from arm_backend_core.quantization.ptq import ObservedProgram
from arm_backend_core.quantization.quantizer import ArmQuantizer
from arm_backend_core.targets.compile_spec import (
    ArmCompileSpec,
    CortexMCompileSpec,
    EthosUCompileSpec,
    TosaCompileSpec,
)
from arm_backend_core.targets.cortex_m import Isa
from arm_backend_core.targets.target import Target as TosaTarget
from arm_backend_core.tosa import reference_model
from arm_recipes import ArmRecipeType
from arm_recipes.recipe.options import resolve_algorithms
from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.ethosu import EthosUDelegate
from tests.cortex_m.lowering import LoweredCortexMProgram
from tests.models import quantized_reference
from tests.ops.runner import export, flatten_tensors
from tests.runtime.ethosu_emulator import payloads, random_inputs
from tests.tosa_graphs import validate_by_tosa_opt

#: Relative error of a perturbed operator, by the element type of its result.
_RELATIVE_ERROR = {torch.float64: 2.0**-20, torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
_FLOAT32_ERROR = 2.0**-20
#: Operators that write to a copy of an operand. ``nanmedian`` returns indices instead of values.
_SCATTER_COPIES = {getattr(torch.ops.aten, f"{part}_scatter").default for part in ("select", "slice", "diagonal")}
_SCATTER_COPIES |= {torch.ops.aten.copy.default, torch.ops.aten.nanmedian.dim}
#: If elements are equal, PyTorch may return the index of any of them; ``sort.stable`` only with ``stable=False``.
_TIES_UNSPECIFIED = {getattr(torch.ops.aten, name).default for name in ("topk", "sort", "kthvalue")}
_TIES_UNSPECIFIED |= {torch.ops.aten.sort.stable, torch.ops.aten.median.dim}
_COMPARISONS = [f"aten::{name}" for name in ("eq", "ne", "gt", "ge", "lt", "le")]
#: Smallest normal float32 number; smaller ones may be flushed to 0 (TOSA 1.0, floating-point behavior).
_SMALLEST_NORMAL = 2.0**-126
_REMAINDERS = {getattr(torch.ops.aten.remainder, kind) for kind in ("Tensor", "Scalar", "Scalar_Tensor")}
_FMOD = {torch.ops.aten.fmod.Tensor, torch.ops.aten.fmod.Scalar}
_REMAINDERS |= _FMOD
#: Largest quotient of float32 numbers with an exact remainder.
_MAX_EXACT_QUOTIENT = 2.0**20
#: Messages of the reference model if TOSA leaves a result undefined.
_UNDEFINED_MESSAGES = ("UNPREDICTABLE", "exceed valid range", "divisor must be non-zero")
_INTEGER_DTYPES = (torch.int8, torch.int16, torch.int32, torch.int64)
_EVALUATIONS = 4
#: Perturbed evaluations before a float value counts as wrong. A tie is broken differently in about every second one.
_MAX_EVALUATIONS = 60
_InterpreterFactory = Callable[[GraphModule], Interpreter]
#: Quantization algorithms that change types and scales; the others change weights.
_ALGORITHMS: tuple[str, ...] = (
    *("int16_angles", "attention_scales", "int16_coordinates", "concat_scales", "fused_norms", "int16_outputs"),
    "fused_rms_norms",
)
_CORTEX_M_ALGORITHMS = tuple(name for name in _ALGORITHMS if name in resolve_algorithms(True, "CORTEX_M_INT8"))


@dataclass(frozen=True)
class Target:
    """A target and the quantization for it.

    Attributes:
        spec: TOSA specification, accelerator or Cortex-M.
        int16_activations: whether activations are int16; None if the program is not quantized.
    """

    spec: str
    int16_activations: bool | None = None

    @property
    def tosa(self) -> TosaTarget:
        """The TOSA profile and extensions that flatbuffers may use."""
        return TosaTarget.from_tosa_spec(
            "TOSA-1.0+FP" if self.int16_activations is None else "TOSA-1.0+INT+int16+int4+doubleround+inexactround"
        )


TARGETS = {
    "TOSA_FP": Target("TOSA-1.0+FP"),
    "TOSA_INT8": Target("TOSA-1.0+INT+int16", int16_activations=False),
    "TOSA_A16W8": Target("TOSA-1.0+INT+int16", int16_activations=True),
    "ETHOSU_U55_INT8": Target("ethos-u55-128", int16_activations=False),
    "ETHOSU_U65_INT8": Target("ethos-u65-256", int16_activations=False),
    "ETHOSU_U85_INT8": Target("ethos-u85-256", int16_activations=False),
    "ETHOSU_U55_A16W8": Target("ethos-u55-128", int16_activations=True),
    "ETHOSU_U65_A16W8": Target("ethos-u65-256", int16_activations=True),
    "ETHOSU_U85_A16W8": Target("ethos-u85-256", int16_activations=True),
    # One processor for each instruction set: MVE, DSP and scalar.
    "CORTEX_M_INT8": Target("cortex-m55", int16_activations=False),
    "CORTEX_M_INT8_DSP": Target("cortex-m4", int16_activations=False),
    "CORTEX_M_INT8_SCALAR": Target("cortex-m0plus", int16_activations=False),
}


@cache
def compile_spec(name: str) -> ArmCompileSpec:
    """Return the compile spec of a target."""
    spec = TARGETS[name].spec
    if spec.startswith("cortex"):
        return CortexMCompileSpec(spec)
    return EthosUCompileSpec(spec) if spec.startswith("ethos") else TosaCompileSpec(spec)


def _make_recipe(target: str) -> ExportRecipe:
    """Make the recipe that exports for a target, with loops of recurrent layers of more than two steps."""
    options: dict[str, Any] = {"steps_per_call": 2}
    if isinstance(compile_spec(target), CortexMCompileSpec):
        options |= {"cpu": TARGETS[target].spec, "algorithms": _CORTEX_M_ALGORITHMS}
        return ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8, **options)
    if TARGETS[target].int16_activations is not None:
        options["algorithms"] = _ALGORITHMS
    return ExportRecipe.get_recipe(ArmRecipeType[target], **options)


class Failure(Exception):
    """A check of a program failed.

    Attributes:
        kind: ``crashed``, ``wrong``, ``illegal`` or ``unstable`` (two exports differ).
        cause: text that identifies failures of the same cause, without numbers.
    """

    def __init__(self, kind: str, cause: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {cause}" + (f"\n{detail}" if detail else ""))
        self.kind = kind
        self.cause = re.sub(r"\d+", "#", cause)  # numbers of nodes, sizes


class NoExpectedResult(Exception):
    """There is no expected result: torch.export cannot capture the program, or its tensors have no scale."""


@dataclass
class Outcome:
    """Result of a program that passed.

    Attributes:
        delegated: number of operators that ran on the target.
        refused: number of other operators, by operator and reason.
    """

    delegated: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass(frozen=True)
class CompiledProgram:
    """A compiled program.

    Attributes:
        captured: the captured program, quantized if the target is.
        eager: outputs of the program for the first sample, before quantization.
        program: the program with delegates.
        log: events of the delegation.
    """

    captured: ExportedProgram
    eager: list[Tensor]
    program: ExportedProgram
    log: compilation_log.Log

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Run the program and return its outputs; delegates run on the reference model."""
        return _run(_ContiguousInterpreter, self.program, inputs)

    @property
    def contents(self) -> list[object]:
        """The graph of the program and the flatbuffers of its delegates."""
        return [str(self.program.graph), *(record.tosa for record in self.log.delegates)]

    def count_delegated(self) -> int:
        """Number of delegated operators, and of calls of int8 kernels."""
        calls = sum(self.lowered(Isa.MVE).calls.values())
        return calls + sum(len(record.operators) for record in self.log.delegates)

    def lowered(self, isa: Isa) -> LoweredCortexMProgram:
        """The program as one of int8 kernels."""
        return LoweredCortexMProgram(self.captured, self.program, self.log, isa)


class _ContiguousInterpreter(Interpreter):
    """Makes results contiguous if they were traced so, as in ExecuTorch; some of PyTorch's kernels do not."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result, traced = super().run_node(n), n.meta.get("val")
        traced_contiguous = isinstance(result, Tensor) and isinstance(traced, Tensor) and traced.is_contiguous()
        return result.contiguous() if traced_contiguous else result


def compile_program(model: nn.Module, samples: Sequence[tuple[Tensor, ...]], target: str) -> CompiledProgram:
    """Capture a model, quantize it with ``samples``, and delegate it.

    Raises:
        NoExpectedResult: PyTorch cannot capture the model.
        Failure: the compiler raised an exception.
    """
    try:
        captured = export(model, _clone_inputs(samples[0]))
        eager = _run(Interpreter, captured, samples[0])
    except Exception as error:
        raise NoExpectedResult(f"torch.export: {type(error).__name__}: {str(error).splitlines()[0][:80]}") from error
    try:
        if TARGETS[target].int16_activations is not None:
            int16_activations = bool(TARGETS[target].int16_activations)
            captured = quantize_program(captured, samples, compile_spec(target), int16_activations=int16_activations)
        with compilation_log.open_log() as log:
            program = delegate(captured, compile_spec(target))
    except ModelError as error:
        raise NoExpectedResult(f"{type(error).__name__}: {str(error)[:80]}") from error
    except Exception as error:
        raise Failure("crashed", _describe_error(error)) from error
    return CompiledProgram(captured, eager, program, log)


def quantize_program(
    program: ExportedProgram,
    samples: Sequence[tuple[Tensor, ...]],
    spec: ArmCompileSpec | None = None,
    *,
    int16_activations: bool,
) -> ExportedProgram:
    """Quantize a program, calibrated on ``samples``; ``program`` is changed.

    All targets but Cortex-M have the same quantizer.

    Raises:
        ModelError: a tensor has no scale for these samples, or is not float32.
    """
    config = get_symmetric_a16w8_quantization_config() if int16_activations else get_symmetric_quantization_config()
    quantizer: ArmQuantizer = TOSAQuantizer(compile_spec("TOSA_INT8"))
    algorithms = _ALGORITHMS
    if isinstance(spec, CortexMCompileSpec):
        quantizer, algorithms = CortexMQuantizer(spec), _CORTEX_M_ALGORITHMS
    observed = ObservedProgram(program, quantizer.set_global(config), algorithms=algorithms)
    with torch.no_grad():
        for sample in samples:
            observed(*_clone_inputs(sample))
    observed.concat_scales.apply()
    return observed.convert()


def check(
    model: nn.Module,
    samples: Sequence[tuple[Tensor, ...]],
    target: str,
    *,
    export_twice: bool = True,
    validate_flatbuffers: bool = True,
) -> Outcome:
    """Compile a model for ``target``, run it, and check the results.

    Args:
        model: the model.
        samples: calibration samples; the program runs on the first one.
        target: name of the target.
        export_twice: compile the model twice and compare.
        validate_flatbuffers: validate the flatbuffers by tosa-opt.

    Raises:
        Failure: a check failed.
        NoExpectedResult: PyTorch cannot capture the model, or its kernels return other types than the graph has.
    """
    first, spec = compile_program(model, samples, target), compile_spec(target)
    if validate_flatbuffers:
        for record in first.log.delegates:
            validate(record.tosa, TARGETS[target].tosa)
    if isinstance(spec, EthosUCompileSpec):
        _check_streams(first)
    if isinstance(spec, CortexMCompileSpec) and validate_flatbuffers:
        _check_kernels(first, samples[0], spec)
    try:
        _check_values(first, samples[0], target)
    except Failure:
        _check_traced_types(first.captured, samples[0])
        raise
    if export_twice:
        second = compile_program(model, samples, target)
        if first.contents != second.contents:
            raise Failure("unstable", "two exports differ")
    outcome = Outcome(first.count_delegated())
    for refused in first.log.refused_operators:
        if not refused.reason.strip():
            raise Failure("crashed", f"{refused.operator} is refused without a reason")
        outcome.refused[refused.operator, refused.reason] += 1
    return outcome


def _check_streams(compiled: CompiledProgram) -> None:
    """Check that every command stream computes the bits of its TOSA graph on the emulator.

    The access checker also checks that the results depend neither on the order of operations nor on uninitialized
    memory.
    """
    by_checksum = {checksum_spec(payload).value: payload for payload in payloads(compiled.program)}
    for delegate_record in compiled.log.delegates:
        arrays = random_inputs(delegate_record, seed=0)
        try:
            expected = reference_model.run(delegate_record.tosa, arrays)
        except ArmBackendError as error:
            if not any(message in str(error) for message in _UNDEFINED_MESSAGES):
                raise
            continue  # random inputs: indices out of range, divisors of 0
        try:
            stream = EthosUDelegate(by_checksum[delegate_record.checksum], {})
            inputs = [array.reshape(-1).view("uint8") for array in arrays]
            results = stream.run(inputs)
        except Exception as error:
            raise Failure("crashed", f"emulator: {type(error).__name__}: {error}") from error
        for io, result, expected_array in zip(delegate_record.outputs, results, expected, strict=True):
            wrong = int((result.view(expected_array.dtype).reshape(expected_array.shape) != expected_array).sum())
            if wrong:
                raise Failure(
                    "wrong", "command stream", f"{delegate_record.name}: {wrong} of {expected_array.size} of {io.name}"
                )
        try:
            stream.measure(inputs)
        except RunError as error:
            raise Failure("wrong", f"on a device: {error}", delegate_record.name) from error


def _check_kernels(compiled: CompiledProgram, sample: tuple[Tensor, ...], spec: CortexMCompileSpec) -> None:
    """Check that the C++ kernels in ExecuTorch's runtime give the bits of their records in Python.

    Operators in floating point round differently there, and the kernels behind them have other inputs.
    """
    assert spec.isa is not None
    lowered = compiled.lowered(spec.isa)
    if not lowered.calls or lowered.float_operators():
        return
    try:
        outputs = lowered.run_in_executorch(_clone_inputs(sample))
    except RunError:  # an integer operator without a kernel in ExecuTorch
        return
    except Exception as error:
        raise Failure("crashed", f"runtime: {_describe_error(error)}") from error
    expected = compiled.run(sample)
    for i, (ours, theirs) in enumerate(zip(outputs[-len(expected) :], expected, strict=True)):  # after written inputs
        if not torch.equal(ours, theirs):
            raise Failure("wrong", "the runtime's kernels differ from their records", f"output {i}")


def _check_values(compiled: CompiledProgram, sample: tuple[Tensor, ...], target: str) -> None:
    try:
        outputs = compiled.run(sample)
    except Exception as error:
        raise Failure("crashed", f"at run: {_describe_error(error)}") from error
    _check_signature(outputs, compiled.eager)
    if TARGETS[target].int16_activations is None:
        _check_float(compiled.captured, sample, outputs, compiled.eager)
    else:
        _check_integer(compiled.captured, sample, outputs, target)


def _check_traced_types(program: ExportedProgram, inputs: Sequence[Tensor]) -> None:
    try:
        _run(_TracedTypeChecker, program, inputs)
    except NoExpectedResult:
        raise
    except Exception:  # the program does not run, so its types are unknown
        return


class _TracedTypeChecker(Interpreter):
    """Raises ``NoExpectedResult`` if the result of one of PyTorch's kernels is no valid reference.

    These results are invalid: another type than PyTorch traced (for example float16 moments of norms); casts of numbers
    that the integer type cannot hold; writes to elements that share memory, which change their neighbors too.
    """

    def run_node(self, n: torch.fx.Node) -> Any:
        overload = overload_of(n.target)
        writes = overload in _SCATTER_COPIES or (overload is not None and overload._schema.is_mutable)
        if writes and n.all_input_nodes and _overlaps(self.env[n.all_input_nodes[0]]):
            raise NoExpectedResult(f"{n.target} in elements that share memory")
        result, traced = super().run_node(n), n.meta.get("val")
        if not isinstance(result, Tensor) or not isinstance(traced, Tensor):
            return result
        if (result.dtype, result.shape) != (traced.dtype, traced.shape):
            raise NoExpectedResult(f"{n.target}: {result.dtype} where {traced.dtype} was traced")
        if (
            str(n.target).startswith(("aten.to.", "aten._to_copy.", "aten.type_as."))
            and traced.dtype in _INTEGER_DTYPES
        ):
            real = self.env[n.all_input_nodes[0]]
            if real.is_floating_point() and (real.abs() >= 2.0 ** (torch.iinfo(traced.dtype).bits - 1)).any():
                raise NoExpectedResult(f"{n.target} of numbers beyond {traced.dtype}")
        return result


def _overlaps(x: Tensor) -> bool:
    """Whether elements share memory: there are more elements than addresses from the first to the last."""
    return x.numel() > 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _describe_error(error: BaseException) -> str:
    """Describe an exception by its type, the compiler's innermost function in the traceback, and its message."""
    if isinstance(error, InternalError) and error.__cause__ is not None:
        error = error.__cause__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "arm_backend_core" in f.filename]
    line = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""
    text = str(error).strip().splitlines()
    message = text[0].partition("reported: ")[2] or text[0] if text else ""
    message = message[:160]
    return f"{type(error).__name__} in {line}: {message}"


def _clone_inputs(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """Clone inputs, because a program may write to them."""
    return tuple(x.clone() for x in inputs)


def _run(kind: _InterpreterFactory, program: ExportedProgram, inputs: Sequence[Tensor]) -> list[Tensor]:
    """Interpret a program's graph and return its outputs. ``program.module()`` would take longer than the program."""
    given = iter(_clone_inputs(inputs))
    tensors = {**program.state_dict, **program.constants}
    operands = [
        tensors[str(spec.target)].detach().clone() if spec.kind in TENSOR_KINDS else next(given)
        for spec in program.graph_signature.input_specs
    ]
    with torch.no_grad():
        results = flatten_tensors(kind(program.graph_module).run(*operands))
    outputs = []
    for node, result, spec in zip(
        program.graph.output_node().args[0], results, program.graph_signature.output_specs, strict=True
    ):
        if spec.kind is OutputKind.USER_OUTPUT:
            if node.meta["val"].shape != result.shape:
                raise RuntimeError("a kernel gives another shape than the operator's own shape rule")
            outputs.append(result)
    return outputs


def validate(flatbuffer: bytes, target: TosaTarget) -> None:
    """Validate a flatbuffer strictly by tosa-opt. Raises Failure if it is illegal."""
    complaint = validate_by_tosa_opt(flatbuffer, target)
    if complaint is not None:
        lines = [line for line in complaint.splitlines() if "error:" in line] or [complaint[:200]]
        raise Failure("illegal", lines[0].partition("error:")[2].strip()[:160] or lines[0])


def _check_signature(outputs: Sequence[Tensor], eager: Sequence[Tensor]) -> None:
    ours, theirs = ([(tuple(x.shape), x.dtype) for x in tensors] for tensors in (outputs, eager))
    if ours != theirs:
        raise Failure("wrong", "shapes or dtypes", f"{ours}\ninstead of\n{theirs}")


def check_runtime(model: nn.Module, samples: Sequence[tuple[Tensor, ...]], target: str) -> None:
    """Export with the recipe of the target's name, run in ExecuTorch, and compare with the outputs of the core.

    In this export, recurrent layers of more than two steps become loops.

    Raises:
        Failure: outputs differ, or the export raises an exception.
        NoExpectedResult: ExecuTorch has no kernel for an operator on the CPU, or cannot emit it.
    """
    compiled = compile_program(model, samples, target)
    expected = compiled.run(samples[0])
    try:
        result = arm_recipes.export(model, _make_recipe(target), [_clone_inputs(sample) for sample in samples])
    except Exception as error:
        if "Missing out variants" in str(error):  # an operator without elements, which no target supports
            raise NoExpectedResult(f"export: {str(error)[-80:]}") from error
        raise Failure("crashed", f"export: {_describe_error(error)}") from error
    try:
        outputs = flatten_tensors(result.run(*_clone_inputs(samples[0])))
    except RunError as error:
        raise NoExpectedResult(f"runtime: {str(error).splitlines()[0][:80]}") from error
    except Exception as error:
        raise Failure("crashed", f"runtime: {_describe_error(error)}") from error
    _check_signature(outputs, expected)
    noise: list[Tensor | float] = [1e-30] * len(outputs)
    if not _close(outputs, expected, noise) and not _close(
        outputs, expected, _estimate_noise(compiled.captured, samples[0])
    ):
        raise Failure("wrong", "the runtime's outputs are not the core's")


def _close(outputs: Sequence[Tensor], expected: Sequence[Tensor], noise: Sequence[Tensor | float]) -> bool:
    for ours, theirs, more in zip(outputs, expected, noise, strict=True):
        step = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0  # for bfloat16 more than 2e-3
        error = (ours.double() - theirs.double()).abs() - max(step, 2e-3) * theirs.double().abs()
        if not (_equal(ours, theirs) | (error <= more)).all():
            return False
    return True


def _estimate_noise(program: ExportedProgram, inputs: Sequence[Tensor]) -> list[Tensor | float]:
    """Estimate the effect of rounding on each output, with perturbed evaluations.

    Kernels may differ in cancellation, for example in x - mean(x) for a constant x. ExecuTorch's normalizations compute
    the variance as mean(x**2) - mean(x)**2.
    """
    runs = [
        [x.double() for x in _evaluate_following(follower, program, inputs, {}, ())]
        for follower in _make_float64_followers(program)
    ]
    largest = [x.nan_to_num(0.0, 0.0, 0.0).abs().amax() if x.numel() else 0.0 for x in runs[0]]
    spread = [(torch.stack(alike) - alike[0]).abs().nan_to_num(0.0).amax(0) for alike in zip(*runs, strict=True)]
    return [4 * distance + 1e-4 * most for distance, most in zip(spread, largest, strict=True)]


# -- floating point ----------------------------------------------------------------------------------------------


class _PerturbedInterpreter(quantized_reference.Float64Interpreter):
    """Evaluates in float64 and perturbs every operator that rounds in float32. ``seed`` None: no perturbation."""

    def __init__(self, module: GraphModule, seed: int | None, precision: float) -> None:
        super().__init__(module)
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._precision = precision
        self._direction = {0: 1.0, 1: -1.0}.get(
            -1 if seed is None else seed
        )  # seeds 0 and 1 perturb all values upwards and downwards, which finds discontinuities

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        overload = overload_of(target)
        if self._generator is None or overload is None or overload._schema.is_mutable:
            return self._call_in_float64(target, args, kwargs)
        if overload.namespace == "quantized_decomposed":  # a product with the scale always rounds
            return self._perturb(super().call_function(target, args, kwargs))
        if overload is torch.ops.aten.pow.Scalar:  # an integer exponent of a float base rounds like a float exponent
            args = (args[0], args[1].double() if isinstance(args[0], float) else args[1])
        if self._is_exact(target, args, kwargs):
            return self._call_in_float64(target, args, kwargs)
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), self._perturb)
        result = torch.fx.node.map_aggregate(self._call_in_float64(target, args, kwargs), self._perturb)
        if overload not in _REMAINDERS:
            return result
        return self._perturb_remainder(result, args[0], args[1], overload in _FMOD)

    def _perturb_remainder(self, result: Tensor, x: Any, y: Any, is_fmod: bool) -> Tensor:
        """Replace a remainder by 0 or the divisor where a rounding error may change the integer quotient."""
        if self._direction is None or not result.numel():
            return result
        divisor, sign = torch.as_tensor(y).abs(), torch.as_tensor(x if is_fmod else y).sign()
        whole, quotient = divisor * sign, torch.as_tensor(x) / divisor
        beyond = torch.as_tensor(x).abs().max() > whole.abs() * _MAX_EXACT_QUOTIENT
        at_jump = (quotient - quotient.round()).abs() <= 4 * self._precision * quotient.abs()
        return torch.where(beyond | at_jump, whole * (self._direction > 0), result)

    def _call_in_float64(self, target: Any, args: Any, kwargs: Any) -> Any:
        """Call an operator in float64, or in float32 if PyTorch has no float64 kernel."""
        overload = overload_of(target)
        if overload is not None and overload in _TIES_UNSPECIFIED and args[0].dim():
            target = partial(_sort, overload, self._generator)
        elif overload is torch.ops.aten.mode.default and args[0].dim() and self._generator is not None:
            target = partial(_mode, self._generator)
        elif overload is torch.ops.aten.gelu.default and kwargs.get("approximate") == "tanh":
            target = _tanh_gelu
        try:
            return super().call_function(target, args, kwargs)
        except (RuntimeError, NotImplementedError):
            if overload is None or overload._schema.is_mutable:
                raise
            args, kwargs = torch.fx.node.map_aggregate((args, kwargs), _to_float32)
            (result,) = _to_float64(target(*args, **kwargs))
            return result

    def _is_exact(self, target: Any, args: Any, kwargs: Any) -> bool:
        """Whether the operator does not round: float32 and float64 agree on random operands."""
        if overload_of(target) is torch.ops.aten.cosine_similarity.default:
            return False  # exactly 1 for vectors of one element, but TOSA divides by a rounded reciprocal
        if overload_of(target) in _REMAINDERS and _max_quotient(*args[:2]) > _MAX_EXACT_QUOTIENT:
            return False
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), self._random_like)
        args64, kwargs64 = torch.fx.node.map_aggregate(
            _to_float64(args, kwargs), lambda x: torch.float64 if x is torch.float32 else x
        )
        try:
            pair = (
                flatten_tensors(target(*args, **kwargs)),
                flatten_tensors(Interpreter.call_function(self, target, args64, kwargs64)),
            )
        except (RuntimeError, NotImplementedError):  # no float64 kernel
            return False
        return all(torch.equal(x.double(), y.double()) for x, y in zip(*pair, strict=True))

    def _random_like(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.rand(x.shape, generator=self._generator) + 0.5

    def _perturb(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        noise = torch.rand(x.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        moved = x * (1 + (noise if self._direction is None else self._direction) * self._precision)
        return torch.where(x.abs() < _SMALLEST_NORMAL, 0.0, moved) if self._direction == 1.0 else moved


def _sort(overload: OpOverload, generator: torch.Generator | None, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Sort; return values and indices. Of equal elements the first comes first, or a random one with a generator."""
    names = [argument.name for argument in overload._schema.arguments]
    given = dict(zip(names, args, strict=False)) | kwargs
    x, dim, k = given["self"], given.get("dim", -1), given.get("k")
    largest = given.get("descending", overload is torch.ops.aten.topk.default and given.get("largest", True))
    places = torch.arange(x.shape[dim])
    if generator is not None and not given.get("stable"):
        places = torch.randperm(x.shape[dim], generator=generator)
    values, order = torch.sort(x.index_select(dim, places), dim=dim, descending=largest, stable=True)
    found: tuple[Tensor, ...] = values, places[order]
    if "keepdim" not in names:
        return found if k is None else tuple(part.narrow(dim, 0, k) for part in found)
    unknown = torch.isnan(x).any(dim, keepdim=True) & (k is None)  # NaN is the last element, and the median
    rank = torch.where(unknown, x.shape[dim] - 1, (x.shape[dim] + 1) // 2 - 1 if k is None else k - 1)
    found = tuple(part.gather(dim, rank) for part in found)
    return found if given.get("keepdim") else tuple(part.squeeze(dim) for part in found)


def _mode(generator: torch.Generator, x: Tensor, dim: int = -1, keepdim: bool = False) -> tuple[Tensor, Tensor]:
    """Return the mode and a random one of its indices; elements that were equal before perturbation count as equal."""
    coarse = x.float().bfloat16()
    hits = coarse == coarse.mode(dim, keepdim=True).values
    place = (hits * (1 + torch.rand(x.shape, generator=generator))).argmax(dim, keepdim=True)
    found = x.gather(dim, place), place
    return found if keepdim else (found[0].squeeze(dim), place.squeeze(dim))


def _tanh_gelu(x: Tensor, *, approximate: str) -> Tensor:
    """GELU with tanh as x * sigmoid(2 * u) = x * (1 + tanh(u)) / 2; the latter formula cancels for tanh(u) near -1."""
    assert approximate == "tanh"
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _max_quotient(x: Any, y: Any) -> float:
    """Return an upper bound of the quotients of elements of ``x`` and ``y``."""
    dividend, divisor = (torch.as_tensor(z).abs().double() for z in (x, y))
    return float(dividend.max() / divisor.min()) if dividend.numel() and divisor.numel() else 0.0


def _to_float64(*arguments: Any) -> Any:
    return torch.fx.node.map_aggregate(
        arguments, lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
    )


def _to_float32(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype is torch.float64 else x


def _check_float(
    program: ExportedProgram, inputs: Sequence[Tensor], outputs: Sequence[Tensor], eager: Sequence[Tensor]
) -> None:
    metas = [node.meta.get("val") for node in program.graph.nodes]
    precision = max(_RELATIVE_ERROR.get(getattr(meta, "dtype", None), _FLOAT32_ERROR) for meta in metas)  # type: ignore[arg-type]
    evaluations: list[list[Tensor]] = []
    for seed in [None, *range(_MAX_EVALUATIONS)]:  # stop as soon as the outputs agree
        evaluations.append(_evaluate(partial(_PerturbedInterpreter, seed=seed, precision=precision), program, inputs))
        wrong = _describe_disagreement(evaluations, outputs, eager, precision) if len(evaluations) > 2 else ""
        if len(evaluations) > 2 and not wrong:
            return
    raise Failure("wrong", "float values", wrong)


def _describe_disagreement(
    evaluations: Sequence[Sequence[Tensor]], outputs: Sequence[Tensor], eager: Sequence[Tensor], precision: float
) -> str:
    """Describe the first wrong output; empty if all agree. The first evaluation is exact, the others are perturbed."""
    for i, (ours, theirs) in enumerate(zip(outputs, eager, strict=True)):
        exact, *others = [evaluation[i].double() for evaluation in evaluations]
        spread = torch.stack([(other - exact).abs() for other in others]).amax(0)
        # Overflow and the rounding errors of float32 itself are allowed.
        allowed = 8 * spread + 4 * (theirs.double() - exact).abs() + precision * exact.abs() + 1e-36
        wrong = ~_equal(ours, theirs) & ~((ours.double() - exact).abs() <= allowed) & allowed.isfinite()
        if theirs.dtype.is_floating_point:
            wrong &= exact.isfinite() & (exact.abs() < torch.finfo(theirs.dtype).max)
            certain = torch.stack([_equal(other, exact) for other in others]).all(0) & _equal(theirs.double(), exact)
            wrong |= ~exact.isfinite() & certain & ~_equal(ours, theirs)
        if wrong.any():
            at = int(wrong.flatten().nonzero()[0])
            detail = " ".join(
                f"{name} {float(x.flatten()[at]):.9g}"
                for name, x in (("got", ours), ("eager", theirs), ("float64", exact), ("allowed", allowed))
            )
            return f"output {i}, {int(wrong.sum())} of {wrong.numel()}: {detail}"
    return ""


def _evaluate(kind: _InterpreterFactory, program: ExportedProgram, inputs: Sequence[Tensor]) -> list[Tensor]:
    try:
        return _run(kind, program, inputs)
    except Exception as error:  # some operators have no float64 kernel, or a stricter one
        raise NoExpectedResult(f"evaluation: {type(error).__name__}: {str(error)[:80]}") from error


def _equal(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (x.isnan() & y.isnan())


# -- integer -----------------------------------------------------------------------------------------------------


class _TeacherForcedInterpreter(Interpreter):
    """Continues with the target's integers after each quantize node, and records PyTorch's values.

    Attributes:
        target_values: the target's integers by quantize node.
        reference_values: PyTorch's values by quantize node, in steps of the scale, neither rounded nor clipped. The
            target's value replaces NaN. Further values are those at the table entries around each operand.
        constants: names of the placeholders that are constants.
        is_division_by_zero_undefined: whether a quotient with a divisor of 0 is NaN: Cortex-M kernels return 0.
    """

    target_values: dict[str, Tensor]
    reference_values: dict[str, list[Tensor]]
    constants: Collection[str]
    is_division_by_zero_undefined = False

    def follow(self, ours: dict[str, Tensor], constants: Collection[str]) -> None:
        """Set the target's integers and the names of constants."""
        self.target_values, self.reference_values, self.constants = ours, {}, constants
        self.garbage_collect_values = False

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        result = super().call_function(target, args, kwargs)
        if self.is_division_by_zero_undefined and target is torch.ops.aten.div.Tensor and isinstance(args[1], Tensor):
            return torch.where(args[1] == 0, math.nan, result)
        return result

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.name not in self.target_values or n.op != "call_function":
            return super().run_node(n)
        ours, (source, scale, zero_point, *_) = self.target_values[n.name], cast(tuple[Any, ...], n.args)
        reals = [self.env[source], *(self._table_neighbors(n) if ours.dtype is torch.int16 else [])]
        steps = [real.double() / scale + zero_point for real in reals]
        self.reference_values[n.name] = [torch.where(real.isnan(), ours.double(), real) for real in steps]
        return ours

    def _table_neighbors(self, quantize: torch.fx.Node) -> list[Tensor]:
        """Evaluate a function of one int16 tensor at the two table entries around each value; bounds of fitted entries.

        An int16 TABLE has 513 entries at a distance of 128, and interpolates between them. A second table for the part
        around a pole has entries at a distance of 16 or 4. Fitted entries differ from the function by a twelfth of its
        second difference.
        """
        region = _find_univariate_region(quantize, self.constants)
        if region is None:
            return []
        base = region[0].all_input_nodes[0]
        index = self.env[base].long()
        points = [index.div(step, rounding_mode="floor") * step + more for step in (128, 16, 4) for more in (0, step)]
        points += [points[0] - 128, points[1] + 128]
        reals = [self._recompute(region, base, point.clamp(-32768, 32767).to(torch.int16)) for point in points]
        before, left, right, after = (reals[i].double() for i in (6, 0, 1, 7))
        shifts = [(left - (before + right) / 2).abs() / 6, (right - (left + after) / 2).abs() / 6]
        largest = torch.maximum(*(shift.nan_to_num(0.0, 0.0) for shift in shifts))
        return [*reals[:6], torch.minimum(left, right) - largest, torch.maximum(left, right) + largest]

    def _recompute(self, region: list[torch.fx.Node], base: torch.fx.Node, value: Tensor) -> Tensor:
        env: dict[torch.fx.Node, Any] = {base: value}
        for node in region[:-1]:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: env.get(x, self.env.get(x)))
            env[node] = self.call_function(node.target, args, kwargs)
        real: Tensor = env[region[-1].all_input_nodes[0]]
        return real


class _TeacherForcedFloat32(_TeacherForcedInterpreter):
    """Evaluates in float32."""


class _TeacherForcedFloat64(_TeacherForcedInterpreter, _PerturbedInterpreter):
    """Evaluates in float64, or perturbed. An operator whose record declares an error is perturbed by that.

    One of the perturbed evaluations treats numbers as equal that the target's 32-bit comparisons cannot distinguish.
    """

    _error = _equality_tolerance = 0.0

    def run_node(self, n: torch.fx.Node) -> Any:
        operands = [cast(tuple[Any, ...], source.args) for source in n.all_input_nodes if is_dequantize(source)]
        steps = [(step, most) for _, step, _, _, most, *_ in operands if isinstance(step, float)]
        self._equality_tolerance = max(
            (step * 2.0 ** (-19 if most < 256 else -14) for step, most in steps), default=0.0
        )
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        overload = overload_of(target)
        if self._direction == 1.0 and overload is not None and overload._schema.name in _COMPARISONS:
            x, y = args
            args = x, torch.where((x - y).abs() <= self._equality_tolerance, x, y) if isinstance(y, Tensor) else y
        record = None if overload is None else aten_entries().get(overload)
        self._error = record.error_bound if isinstance(record, Record) else 0.0
        return super().call_function(target, args, kwargs)

    def _perturb(self, x: Any) -> Any:
        if not self._error or not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return super()._perturb(x)
        noise = torch.rand(x.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return x + (noise if self._direction is None else self._direction) * self._error * x.abs().max()


def _make_float64_followers(program: ExportedProgram) -> list[_TeacherForcedFloat64]:
    """Create one exact float64 evaluator and several that are perturbed by float32 roundings."""
    return [_TeacherForcedFloat64(program.graph_module, seed, _FLOAT32_ERROR) for seed in [None, *range(_EVALUATIONS)]]


def _evaluate_following(
    follower: _TeacherForcedInterpreter,
    program: ExportedProgram,
    inputs: Sequence[Tensor],
    ours: dict[str, Tensor],
    constants: Collection[str],
) -> list[Tensor]:
    """Evaluate the program while following the target's integers, and return its outputs."""
    follower.follow(ours, constants)
    return _evaluate(lambda _: follower, program, inputs)


def _find_univariate_region(quantize: torch.fx.Node, constants: Collection[str]) -> list[torch.fx.Node] | None:
    """Find the nodes that compute ``quantize`` elementwise from one dequantized int16 tensor; None if it has others."""
    region, todo, bases = {quantize}, list(quantize.all_input_nodes), set()
    while todo:
        node = todo.pop()
        if node in region or _is_constant(node, constants):
            continue
        region.add(node)
        if is_dequantize(node):
            bases.add(node.all_input_nodes[0])
            continue
        record = find_record(node)
        if record is None or not record.is_univariate:
            return None
        todo += node.all_input_nodes
    if len(bases) != 1 or not isinstance(next(iter(bases)).meta.get("val"), Tensor):
        return None
    if next(iter(bases)).meta["val"].dtype is not torch.int16:
        return None
    inner = [find_record(node) for node in region if node is not quantize and not is_dequantize(node)]
    if len(inner) < 2 and all(record is not None and record.clamp_bounds for record in inner):
        return None  # the result is a RESCALE or a CLAMP, which is exact
    return [node for node in quantize.graph.nodes if node in region]


def _is_constant(node: torch.fx.Node, constants: Collection[str]) -> bool:
    """Whether a node is computed from constants only."""
    todo, seen = [node], {node}
    while todo:
        source = todo.pop()
        if source.op == "placeholder" and source.name not in constants:
            return False
        todo += [before for before in source.all_input_nodes if before not in seen]
        seen.update(todo)
    return True


#: Difference of adjacent table entries, in output steps, from which a second table may be added to the first.
_STEEP_STEPS = 64


def _expected_range(found: list[list[Tensor]], exact: Tensor, quantize: torch.fx.Node) -> tuple[Tensor, Tensor]:
    """Return the smallest and the largest integers that rounding inside an operator may produce.

    Args:
        found: for each evaluator the value, and the values at the adjacent table entries.
        exact: the value in float64.
        quantize: the quantize node.
    """
    noise = torch.stack([(value - exact).abs().nan_to_num(0.0) for value, *_ in found]).amax(0)
    values = torch.stack([exact - noise, exact + noise, *(point for _, *points in found for point in points)])
    least, most = cast(tuple[float, float], quantize.args[3:5])
    ends = values.amin(0), values.amax(0)
    more = ((ends[1] - ends[0] > _STEEP_STEPS) & (len(found[0]) > 1)).double()  # two tables and their sum are rounded
    low, high = (end.round().clamp(least, most).long() for end in (ends[0] - more, ends[1] + more))
    return low, high


def _output_scales(program: ExportedProgram) -> list[float]:
    """Return the scale of each user output; 0 if the output is not the result of a dequantize node."""
    results = program.graph.output_node().args[0]
    nodes = [
        node
        for node, spec in zip(cast(Sequence[Any], results), program.graph_signature.output_specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    scales = [n.args[1] if isinstance(n, torch.fx.Node) and is_dequantize(n) else 0.0 for n in nodes]
    return [scale if isinstance(scale, float) else 0.0 for scale in scales]


#: Operators whose results are elements of their operands: the RESCALEs of the operands and of the result are merged.
_SELECTIONS = {"aten::where", "aten::cat", "aten::clamp", "aten::maximum", "aten::minimum", "aten::constant_pad_nd"}
_SPREAD_EVALUATIONS = 6


def _spread_of_merged_rescales(
    program: ExportedProgram, ours: dict[str, Tensor], evaluate: Callable[[dict[str, Tensor]], list[Tensor]]
) -> list[Tensor]:
    """Return by how much each output changes if requantized selections are rounded differently, by up to one step.

    Args:
        program: the program.
        ours: the target's integers by quantize node.
        evaluate: function that evaluates the program while following such integers, and returns its outputs.
    """
    selections, derived = list[str](), set[torch.fx.Node]()
    followed = dict(ours)  # except the integers that are computed from selections
    for node in program.graph.nodes:
        if derived.intersection(node.all_input_nodes):
            derived.add(node)
            followed.pop(node.name, None)
        elif node.name in ours and _is_selection(node.args[0]):
            selections.append(node.name)
            derived.add(node)
    exact = evaluate(followed)
    spreads = [torch.zeros(x.shape, dtype=torch.float64) for x in exact]
    generator = torch.Generator().manual_seed(0)
    for _ in range(_SPREAD_EVALUATIONS if selections else 0):
        shifted = {name: _shift_by_a_step(ours[name], generator) for name in selections}
        for spread, x, y in zip(spreads, exact, evaluate(followed | shifted), strict=True):
            torch.maximum(spread, (x.double() - y.double()).abs().nan_to_num(0.0), out=spread)
    return spreads


def _is_selection(node: Any) -> bool:
    overload = overload_of(node.target) if isinstance(node, torch.fx.Node) else None
    return overload is not None and overload._schema.name in _SELECTIONS


def _shift_by_a_step(x: Tensor, generator: torch.Generator) -> Tensor:
    """Add -1, 0 or 1 to each integer, within the range of the type."""
    steps, limits = torch.randint(-1, 2, x.shape, generator=generator), torch.iinfo(x.dtype)
    return (x.long() + steps).clamp(limits.min, limits.max).to(x.dtype)


def _check_integer(program: ExportedProgram, inputs: Sequence[Tensor], outputs: Sequence[Tensor], target: str) -> None:
    exposed = quantized_reference.expose_quantized_tensors(program, None)
    nodes = list(exposed.graph.output_node().args[0])
    try:
        values = _run(Interpreter, delegate(exposed, compile_spec(target)), inputs)
    except Exception as error:
        raise Failure("crashed", f"exposed: {_describe_error(error)}") from error
    ours = {node.name: value for node, value in zip(nodes, values, strict=True)}
    followers: list[_TeacherForcedInterpreter] = [
        _TeacherForcedFloat32(program.graph_module),
        *_make_float64_followers(program),
    ]
    constants = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind in TENSOR_KINDS]
    for follower in followers:
        follower.is_division_by_zero_undefined = isinstance(compile_spec(target), CortexMCompileSpec)
    expected = [_evaluate_following(follower, program, inputs, ours, constants) for follower in followers]
    for node in nodes:
        if node.name not in followers[1].reference_values:
            continue
        low, high = _expected_range(
            [follower.reference_values[node.name] for follower in followers],
            followers[1].reference_values[node.name][0],
            node,
        )
        mine = ours[node.name].long()
        distance = torch.maximum(low - mine, mine - high)
        if (distance > 1).any():
            steps = f"{int(distance.max())} steps of {node.args[1]} ({ours[node.name].dtype})"
            share = f"{int((distance > 1).sum())} of {distance.numel()} elements"
            raise Failure("wrong", f"steps at {node.args[0].target}", f"{node.name}: {steps}, {share}")
    scales = _output_scales(program)
    evaluate = partial(_evaluate_following, followers[1], program, inputs, constants=constants)
    spreads = cache(lambda: _spread_of_merged_rescales(program, ours, evaluate))
    for i, (got, wanted, *others) in enumerate(zip(outputs, *expected, strict=True)):
        # Two consecutive RESCALEs are merged if no other operator reads the first result.
        close = (got.double() - wanted.double()).abs() <= 1.001 * scales[i]
        for value in (wanted, *others):  # rounding decides whether 1.0 exceeds 255 steps of 1 / 255
            close |= _equal(got, value) | torch.isclose(got.double(), value.double(), rtol=1e-5, atol=0)
        if not close.all():
            close |= (got.double() - wanted.double()).abs() <= 2 * spreads()[i] + 1.001 * scales[i]
        if not close.all():
            at = int((~close).flatten().nonzero()[0])
            pair = f"{float(got.flatten()[at]):.9g} instead of {float(wanted.flatten()[at]):.9g}"
            count = int((~close).sum())
            raise Failure("wrong", "not its own intermediate values", f"output {i}, {count} elements: {pair}")
