"""What a program must compute on a target, and everything else that an export of it must be.

**Floating point.** The program is evaluated in float64, and again a few times with every operator that rounds slightly
wrong: operands and result are off by a random relative error of some float32 roundings (mixed forward-backward
stability: the most that can be asked of an implementation). What these evaluations are apart is what the target may be
off; where they are far apart, or of different kinds (a comparison of numbers that are equal but for rounding), the
program has no number to compare with. Operators that do not round (movement, comparison, relu) are not moved.

**Integer.** Every tensor that the quantized graph quantizes is made an output: each must be within one step of what
PyTorch computes from the target's own earlier tensors, in float32, in float64, or perturbed likewise; an int16 TABLE
may be anywhere between two of its points. The program itself must then return what these tensors give.

**Ethos-U.** What Vela made is executed, command by command, and must give the bits of the graph that it was made from.
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
from arm_backend_core import events
from arm_backend_core.backends.payload import checksum_spec
from arm_backend_core.delegate import delegate
from arm_backend_core.errors import ArmBackendError, InternalError, ModelError
from arm_backend_core.nodes import is_dequantize, overload_of
from arm_backend_core.ops.catalog import find_record, records
from arm_backend_core.ops.registry import Record
from arm_backend_core.program import TENSOR_KINDS
from arm_backend_core.quantization import (
    TOSAQuantizer,
    get_symmetric_a16w8_quantization_config,
    get_symmetric_quantization_config,
)
from arm_backend_core.quantization.ptq import ObservedProgram
from arm_backend_core.targets.compile_spec import ArmCompileSpec, EthosUCompileSpec, TosaCompileSpec
from arm_backend_core.targets.target import Target as TosaTarget
from arm_backend_core.tosa import reference
from arm_recipes import ArmRecipeType
from arm_recipes.runtime.errors import RunError
from arm_recipes.runtime.ethosu import EthosUDelegate
from tests.graphs import tosa_opt
from tests.models import quantized_reference
from tests.ops.runner import export, flat
from tests.runtime.ethosu_emulator import payloads, random_inputs

#: Relative error that an operator may make, by the element type of its result.
_PRECISION = {torch.float64: 2.0**-20, torch.float32: 2.0**-20, torch.bfloat16: 2.0**-7, torch.float16: 2.0**-10}
_FLOAT32 = 2.0**-20
#: They write to a copy of what they are given; ``nanmedian`` writes indices where a copy of values should be.
_WRITING = {getattr(torch.ops.aten, f"{part}_scatter").default for part in ("select", "slice", "diagonal")}
_WRITING |= {torch.ops.aten.copy.default, torch.ops.aten.nanmedian.dim}
#: PyTorch says that their results may name any of equal elements, ``sort.stable`` where it is not asked to be.
_ANY_OF_EQUALS = {getattr(torch.ops.aten, name).default for name in ("topk", "sort", "kthvalue")}
_ANY_OF_EQUALS |= {torch.ops.aten.sort.stable, torch.ops.aten.median.dim}
_COMPARISONS = [f"aten::{name}" for name in ("eq", "ne", "gt", "ge", "lt", "le")]
#: Smaller ones may be taken for 0 (TOSA 1.0, floating-point behavior of each operator).
_SUBNORMAL = 2.0**-126
#: A remainder of a larger quotient is off as its operands are.
_REMAINDERS = {getattr(torch.ops.aten.remainder, kind) for kind in ("Tensor", "Scalar", "Scalar_Tensor")}
_REMAINDERS |= {torch.ops.aten.fmod.Tensor, torch.ops.aten.fmod.Scalar}
_EXACT_REMAINDER = 2.0**20
#: What the reference model says where TOSA leaves a result undefined.
_BEYOND_TOSA = ("UNPREDICTABLE", "exceed valid range", "divisor must be non-zero")
_WHOLE = (torch.int8, torch.int16, torch.int32, torch.int64)
_EVALUATIONS = 4
#: Floating point: so many before a number is called wrong. A tie falls the other way in about every second one.
_MOST_EVALUATIONS = 60
_Kind = Callable[[GraphModule], Interpreter]
#: What recipes algorithms that gives operators other types and scales; the rest gives them other weights.
_IMPROVE = ("int16_angles", "int16_attention", "concat_scales", "fused_norms", "int16_outputs", "fused_rms_norms")


@dataclass(frozen=True)
class Target:
    """What a program is compiled for, and how it is quantized."""

    spec: str
    wide: bool | None = None
    """int16 activations; None: not quantized."""

    @property
    def tosa(self) -> TosaTarget:
        """What its flatbuffers may use."""
        return TosaTarget.from_tosa_spec(
            "TOSA-1.0+FP" if self.wide is None else "TOSA-1.0+INT+int16+int4+doubleround+inexactround"
        )


TARGETS = {
    "TOSA_FP": Target("TOSA-1.0+FP"),
    "TOSA_INT8": Target("TOSA-1.0+INT+int16", wide=False),
    "TOSA_A16W8": Target("TOSA-1.0+INT+int16", wide=True),
    "ETHOSU_U55_INT8": Target("ethos-u55-128", wide=False),
    "ETHOSU_U65_INT8": Target("ethos-u65-256", wide=False),
    "ETHOSU_U85_INT8": Target("ethos-u85-256", wide=False),
    "ETHOSU_U55_A16W8": Target("ethos-u55-128", wide=True),
    "ETHOSU_U65_A16W8": Target("ethos-u65-256", wide=True),
    "ETHOSU_U85_A16W8": Target("ethos-u85-256", wide=True),
}


@cache
def compile_spec(name: str) -> ArmCompileSpec:
    """How to compile for a target."""
    spec = TARGETS[name].spec
    return EthosUCompileSpec(spec) if spec.startswith("ethos") else TosaCompileSpec(spec)


class Failure(Exception):
    """A program is not as it must be.

    Attributes:
        kind: ``crashed``, ``wrong``, ``illegal`` or ``unstable`` (two exports differ).
        cause: what failures of one cause have in common; a smaller program has failed alike if it is the same.
    """

    def __init__(self, kind: str, cause: str, detail: str = "") -> None:
        super().__init__(f"{kind}: {cause}" + (f"\n{detail}" if detail else ""))
        self.kind = kind
        self.cause = re.sub(r"\d+", "#", cause)  # numbers of nodes, sizes


class Undefined(Exception):
    """There is nothing to compare with: torch.export cannot capture it, or its tensors have no scale."""


@dataclass
class Outcome:
    """What is known of a program that passed: operators that ran on the target, and why others did not."""

    delegated: int = 0
    refused: Counter[tuple[str, str]] = field(default_factory=Counter)


@dataclass(frozen=True)
class Compiled:
    """A program, what it was made from, and what its delegation recorded.

    Attributes:
        captured: quantized, if the target is.
        eager: outputs for the first sample before it was quantized.
    """

    captured: ExportedProgram
    eager: list[Tensor]
    program: ExportedProgram
    log: events.Log

    def run(self, inputs: Sequence[Tensor]) -> list[Tensor]:
        """Outputs; delegates run on the reference model."""
        return _run(_LaidOut, self.program, inputs)


class _LaidOut(Interpreter):
    """As ExecuTorch does, in whose memory tensors lie as they were traced; some kernels of PyTorch's do otherwise."""

    def run_node(self, n: torch.fx.Node) -> Any:
        result, traced = super().run_node(n), n.meta.get("val")
        laid_out = isinstance(result, Tensor) and isinstance(traced, Tensor) and traced.is_contiguous()
        return result.contiguous() if laid_out else result


