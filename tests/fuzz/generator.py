"""Draws programs: each is a function of (seed, index).

A plain seeded generator, not Hypothesis: a step is drawn with the values of the earlier ones at hand, so that what
PyTorch itself refuses, and what leaves the range of numbers, is drawn again at once; a graph costs a few milliseconds.
Hypothesis would shrink the stream of choices, in thousands of compilations of 0.2 s; taking steps out of the program
(``shrink``) needs some dozens. And a number keeps meaning the same graph when Hypothesis changes.
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

from tests.fuzz.program import SCOPE, Leaf, Program, Step, sample, seasoned
from tests.ops.runner import Input

T = TypeVar("T")
Shape = tuple[int, ...]
Accept = Callable[[Tensor], bool]
Make = Callable[["Draw"], tuple[str, str]]
"""Draws a step: its expression, and the constructor of the module that it calls."""

FLOATS = (torch.float32, torch.float16, torch.bfloat16, torch.float64)
INTEGERS = (torch.int32, torch.int64, torch.int8, torch.int16)
BOOL = (torch.bool,)
ANY = FLOATS + INTEGERS + BOOL
_RANGES = ((-2, 2), (-2, 2), (-2, 2), (-1, 1), (0.1, 3), (0, 1), (-30, 30), (1e-6, 2e-6), (-1e4, 1e4), (1, 5), (0, 0))
_EXTREME = ((-1e9, 1e9), (1e12, 2e12), (1e-20, 3e-20), (-1e-35, 1e-35))
_SPECIAL = (float("inf"), float("-inf"), float("nan"), -0.0, 0.0, 1e-40, -3e-42, 1e-30, 1e15, 65504.0, 0.5, -1.0, 1.0)
_INTEGER_RANGES = ((-100, 100), (-100, 100), (0, 4), (-2, 2), (0, 100000), (1, 9))


@dataclass(frozen=True)
class Reference:
    """A value that an expression can name; its representation is its name."""

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


class Impossible(Exception):
    """What was drawn so far leaves nothing to draw; the step is drawn anew."""


def finite(x: Tensor) -> bool:
    """Whether all elements are numbers: for operands of which a kernel may read more, and multiply it by 0."""
    return bool(x.isfinite().all())


class Draw:
    """A program while it is drawn, with the value of everything in it.

    Args:
        key: seeds the random numbers.
        integer: for quantization: float32 alone, and no value that is not finite or beyond 1e6.

    Attributes:
        special: floating-point values may be infinite, not a number, denormal or -0.0.
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
        """True that often."""
        return self.rng.random() < probability

    def choose(self, items: Sequence[T]) -> T:
        """One of ``items``."""
        if not items:
            raise Impossible
        return self.rng.choice(items)

    def size(self, low: int = 1, high: int = 8) -> int:
        """An integer, both ends included."""
        return self.rng.randint(low, high)

    def number(self) -> float | int:
        """A Python number as programs have them."""
        return self.choose((0.5, 1.5, -1.5, 2, -1, 3.0, 0.1, 1, 0, 1e-3, 100.0, -0.25))

    def shape(self, rank: int | None = None) -> Shape:
        """At most 4,096 elements; rarely none."""
        if rank is None:
            rank = self.choose((0, 1, 1, 2, 2, 2, 3, 3, 3, 4, 4, 4, 4, 5, 6))
        high = {0: 8, 1: 40, 2: 16, 3: 12, 4: 8}.get(rank, 4)
        sizes = [1 if self.chance(0.15) else self.size(1, high) for _ in range(rank)]
        if rank and self.chance(0.01):
            sizes[self.rng.randrange(rank)] = 0
        return tuple(sizes)

    def axis(self, x: Reference) -> int:
        """One of ``x``'s dimensions, counted from either end."""
        if not x.rank:
            return self.choose((0, -1))
        return self.rng.randrange(-x.rank, x.rank)

    def axes(self, x: Reference) -> list[int]:
        """Some of ``x``'s dimensions, none twice."""
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
        """A value that is there and that ``accept`` takes, or else a new leaf of ``shape``.

        Args:
            span: range of the values: then always a leaf.
            constant: how often a leaf is a buffer.
            fresh: how often a leaf is made although a value is there.
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
            special = tuple(self.rng.sample(_SPECIAL, self.size(1, 4)))
        if span is None:
            wide = not self.integer and dtype is torch.float32 and self.chance(0.05)
            span = self.choose(_EXTREME if wide else _RANGES if dtype.is_floating_point else _INTEGER_RANGES)
            if dtype is torch.int8 and span[1] > 127:
                span = (-100, 100)
            if dtype is torch.int16 and span[1] > 32767:
                span = (-30000, 30000)
        leaf = Leaf(self._name(), Input(shape, span[0], span[1], dtype, special), self.chance(constant))
        self.leaves.append(leaf)
        reference = Reference(leaf.name, sample(leaf))
        self.values.append(reference)
        return reference

    def like(self, x: Reference, dtypes: Sequence[torch.dtype] | None = None) -> Reference:
        """An operand that broadcasts with ``x``."""

        def broadcasts(y: Tensor) -> bool:
            return all(
                1 in pair or pair[0] == pair[1] for pair in zip(x.shape[::-1], list(y.shape)[::-1], strict=False)
            )

        def shape() -> Shape:
            sizes = [1 if self.chance(0.2) else size for size in x.shape]
            return tuple(sizes[self.size(0, x.rank) :] if self.chance(0.3) else sizes)

        return self.tensor(broadcasts, shape, dtypes or (x.tensor.dtype, *FLOATS), constant=0.3)

    def constant(self, *shape: int, span: tuple[float, float] = (-1, 1)) -> Reference:
        """A weight: usually a buffer, seldom computed; one that is there may be shared.

        Finite: whether a kernel multiplies the zeros around an image by an infinite weight is its own affair.
        """
        return self.tensor(finite, shape, (torch.float32,), span=None if self.chance(0.2) else span, constant=0.95)

    # -- steps ---------------------------------------------------------------------------------------------------

    def _name(self) -> str:
        self._names += 1
        return f"v{self._names - 1}"

    def step(self, operator: str, make: Make, tries: int = 12) -> bool:
        """Append a step whose (expression, module) ``make`` draws; False if PyTorch takes none of several."""
        for _ in range(tries):
            marks = len(self.leaves), len(self.values), self._names
            try:
                expression, module = make(self)
                step = Step(self._name(), operator, expression.replace("self.m", f"self.v{self._names - 1}"), module)
                results = self._evaluate(step)
            except (Impossible, RuntimeError, IndexError, ValueError, TypeError, AssertionError, NotImplementedError):
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
            setattr(self._modules, step.name, seasoned(module, int(step.name[1:])).eval())
        scope = SCOPE | {"self": self._modules}
        scope |= {value.name: value.tensor for value in self.values if "[" not in value.name}
        scope |= {name: self._group(name) for name in {v.name.split("[")[0] for v in self.values if "[" in v.name}}
        if step.writes and (self._constants_written(step) or self._overlaps(step)):
            raise Impossible
        saved = [(value.tensor, value.tensor.clone()) for value in self.values] if step.writes else []
        with torch.no_grad():
            result = eval(step.expression, scope)
        several = isinstance(result, (list, tuple))
        named = {f"{step.name}[{i}]": x for i, x in enumerate(result)} if several else {step.name: result}
        known = [x.tensor for x in self.values] if step.writes else []
        results = list(named.values())
        if not all(isinstance(x, Tensor) and self._sound(x) for x in [*results, *known]) or self._overflows(
            step, results
        ):
            for tensor, before in saved:
                tensor.copy_(before)
            raise Impossible
        return [Reference(name, tensor) for name, tensor in named.items()]

    def _overlaps(self, step: Step) -> bool:
        """Whether elements share memory, as expanded ones do: what a write to one does to others is open."""
        read = [value.tensor for value in self.values if value.name.split("[")[0] in step.reads]
        return any(not n and size > 1 for x in read for n, size in zip(x.stride(), x.shape, strict=True))

    def _overflows(self, step: Step, results: Sequence[Tensor]) -> bool:
        """Whether numbers that no integer type holds could have become integers: C leaves open what these are."""
        made = [x.dtype for x in results if x.dtype in INTEGERS]
        limit = min((float(torch.iinfo(dtype).max) for dtype in made), default=0.0)
        read = [value.tensor for value in self.values if value.name.split("[")[0] in step.reads]
        return bool(made) and any(x.is_floating_point() and not bool((x.abs() < limit).all()) for x in read)

    def _group(self, name: str) -> list[Tensor]:
        return [value.tensor for value in self.values if value.name.startswith(name + "[")]

    def _constants_written(self, step: Step) -> bool:
        """Whether the step could write into a buffer: a program's buffers stay as they are."""
        constants = {leaf.name for leaf in self.leaves if leaf.constant}
        held = {v.tensor.untyped_storage().data_ptr() for v in self.values if v.name in constants}
        return any(
            v.tensor.untyped_storage().data_ptr() in held for v in self.values if v.name.split("[")[0] in step.reads
        )

    def _sound(self, x: Tensor) -> bool:
        if x.dim() > 6 or x.numel() > 4096 or x.dtype not in ANY:
            return False
        if not x.is_floating_point() or not x.numel() or self.special:
            return True
        return bool(x.isfinite().all()) and float(x.abs().max()) <= self.limit

    def calibrates(self, program: Program) -> bool:
        """Whether it runs on other samples, too, and stays in the range of numbers."""
        try:
            values = [x for seed in (1, 2) for x in program.values(seed).values()]
        except RuntimeError:  # a mask has more ones than there are elements
            return False
        return all(map(self._sound, values))

    def program(self) -> Program:
        """What was drawn, returning what no step reads, and now and then something more."""
        read = {name for step in self.steps for name in step.reads}
        made = [value.name for value in self.values if value.name.split("[")[0] not in {x.name for x in self.leaves}]
        outputs = [name for name in made if name.split("[")[0] not in read]
        if self.chance(0.3):
            outputs += self.rng.sample(made, min(2, len(made)))
        if self.leaves and self.chance(0.05):
            outputs.append(self.choose(self.leaves).name)
        if not outputs:
            outputs = made[-1:]
        return Program(tuple(self.leaves), tuple(self.steps), tuple(outputs)).pruned()


def draw(seed: int, index: int, *, integer: bool) -> Program:
    """Program number ``index`` of ``seed``: 3 to 30 steps, few more often than many; each fifth moves data about."""
    from tests.fuzz.arguments import menu, moving_menu

    steps = moving_menu() if index % 5 == 4 else menu()
    for attempt in itertools.count():
        d = Draw(f"{seed}/{index}/{attempt}", integer=integer)
        wanted = 3 + int(27 * d.rng.random() ** 2)
        while len(d.steps) < wanted:
            operator, make = d.choose(d.choose(steps))
            d.step(operator, make)
        program = d.program()
        if not integer or d.calibrates(program):
            return program
    raise AssertionError


def draw_with(operator: str, make: Make, seed: int, *, integer: bool) -> Program | None:
    """A program of one step, None if none is found."""
    d = Draw(f"{operator}/{seed}", integer=integer)
    return d.program() if d.step(operator, make, tries=200) else None
