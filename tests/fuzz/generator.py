"""Generator of random programs: a seed and an index determine the program.

Each step is drawn with the values of the earlier steps. If PyTorch refuses a step, or its values leave the range of
numbers, the step is drawn again immediately. A graph takes a few milliseconds.

Why not Hypothesis: it would shrink the sequence of choices, in thousands of compilations of 0.2 s. Removing steps from
the program (``shrink``) needs some dozens. And the program of an index would change with Hypothesis.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from types import SimpleNamespace
from typing import TypeVar

import torch
from torch import Tensor

from tests.fuzz.program import SCOPE, Leaf, Program, Step, sample_leaf, with_random_parameters
from tests.ops.runner import Input

T = TypeVar("T")
Shape = tuple[int, ...]
Accept = Callable[[Tensor], bool]
StepDrawer = Callable[["ProgramBuilder"], tuple[str, str]]
"""Draws a step; returns its expression and the constructor of the module that it calls."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int32, torch.int64, torch.int8, torch.int16)
BOOL = (torch.bool,)
ANY = FLOATS + INTEGERS + BOOL
_RANGES = ((-2, 2), (-2, 2), (-2, 2), (-1, 1), (0.1, 3), (0, 1), (-30, 30), (1e-6, 2e-6), (-1e4, 1e4), (1, 5), (0, 0))
_EXTREME_RANGES = ((-1e9, 1e9), (1e12, 2e12), (1e-20, 3e-20), (-1e-35, 1e-35))
_SPECIAL_VALUES = (
    float("inf"),
    float("-inf"),
    float("nan"),
    -0.0,
    0.0,
    1e-40,
    -3e-42,
    1e-30,
    1e15,
    65504.0,
    0.5,
    -1.0,
    1.0,
)
_INTEGER_RANGES = ((-100, 100), (-100, 100), (0, 4), (-2, 2), (0, 100000), (1, 9))


@dataclass(frozen=True)
class Reference:
    """A value that an expression can use; its ``repr`` is its name, so that it can be formatted into source."""

    name: str
    tensor: Tensor

    def __repr__(self) -> str:
        return self.name

    @property
    def shape(self) -> Shape:
        """Dimensions."""
        return tuple(self.tensor.shape)

    @property
    def rank(self) -> int:
        """Number of dimensions."""
        return self.tensor.dim()


class NoValidChoice(Exception):
    """The choices so far allow no valid step; the step is drawn again."""


def is_finite(x: Tensor) -> bool:
    """Whether all elements are finite. Kernels may multiply unused elements by 0, and infinity times 0 is NaN."""
    return bool(x.isfinite().all())