def compiled(model: nn.Module, samples: Sequence[tuple[Tensor, ...]], target: str) -> Compiled:
    """Capture, quantize with ``samples``, delegate.

    Raises:
        Undefined: PyTorch does not get as far as our code.
        Failure: our code raised.
    """
    try:
        captured = export(model, _copies(samples[0]))
        eager = _run(Interpreter, captured, samples[0])
    except Exception as error:
        raise Undefined(f"torch.export: {type(error).__name__}: {str(error).splitlines()[0][:80]}") from error
    try:
        if TARGETS[target].wide is not None:
            captured = quantized(captured, samples, wide=bool(TARGETS[target].wide))
        with events.record() as log:
            program = delegate(captured, compile_spec(target))
    except ModelError as error:
        raise Undefined(f"{type(error).__name__}: {str(error)[:80]}") from error
    except Exception as error:
        raise Failure("crashed", _where(error)) from error
    return Compiled(captured, eager, program, log)


def quantized(program: ExportedProgram, samples: Sequence[tuple[Tensor, ...]], *, wide: bool) -> ExportedProgram:
    """The quantized graph, calibrated on ``samples``; ``program`` is edited.

    Raises:
        ModelError: a sample makes a tensor that has no scale, or one is not float32.
    """
    config = get_symmetric_a16w8_quantization_config() if wide else get_symmetric_quantization_config()
    observed = ObservedProgram(
        program, TOSAQuantizer(compile_spec("TOSA_INT8")).set_global(config), algorithms=_IMPROVE
    )
    with torch.no_grad():
        for sample in samples:
            observed(*_copies(sample))
    observed.concat_scales.apply()
    return observed.convert()


def check(
    model: nn.Module, samples: Sequence[tuple[Tensor, ...]], target: str, *, again: bool = True, validated: bool = True
) -> Outcome:
    """Compile a model for ``target``, run it, and check all that must hold.

    Args:
        samples: calibrate it; the first one is what it is run with.
        again: compile it twice.
        validated: give the flatbuffers to tosa-opt.

    Raises:
        Failure: something does not hold.
        Undefined: it cannot be captured, or PyTorch's kernels give other types than its graph says.
    """
    first = compiled(model, samples, target)
    if validated:
        for made in first.log.delegates:
            validate(made.tosa, TARGETS[target].tosa)
    if isinstance(compile_spec(target), EthosUCompileSpec):
        _check_streams(first)
    try:
        _check_values(first, samples[0], target)
    except Failure:
        _check_traced(first.captured, samples[0])
        raise
    if again:
        second = compiled(model, samples, target)
        if [made.tosa for made in first.log.delegates] != [made.tosa for made in second.log.delegates]:
            raise Failure("unstable", "two exports differ")
    outcome = Outcome(sum(len(made.operators) for made in first.log.delegates))
    for refused in first.log.rejected:
        if not refused.reason.strip():
            raise Failure("crashed", f"{refused.operator} is refused without a reason")
        outcome.refused[refused.operator, refused.reason] += 1
    return outcome


def _check_streams(made: Compiled) -> None:
    """Every command stream, as the emulator executes it, must give the bits of the graph that it was compiled from.

    And it must not owe them to the emulator's order of operations, or to memory that nothing has written.
    """
    by_checksum = {checksum_spec(payload).value: payload for payload in payloads(made.program)}
    for delegated in made.log.delegates:
        arrays = random_inputs(delegated, seed=0)
        try:
            right = reference.run(delegated.tosa, arrays)
        except ArmBackendError as error:
            if not any(said in str(error) for said in _BEYOND_TOSA):
                raise
            continue  # of random numbers: indices beyond what they index, divisors of 0
        try:
            stream = EthosUDelegate(by_checksum[delegated.checksum], {})
            inputs = [array.reshape(-1).view("uint8") for array in arrays]
            given = stream.run(inputs)
        except Exception as error:
            raise Failure("crashed", f"emulator: {type(error).__name__}: {error}") from error
        for io, ours, theirs in zip(delegated.outputs, given, right, strict=True):
            wrong = int((ours.view(theirs.dtype).reshape(theirs.shape) != theirs).sum())
            if wrong:
                raise Failure("wrong", "command stream", f"{delegated.name}: {wrong} of {theirs.size} of {io.name}")
        try:
            stream.run_checked(inputs)
        except RunError as error:
            raise Failure("wrong", f"on a device: {error}", delegated.name) from error


def _check_values(made: Compiled, sample: tuple[Tensor, ...], target: str) -> None:
    try:
        outputs = made.run(sample)
    except Exception as error:
        raise Failure("crashed", f"at run: {_where(error)}") from error
    _check_signature(outputs, made.eager)
    if TARGETS[target].wide is None:
        _check_float(made.captured, sample, outputs, made.eager)
    else:
        _check_integer(made.captured, sample, outputs, target)


def _check_traced(program: ExportedProgram, inputs: Sequence[Tensor]) -> None:
    try:
        _run(_AsTraced, program, inputs)
    except Undefined:
        raise
    except Exception:  # it does not run at all: nothing is known of its types
        return


class _AsTraced(Interpreter):
    """Raises ``Undefined`` where PyTorch's kernels give what nobody can hold a target to.

    Another type than PyTorch traced (moments of float16 in norms, say), integers of numbers beyond their type, or
    what was replaced in windows that share memory: the copy shares it too, and neighbors are replaced as well.
    """

    def run_node(self, n: torch.fx.Node) -> Any:
        overload = overload_of(n.target)
        writes = overload in _WRITING or (overload is not None and overload._schema.is_mutable)
        if writes and n.all_input_nodes and _overlaps(self.env[n.all_input_nodes[0]]):
            raise Undefined(f"{n.target} in elements that share memory")
        result, traced = super().run_node(n), n.meta.get("val")
        if not isinstance(result, Tensor) or not isinstance(traced, Tensor):
            return result
        if (result.dtype, result.shape) != (traced.dtype, traced.shape):
            raise Undefined(f"{n.target}: {result.dtype} where {traced.dtype} was traced")
        if str(n.target).startswith(("aten.to.", "aten._to_copy.", "aten.type_as.")) and traced.dtype in _WHOLE:
            real = self.env[n.all_input_nodes[0]]
            if real.is_floating_point() and (real.abs() >= 2.0 ** (torch.iinfo(traced.dtype).bits - 1)).any():
                raise Undefined(f"{n.target} of numbers beyond {traced.dtype}")
        return result