class ProgramBuilder:
    """A program under construction, with the values of its leaves and steps.

    Args:
        key: seed of the random numbers.
        integer: draw a program for quantization: float32 only, and finite values up to 1e6.

    Attributes:
        rng: random number generator.
        integer: as the argument.
        limit: largest magnitude of floating-point values.
        special: whether floating-point values may be infinite, NaN, denormal or -0.0.
        leaves: leaves so far.
        steps: steps so far.
        values: values of leaves and steps so far.
    """

    def __init__(self, key: str, *, integer: bool) -> None:
        self.rng = random.Random(key)
        self.integer = integer
        self.limit = 1e6 if integer else 1e30
        self.special = not integer and self.chance(0.1)
        self.leaves: list[Leaf] = []
        self.steps: list[Step] = []
        self.values: list[Reference] = []
        self._names = 0
        self._modules = SimpleNamespace()

    # -- choices -------------------------------------------------------------------------------------------------

    def chance(self, probability: float) -> bool:
        """Return True with this probability."""
        return self.rng.random() < probability

    def choose(self, items: Sequence[T]) -> T:
        """Choose one of ``items``."""
        if not items:
            raise NoValidChoice
        return self.rng.choice(items)

    def size(self, low: int = 1, high: int = 8) -> int:
        """Draw an integer from ``low`` to ``high``, both included."""
        return self.rng.randint(low, high)

    def number(self) -> float | int:
        """Draw a Python number that is typical for programs."""
        return self.choose((0.5, 1.5, -1.5, 2, -1, 3.0, 0.1, 1, 0, 1e-3, 100.0, -0.25))

    def shape(self, rank: int | None = None) -> Shape:
        """Draw a shape; a dimension is rarely 0."""
        if rank is None:
            rank = self.choose((0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 6))
        high = {0: 8, 1: 40, 2: 16, 3: 12, 4: 8}.get(rank, 4)
        sizes = [1 if self.chance(0.15) else self.size(1, high) for _ in range(rank)]
        if rank and self.chance(0.01):
            sizes[self.rng.randrange(rank)] = 0
        return tuple(sizes)

    def axis(self, x: Reference) -> int:
        """Draw a dimension of ``x``, counted from either end."""
        if not x.rank:
            return self.choose((0, -1))
        return self.rng.randrange(-x.rank, x.rank)

    def axes(self, x: Reference) -> list[int]:
        """Draw different dimensions of ``x``."""
        axes = self.rng.sample(range(x.rank), self.size(1, x.rank)) if x.rank else []
        return [axis - x.rank if self.chance(0.3) else axis for axis in axes]

    # -- tensors -------------------------------------------------------------------------------------------------

    def tensor(
        self,
        accept: Accept = lambda x: True,
        shape: Shape | Callable[[], Shape] | None = None,
        dtypes: Sequence[torch.dtype] = FLOATS,
        *,
        span: tuple[float, float] | None = None,
        constant: float = 0.15,
        fresh: float = 0.2,
    ) -> Reference:
        """Choose an existing value that ``accept`` accepts, or create a leaf.

        Args:
            accept: whether a value can be used.
            shape: shape of a new leaf, or a function that draws it. An existing value must have a given shape.
            dtypes: allowed types.
            span: range of the values; if given, a leaf is always created.
            constant: probability that a new leaf is a buffer.
            fresh: probability that a leaf is created although a value exists.
        """
        exact = shape if isinstance(shape, tuple) else None
        found = [
            value
            for value in self.values
            if value.tensor.dtype in dtypes and (exact is None or value.shape == exact) and accept(value.tensor)
        ]
        if found and span is None and not self.chance(fresh):
            return self.choose(found[-4:] if self.chance(0.6) else found)
        made = self.shape() if shape is None else shape if isinstance(shape, tuple) else shape()
        return self._leaf(made, self._dtype(dtypes), span, constant)

    def _dtype(self, dtypes: Sequence[torch.dtype]) -> torch.dtype:
        known = {torch.float32, *INTEGERS, *BOOL} if self.integer or self.chance(0.9) else set(ANY)
        usual = [dtype for dtype in dtypes if dtype in known] or list(dtypes)
        return usual[0] if self.chance(0.8) else self.choose(usual)

    def _leaf(self, shape: Shape, dtype: torch.dtype, span: tuple[float, float] | None, constant: float) -> Reference:
        special: tuple[float, ...] = ()
        if self.special and span is None and constant < 0.9 and dtype.is_floating_point and self.chance(0.5):
            special = tuple(self.rng.sample(_SPECIAL_VALUES, self.size(1, 4)))
        if span is None:
            wide = not self.integer and dtype is torch.float32 and self.chance(0.05)
            span = self.choose(_EXTREME_RANGES if wide else _RANGES if dtype.is_floating_point else _INTEGER_RANGES)
            if dtype is torch.int8 and span[1] > 127:
                span = (-100, 100)
            if dtype is torch.int16 and span[1] > 32767:
                span = (-30000, 30000)
        leaf = Leaf(self._next_name(), Input(shape, span[0], span[1], dtype, special), self.chance(constant))
        self.leaves.append(leaf)
        reference = Reference(leaf.name, sample_leaf(leaf))
        self.values.append(reference)
        return reference

    def like(self, x: Reference, dtypes: Sequence[torch.dtype] | None = None) -> Reference:
        """Draw an operand that broadcasts with ``x``."""

        def broadcasts(y: Tensor) -> bool:
            return all(
                1 in pair or pair[0] == pair[1] for pair in zip(x.shape[::-1], list(y.shape)[::-1], strict=False)
            )

        def shape() -> Shape:
            sizes = [1 if self.chance(0.2) else size for size in x.shape]
            return tuple(sizes[self.size(0, x.rank) :] if self.chance(0.3) else sizes)

        return self.tensor(broadcasts, shape, dtypes or (x.tensor.dtype, *FLOATS), constant=0.3)

    def constant(self, *shape: int, span: tuple[float, float] = (-1, 1)) -> Reference:
        """Draw a weight: usually a buffer, sometimes a computed or shared value.

        Weights are finite, because only some kernels multiply the zero padding of an image by an infinite weight.
        """
        return self.tensor(is_finite, shape, (torch.float32,), span=None if self.chance(0.2) else span, constant=0.95)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _next_name(self) -> str:
        self._names += 1
        return f"v{self._names - 1}"

    def step(self, operator: str, make: StepDrawer, tries: int = 12) -> bool:
        """Append a step that ``make`` draws. Returns False if PyTorch refuses all tries."""
        for _ in range(tries):
            marks = len(self.leaves), len(self.values), self._names
            try:
                expression, module = make(self)
                step = Step(
                    self._next_name(), operator, expression.replace("self.m", f"self.v{self._names - 1}"), module
                )
                results = self._evaluate(step)
            except (
                NoValidChoice,
                RuntimeError,
                IndexError,
                ValueError,
                TypeError,
                AssertionError,
                NotImplementedError,
            ):
                del self.leaves[marks[0] :], self.values[marks[1] :]
                self._names = marks[2]
                continue
            self.steps.append(step)
            self.values += results
            return True
        return False

    def _evaluate(self, step: Step) -> list[Reference]:
        if step.module:
            module = eval(step.module, dict(SCOPE))
            setattr(self._modules, step.name, with_random_parameters(module, int(step.name[1:])).eval())
        scope = SCOPE | {"self": self._modules}
        scope |= {value.name: value.tensor for value in self.values if "[" not in value.name}
        scope |= {
            name: self._tuple_values(name) for name in {v.name.split("[")[0] for v in self.values if "[" in v.name}
        }
        if step.writes and (self._may_write_constant(step) or self._has_overlapping_operand(step)):
            raise NoValidChoice
        saved = [(value.tensor, value.tensor.clone()) for value in self.values] if step.writes else []
        with torch.no_grad():
            result = eval(step.expression, scope)
        several = isinstance(result, (list, tuple))
        named = {f"{step.name}[{i}]": x for i, x in enumerate(result)} if several else {step.name: result}
        known = [x.tensor for x in self.values] if step.writes else []
        results = list(named.values())
        if not all(
            isinstance(x, Tensor) and self._is_valid(x) for x in [*results, *known]
        ) or self._may_overflow_integers(step, results):
            for tensor, before in saved:
                tensor.copy_(before)
            raise NoValidChoice
        return [Reference(name, tensor) for name, tensor in named.items()]

    def _has_overlapping_operand(self, step: Step) -> bool:
        """Whether elements of an operand share memory, as after expand: PyTorch does not define writes to them."""
        read = [value.tensor for value in self.values if value.name.split("[")[0] in step.reads]
        return any(not n and size > 1 for x in read for n, size in zip(x.stride(), x.shape, strict=True))

    def _may_overflow_integers(self, step: Step, results: Sequence[Tensor]) -> bool:
        """Whether numbers beyond the integer type may have been cast to integers, which C does not define."""
        made = [x.dtype for x in results if x.dtype in INTEGERS]
        limit = min((float(torch.iinfo(dtype).max) for dtype in made), default=0.0)
        read = [value.tensor for value in self.values if value.name.split("[")[0] in step.reads]
        return bool(made) and any(x.is_floating_point() and not bool((x.abs() < limit).all()) for x in read)

    def _tuple_values(self, name: str) -> list[Tensor]:
        return [value.tensor for value in self.values if value.name.startswith(name + "[")]

    def _may_write_constant(self, step: Step) -> bool:
        """Whether the step may write to a buffer; the buffers of a program are constants."""
        constants = {leaf.name for leaf in self.leaves if leaf.constant}
        held = {v.tensor.untyped_storage().data_ptr() for v in self.values if v.name in constants}
        return any(
            v.tensor.untyped_storage().data_ptr() in held for v in self.values if v.name.split("[")[0] in step.reads
        )

    def _is_valid(self, x: Tensor) -> bool:
        if x.dim() > 6 or x.numel() > 4096 or x.dtype not in ANY:
            return False
        if not x.is_floating_point() or not x.numel() or self.special:
            return True
        return bool(x.isfinite().all()) and float(x.abs().max()) <= self.limit

    def can_calibrate(self, program: Program) -> bool:
        """Whether the program also runs on other samples, with values in the allowed range."""
        try:
            values = [x for seed in (1, 2) for x in program.values(seed).values()]
        except RuntimeError:  # for example a mask with more ones than elements
            return False
        return all(map(self._is_valid, values))

    def build_program(self) -> Program:
        """Build the program. Its outputs are the values that no step reads, and sometimes others."""
        read = {name for step in self.steps for name in step.reads}
        made = [value.name for value in self.values if value.name.split("[")[0] not in {x.name for x in self.leaves}]
        outputs = [name for name in made if name.split("[")[0] not in read]
        if self.chance(0.3):
            outputs += self.rng.sample(made, min(2, len(made)))
        if self.leaves and self.chance(0.05):
            outputs.append(self.choose(self.leaves).name)
        if not outputs:
            outputs = made[-1:]
        return Program(tuple(self.leaves), tuple(self.steps), tuple(outputs)).prune()


def draw(seed: int, index: int, *, integer: bool) -> Program:
    """Draw program number ``index`` of ``seed``. It has 3 to 30 steps; every fifth program is mostly data movement."""
    from tests.fuzz.arguments import list_data_movement_steps, list_steps

    steps = list_data_movement_steps() if index % 5 == 4 else list_steps()
    for attempt in itertools.count():
        d = ProgramBuilder(f"{seed}/{index}/{attempt}", integer=integer)
        wanted = 3 + int(27 * d.rng.random() ** 2)
        while len(d.steps) < wanted:
            operator, make = d.choose(d.choose(steps))
            d.step(operator, make)
        program = d.build_program()
        if not integer or d.can_calibrate(program):
            return program
    raise AssertionError


def draw_with(operator: str, make: StepDrawer, seed: int, *, integer: bool) -> Program | None:
    """Draw a program of one step; None if PyTorch refuses all tries."""
    d = ProgramBuilder(f"{operator}/{seed}", integer=integer)
    return d.build_program() if d.step(operator, make, tries=200) else None