def _overlaps(x: Tensor) -> bool:
    """Whether there are more elements than memory from the first to the last."""
    return x.numel() > 1 + sum((size - 1) * stride for size, stride in zip(x.shape, x.stride(), strict=True))


def _where(error: BaseException) -> str:
    """Kind of the exception and the innermost line of ours that it went through."""
    if isinstance(error, InternalError) and error.__cause__ is not None:
        error = error.__cause__
    frames = [f for f in traceback.extract_tb(error.__traceback__) if "arm_backend_core" in f.filename]
    line = f"{Path(frames[-1].filename).name}:{frames[-1].name}" if frames else ""
    text = str(error).strip().splitlines()
    said = text[0].partition("reported: ")[2] or text[0] if text else ""
    said = said[:160]
    return f"{type(error).__name__} in {line}: {said}"


def _copies(inputs: Sequence[Tensor]) -> tuple[Tensor, ...]:
    """What a program writes to its inputs stays its own."""
    return tuple(x.clone() for x in inputs)


def _run(kind: _Kind, program: ExportedProgram, inputs: Sequence[Tensor]) -> list[Tensor]:
    """A program's outputs. The graph is interpreted as it is: ``program.module()`` takes longer than what is run."""
    given = iter(_copies(inputs))
    held = {**program.state_dict, **program.constants}
    operands = [
        held[str(spec.target)].detach().clone() if spec.kind in TENSOR_KINDS else next(given)
        for spec in program.graph_signature.input_specs
    ]
    with torch.no_grad():
        results = flat(kind(program.graph_module).run(*operands))
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
    """Strict validation by tosa-opt."""
    complaint = tosa_opt(flatbuffer, target)
    if complaint is not None:
        lines = [line for line in complaint.splitlines() if "error:" in line] or [complaint[:200]]
        raise Failure("illegal", lines[0].partition("error:")[2].strip()[:160] or lines[0])


def _check_signature(outputs: Sequence[Tensor], eager: Sequence[Tensor]) -> None:
    ours, theirs = ([(tuple(x.shape), x.dtype) for x in tensors] for tensors in (outputs, eager))
    if ours != theirs:
        raise Failure("wrong", "shapes or dtypes", f"{ours}\ninstead of\n{theirs}")


def check_runtime(model: nn.Module, samples: Sequence[tuple[Tensor, ...]], target: str) -> None:
    """Export with the recipe of that name and run in ExecuTorch: the outputs must be those of the core.

    Recurrent layers of more than two steps are loops there.

    Raises:
        Failure: they are not, or the export raises.
        Undefined: ExecuTorch has no kernel for an operator that stays on the CPU, or cannot write it.
    """
    made = compiled(model, samples, target)
    expected = made.run(samples[0])
    same = {} if TARGETS[target].wide is None else {"algorithms": _IMPROVE}
    recipe = ExportRecipe.get_recipe(ArmRecipeType[target], steps_per_call=2, **same)
    try:
        result = arm_recipes.export(model, recipe, [_copies(sample) for sample in samples])
    except Exception as error:
        if "Missing out variants" in str(error):  # an operator without elements, which no target takes
            raise Undefined(f"export: {str(error)[-80:]}") from error
        raise Failure("crashed", f"export: {_where(error)}") from error
    try:
        outputs = flat(result.run(*_copies(samples[0])))
    except RunError as error:
        raise Undefined(f"runtime: {str(error).splitlines()[0][:80]}") from error
    except Exception as error:
        raise Failure("crashed", f"runtime: {_where(error)}") from error
    _check_signature(outputs, expected)
    noise: list[Tensor | float] = [1e-30] * len(outputs)
    if not _close(outputs, expected, noise) and not _close(outputs, expected, _noise(made.captured, samples[0])):
        raise Failure("wrong", "the runtime's outputs are not the core's")


def _close(outputs: Sequence[Tensor], expected: Sequence[Tensor], noise: Sequence[Tensor | float]) -> bool:
    for ours, theirs, more in zip(outputs, expected, noise, strict=True):
        step = torch.finfo(ours.dtype).eps if ours.is_floating_point() else 0.0  # of bfloat16 more than what is allowed
        error = (ours.double() - theirs.double()).abs() - max(step, 2e-3) * theirs.double().abs()
        if not (_equal(ours, theirs) | (error <= more)).all():
            return False
    return True


def _noise(program: ExportedProgram, inputs: Sequence[Tensor]) -> list[Tensor | float]:
    """How far roundings move each output: kernels may cancel differently, x - mean where x is the mean, say.

    Within an operator too: ExecuTorch's normalizations subtract the mean's square from that of the squares.
    """
    runs = [[x.double() for x in _judged(judge, program, inputs, {}, ())] for judge in _roundings(program)]
    largest = [x.nan_to_num(0.0, 0.0, 0.0).abs().amax() if x.numel() else 0.0 for x in runs[0]]
    spread = [(torch.stack(alike) - alike[0]).abs().nan_to_num(0.0).amax(0) for alike in zip(*runs, strict=True)]
    return [4 * apart + 1e-4 * most for apart, most in zip(spread, largest, strict=True)]


# -- floating point ----------------------------------------------------------------------------------------------


class _Perturbed(quantized_reference.Float64Interpreter):
    """float64, with every operator that rounds in float32 slightly off. ``seed`` None: as it is."""

    def __init__(self, module: GraphModule, seed: int | None, precision: float) -> None:
        super().__init__(module)
        self._generator = None if seed is None else torch.Generator().manual_seed(seed)
        self._precision = precision
        self._side = {0: 1.0, 1: -1.0}.get(-1 if seed is None else seed)  # all too large, all too small: finds jumps

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        overload = overload_of(target)
        if self._generator is None or overload is None or overload._schema.is_mutable:
            return self._called(target, args, kwargs)
        if overload.namespace == "quantized_decomposed":  # a product with the scale rounds, whatever it is
            return self._noisy(super().call_function(target, args, kwargs))
        if overload is torch.ops.aten.pow.Scalar:  # a whole exponent of a real base rounds as much as a real one
            args = (args[0], args[1].double() if isinstance(args[0], float) else args[1])
        if self._exact(target, args, kwargs):
            return self._called(target, args, kwargs)
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), self._noisy)
        result = torch.fx.node.map_aggregate(self._called(target, args, kwargs), self._noisy)
        return self._remaining(result, *args[:2]) if overload in _REMAINDERS else result

    def _remaining(self, result: Tensor, x: Any, y: Any) -> Tensor:
        """Nothing or all of the divisor beside a dividend whose quotient may be off by one and more."""
        if self._side is None or not result.numel():
            return result
        whole = torch.as_tensor(y).abs() * result.sign()
        beyond = torch.as_tensor(x).abs().max() > whole.abs() * _EXACT_REMAINDER
        return torch.where(beyond, whole * (self._side > 0), result)

    def _called(self, target: Any, args: Any, kwargs: Any) -> Any:
        """In float32 what PyTorch refuses in float64: its kernels are not equally strict."""
        overload = overload_of(target)
        if overload is not None and overload in _ANY_OF_EQUALS and args[0].dim():
            target = partial(_ordered, overload, self._generator)
        elif overload is torch.ops.aten.mode.default and args[0].dim() and self._generator is not None:
            target = partial(_most_frequent, self._generator)
        elif overload is torch.ops.aten.gelu.default and kwargs.get("approximate") == "tanh":
            target = _gelu
        try:
            return super().call_function(target, args, kwargs)
        except (RuntimeError, NotImplementedError):
            if overload is None or overload._schema.is_mutable:
                raise
            args, kwargs = torch.fx.node.map_aggregate((args, kwargs), _narrowed)
            (result,) = _widened(target(*args, **kwargs))
            return result

    def _exact(self, target: Any, args: Any, kwargs: Any) -> bool:
        """Whether the operator does not round: float32 and float64 agree on random operands."""
        if overload_of(target) in _REMAINDERS and _ratio(*args[:2]) > _EXACT_REMAINDER:
            return False
        args, kwargs = torch.fx.node.map_aggregate((args, kwargs), self._random)
        args64, kwargs64 = torch.fx.node.map_aggregate(
            _widened(args, kwargs), lambda x: torch.float64 if x is torch.float32 else x
        )
        try:
            pair = flat(target(*args, **kwargs)), flat(Interpreter.call_function(self, target, args64, kwargs64))
        except (RuntimeError, NotImplementedError):  # in float32 alone
            return False
        return all(torch.equal(x.double(), y.double()) for x, y in zip(*pair, strict=True))

    def _random(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        return torch.rand(x.shape, generator=self._generator) + 0.5

    def _noisy(self, x: Any) -> Any:
        if not isinstance(x, Tensor) or not x.is_floating_point():
            return x
        noise = torch.rand(x.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        moved = x * (1 + (noise if self._side is None else self._side) * self._precision)
        return torch.where(x.abs() < _SUBNORMAL, 0.0, moved) if self._side == 1.0 else moved


def _ordered(overload: OpOverload, generator: torch.Generator | None, *args: Any, **kwargs: Any) -> tuple[Tensor, ...]:
    """Elements in order and their places. Of equal ones the first, as targets have it; with a generator, any."""
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
    unknown = torch.isnan(x).any(dim, keepdim=True) & (k is None)  # what is no number is the last, and the median
    rank = torch.where(unknown, x.shape[dim] - 1, (x.shape[dim] + 1) // 2 - 1 if k is None else k - 1)
    found = tuple(part.gather(dim, rank) for part in found)
    return found if given.get("keepdim") else tuple(part.squeeze(dim) for part in found)


def _most_frequent(
    generator: torch.Generator, x: Tensor, dim: int = -1, keepdim: bool = False
) -> tuple[Tensor, Tensor]:
    """The mode, and any of its places, of elements that were equal before they were perturbed."""
    coarse = x.float().bfloat16()
    hits = coarse == coarse.mode(dim, keepdim=True).values
    place = (hits * (1 + torch.rand(x.shape, generator=generator))).argmax(dim, keepdim=True)
    found = x.gather(dim, place), place
    return found if keepdim else (found[0].squeeze(dim), place.squeeze(dim))


def _gelu(x: Tensor, *, approximate: str) -> Tensor:
    """Of tanh, whose formula loses what is smaller than a rounding of 1: x * (1 + tanh(u)) / 2 = x * sigmoid(2 * u)."""
    assert approximate == "tanh"
    return x * torch.sigmoid(2 * math.sqrt(2 / math.pi) * (x + 0.044715 * x**3))


def _ratio(x: Any, y: Any) -> float:
    """The largest quotient of any two elements."""
    dividend, divisor = (torch.as_tensor(z).abs().double() for z in (x, y))
    return float(dividend.max() / divisor.min()) if dividend.numel() and divisor.numel() else 0.0


def _widened(*arguments: Any) -> Any:
    return torch.fx.node.map_aggregate(
        arguments, lambda x: x.double() if isinstance(x, Tensor) and x.is_floating_point() else x
    )


def _narrowed(x: Any) -> Any:
    return x.float() if isinstance(x, Tensor) and x.dtype is torch.float64 else x


def _check_float(
    program: ExportedProgram, inputs: Sequence[Tensor], outputs: Sequence[Tensor], eager: Sequence[Tensor]
) -> None:
    metas = [node.meta.get("val") for node in program.graph.nodes]
    precision = max(_PRECISION.get(getattr(meta, "dtype", None), _FLOAT32) for meta in metas)  # type: ignore[arg-type]
    evaluations: list[list[Tensor]] = []
    for seed in [None, *range(_MOST_EVALUATIONS)]:  # numbers that agree with few evaluations need no more of them
        evaluations.append(_evaluated(partial(_Perturbed, seed=seed, precision=precision), program, inputs))
        wrong = _disagreement(evaluations, outputs, eager, precision) if len(evaluations) > 2 else ""
        if len(evaluations) > 2 and not wrong:
            return
    raise Failure("wrong", "float values", wrong)


def _disagreement(
    evaluations: Sequence[Sequence[Tensor]], outputs: Sequence[Tensor], eager: Sequence[Tensor], precision: float
) -> str:
    """What is wrong, empty if nothing is. The first evaluation is exact, the others are perturbed."""
    for i, (ours, theirs) in enumerate(zip(outputs, eager, strict=True)):
        exact, *others = [evaluation[i].double() for evaluation in evaluations]
        spread = torch.stack([(other - exact).abs() for other in others]).amax(0)
        # What float32 itself cannot hold, or loses on the way, is not asked for.
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


def _evaluated(kind: _Kind, program: ExportedProgram, inputs: Sequence[Tensor]) -> list[Tensor]:
    try:
        return _run(kind, program, inputs)
    except Exception as error:  # some operators take float32 alone, or are stricter in float64
        raise Undefined(f"evaluation: {type(error).__name__}: {str(error)[:80]}") from error


def _equal(x: Tensor, y: Tensor) -> Tensor:
    return (x == y) | (x.isnan() & y.isnan())


# -- integer -----------------------------------------------------------------------------------------------------


class _Follows(Interpreter):
    """Goes on with the target's integers wherever the graph quantizes, and keeps what PyTorch had there."""

    ours: dict[str, Tensor]
    theirs: dict[str, list[Tensor]]
    """Values in steps of the scale by quantize node, neither rounded nor cut; the target's where PyTorch has none."""

    held: Collection[str]
    """Names of the placeholders that are constants."""

    def follow(self, ours: dict[str, Tensor], held: Collection[str]) -> None:
        """Set the target's integers."""
        self.ours, self.theirs, self.held = ours, {}, held
        self.garbage_collect_values = False

    def run_node(self, n: torch.fx.Node) -> Any:
        if n.name not in self.ours or n.op != "call_function":
            return super().run_node(n)
        ours, (source, scale, zero_point, *_) = self.ours[n.name], cast(tuple[Any, ...], n.args)
        reals = [self.env[source], *(self._between_points(n) if ours.dtype is torch.int16 else [])]
        steps = [real.double() / scale + zero_point for real in reals]
        self.theirs[n.name] = [torch.where(real.isnan(), ours.double(), real) for real in steps]
        return ours

    def _between_points(self, quantize: torch.fx.Node) -> list[Tensor]:
        """A function of one int16 tensor at the two of 513 points around each value: a TABLE interpolates there.

        A second one, of the part around a pole, has 8 or 32 times as many: between these it is as steep.
        """
        region = _function_of_one(quantize, self.held)
        if region is None:
            return []
        base = region[0].all_input_nodes[0]
        index = self.env[base].long()
        points = [index.div(step, rounding_mode="floor") * step + more for step in (128, 16, 4) for more in (0, step)]
        return [self._again(region, base, point.clamp(-32768, 32767).to(torch.int16)) for point in points]

    def _again(self, region: list[torch.fx.Node], base: torch.fx.Node, value: Tensor) -> Tensor:
        env: dict[torch.fx.Node, Any] = {base: value}
        for node in region[:-1]:
            args, kwargs = torch.fx.map_arg((node.args, node.kwargs), lambda x: env.get(x, self.env.get(x)))
            env[node] = self.call_function(node.target, args, kwargs)
        real: Tensor = env[region[-1].all_input_nodes[0]]
        return real


class _Plain(_Follows):
    """In float32."""


class _Exact(_Follows, _Perturbed):
    """In float64, or perturbed; operators whose records say so by more.

    One of the perturbed takes for equal what lies nearer than the target's comparisons, in 32 bits, can tell.
    """

    _error = _near = 0.0

    def run_node(self, n: torch.fx.Node) -> Any:
        operands = [cast(tuple[Any, ...], source.args) for source in n.all_input_nodes if is_dequantize(source)]
        steps = [(step, most) for _, step, _, _, most, *_ in operands if isinstance(step, float)]
        self._near = max((step * 2.0 ** (-21 if most < 256 else -14) for step, most in steps), default=0.0)
        return super().run_node(n)

    def call_function(self, target: Any, args: Any, kwargs: Any) -> Any:
        overload = overload_of(target)
        if self._side == 1.0 and overload is not None and overload._schema.name in _COMPARISONS:
            x, y = args
            args = x, torch.where((x - y).abs() <= self._near, x, y) if isinstance(y, Tensor) else y
        record = None if overload is None else records().get(overload)
        self._error = record.error if isinstance(record, Record) else 0.0
        return super().call_function(target, args, kwargs)

    def _noisy(self, x: Any) -> Any:
        if not self._error or not isinstance(x, Tensor) or not x.is_floating_point() or not x.numel():
            return super()._noisy(x)
        noise = torch.rand(x.shape, generator=self._generator, dtype=torch.float64) * 2 - 1
        return x + (noise if self._side is None else self._side) * self._error * x.abs().max()


def _roundings(program: ExportedProgram) -> list[_Exact]:
    """In float64 and, several times, perturbed as float32 rounds."""
    return [_Exact(program.graph_module, seed, _FLOAT32) for seed in [None, *range(_EVALUATIONS)]]


def _judged(
    judge: _Follows, program: ExportedProgram, inputs: Sequence[Tensor], ours: dict[str, Tensor], held: Collection[str]
) -> list[Tensor]:
    """The program's outputs by a judge that follows the target's integers."""
    judge.follow(ours, held)
    return _evaluated(lambda _: judge, program, inputs)


def _function_of_one(quantize: torch.fx.Node, held: Collection[str]) -> list[torch.fx.Node] | None:
    """The nodes from the dequantize to ``quantize`` if all between is elementwise in one int16 tensor, else None."""
    region, todo, bases = {quantize}, list(quantize.all_input_nodes), set()
    while todo:
        node = todo.pop()
        if node in region or _is_held(node, held):
            continue
        region.add(node)
        if is_dequantize(node):
            bases.add(node.all_input_nodes[0])
            continue
        record = find_record(node)
        if record is None or not record.univariate:
            return None
        todo += node.all_input_nodes
    if len(bases) != 1 or not isinstance(next(iter(bases)).meta.get("val"), Tensor):
        return None
    if next(iter(bases)).meta["val"].dtype is not torch.int16:
        return None
    inner = [find_record(node) for node in region if node is not quantize and not is_dequantize(node)]
    if len(inner) < 2 and all(record is not None and record.clamp for record in inner):
        return None  # a RESCALE or a CLAMP, which is exact
    return [node for node in quantize.graph.nodes if node in region]


def _is_held(node: torch.fx.Node, held: Collection[str]) -> bool:
    """Whether a node is computed from constants alone."""
    todo, seen = [node], {node}
    while todo:
        source = todo.pop()
        if source.op == "placeholder" and source.name not in held:
            return False
        todo += [before for before in source.all_input_nodes if before not in seen]
        seen.update(todo)
    return True


#: Steps between the points around a value, from which on a second table may be added to the first.
_STEEP = 64


def _interval(found: list[list[Tensor]], exact: Tensor, quantize: torch.fx.Node) -> tuple[Tensor, Tensor]:
    """The least and the largest integers that rounding inside an operator may lead to.

    Args:
        found: by judge: the value, and those at the points of a table around it.
    """
    noise = torch.stack([(value - exact).abs().nan_to_num(0.0) for value, *_ in found]).amax(0)
    values = torch.stack([exact - noise, exact + noise, *(point for _, *points in found for point in points)])
    least, most = cast(tuple[float, float], quantize.args[3:5])
    ends = values.amin(0), values.amax(0)
    more = ((ends[1] - ends[0] > _STEEP) & (len(found[0]) > 1)).double()  # two tables are rounded, and their sum
    low, high = (end.round().clamp(least, most).long() for end in (ends[0] - more, ends[1] + more))
    return low, high


def _output_steps(program: ExportedProgram) -> list[float]:
    """The scale of each output of the user's, 0 of one that is not dequantized last."""
    results = program.graph.output_node().args[0]
    nodes = [
        node
        for node, spec in zip(cast(Sequence[Any], results), program.graph_signature.output_specs, strict=True)
        if spec.kind is OutputKind.USER_OUTPUT
    ]
    scales = [n.args[1] if isinstance(n, torch.fx.Node) and is_dequantize(n) else 0.0 for n in nodes]
    return [scale if isinstance(scale, float) else 0.0 for scale in scales]


def _check_integer(program: ExportedProgram, inputs: Sequence[Tensor], outputs: Sequence[Tensor], target: str) -> None:
    exposed = quantized_reference.expose_quantized_tensors(program, None)
    nodes = list(exposed.graph.output_node().args[0])
    try:
        values = _run(Interpreter, delegate(exposed, compile_spec(target)), inputs)
    except Exception as error:
        raise Failure("crashed", f"exposed: {_where(error)}") from error
    ours = {node.name: value for node, value in zip(nodes, values, strict=True)}
    judges: list[_Follows] = [_Plain(program.graph_module), *_roundings(program)]
    held = [spec.arg.name for spec in program.graph_signature.input_specs if spec.kind in TENSOR_KINDS]
    expected = [_judged(judge, program, inputs, ours, held) for judge in judges]
    for node in nodes:
        if node.name not in judges[1].theirs:
            continue
        low, high = _interval([judge.theirs[node.name] for judge in judges], judges[1].theirs[node.name][0], node)
        mine = ours[node.name].long()
        apart = torch.maximum(low - mine, mine - high)
        if (apart > 1).any():
            steps = f"{int(apart.max())} steps of {node.args[1]} ({ours[node.name].dtype})"
            share = f"{int((apart > 1).sum())} of {apart.numel()} elements"
            raise Failure("wrong", f"steps at {node.args[0].target}", f"{node.name}: {steps}, {share}")
    scales = _output_steps(program)
    for i, (got, wanted, *others) in enumerate(zip(outputs, *expected, strict=True)):
        # What is rescaled twice in a row is rescaled once where nothing reads it in between.
        close = (got.double() - wanted.double()).abs() <= 1.001 * scales[i]
        for value in (wanted, *others):  # whether 1.0 exceeds 255 steps of 1 / 255 is a matter of rounding
            close |= _equal(got, value) | torch.isclose(got.double(), value.double(), rtol=1e-5, atol=0)
        if not close.all():
            at = int((~close).flatten().nonzero()[0])
            pair = f"{float(got.flatten()[at]):.9g} instead of {float(wanted.flatten()[at]):.9g}"
            count = int((~close).sum())
            raise Failure("wrong", "not its own intermediate values", f"output {i}, {count} elements: {pair}")
