"""A random program as data. It is rendered to Python source, and the source is executed."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ops.runner import Input

#: The name of a value, or one element of a step with several results.
_REFERENCE = re.compile(r"\bv\d+\b(?:\[\d+\])?")


@dataclass(frozen=True)
class Leaf:
    """A tensor that no step computes: an input of the program, or a buffer.

    Attributes:
        name: ``v`` and a number.
        spec: shape, type and range of the values.
        constant: whether it is a buffer.
    """

    name: str
    spec: Input
    constant: bool = False

    @property
    def seed(self) -> int:
        """Seed of the leaf. Its values do not change if other leaves are removed."""
        return int(self.name[1:])


@dataclass(frozen=True)
class Step:
    """A statement ``name = expression``.

    Attributes:
        name: ``v`` and a number.
        operator: name in the fuzzer's tables, for example ``aten.add.Tensor`` or ``nn.Conv2d``.
        expression: Python source.
        module: constructor of the module that the expression calls as ``self.<name>``; empty if it calls none.
    """

    name: str
    operator: str
    expression: str
    module: str = ""

    @property
    def reads(self) -> set[str]:
        """Names of the values that the expression reads."""
        return {reference.split("[")[0] for reference in find_references(self.expression)}

    @property
    def writes(self) -> bool:
        """Whether the expression changes an operand in place."""
        return re.search(r"\w_(\.\w+)?\(", self.expression) is not None


def find_references(text: str) -> list[str]:
    """Find the names of values in an expression."""
    return _REFERENCE.findall(text)


@dataclass(frozen=True)
class Program:
    """A program: its leaves, its steps in order, and the names of its outputs."""

    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]

    @property
    def inputs(self) -> list[Input]:
        """Inputs of ``forward``, in order."""
        return [leaf.spec for leaf in self.leaves if not leaf.constant]

    def samples(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Draw values of the inputs."""
        return tuple(sample_leaf(leaf, seed) for leaf in self.leaves if not leaf.constant)

    @property
    def source(self) -> str:
        """Python source of the program: a class ``Model``."""
        made = [
            f"self.{leaf.name} = nn.Buffer({leaf.spec!r}.sample(make_generator({leaf.seed})))"
            for leaf in self.leaves
            if leaf.constant
        ]
        made += [
            f"self.{step.name} = with_random_parameters({step.module}, {step.name[1:]})"
            for step in self.steps
            if step.module
        ]
        names = [leaf.name for leaf in self.leaves if not leaf.constant]
        lines = [f"{leaf.name} = self.{leaf.name}" for leaf in self.leaves if leaf.constant]
        lines += [f"{step.name} = {step.expression}" for step in self.steps]
        lines += [f"return {', '.join(self.outputs)}" + ("," if len(self.outputs) == 1 else "")]
        return "\n".join(
            ["class Model(nn.Module):", "    def __init__(self):", "        super().__init__()"]
            + [f"        {line}" for line in made]
            + ["", f"    def forward({', '.join(['self', *names])}):"]
            + [f"        {line}" for line in lines]
        )

    def module(self) -> nn.Module:
        """Instantiate the model, in evaluation mode."""
        scope = dict(SCOPE)
        exec(self.source, scope)
        model: nn.Module = scope["Model"]().eval()
        return model.requires_grad_(False)

    def values(self, seed: int = 0) -> dict[str, Tensor]:
        """Compute all values in PyTorch, by the name that expressions use."""
        names = [leaf.name for leaf in self.leaves] + [step.name for step in self.steps]
        with torch.no_grad():
            results = replace(self, outputs=tuple(names)).module()(*self.samples(seed))
        values: dict[str, Tensor] = {}
        for name, result in zip(names, results, strict=True):
            several = isinstance(result, (tuple, list))
            values |= {f"{name}[{i}]": x for i, x in enumerate(result)} if several else {name: result}
        return values

    def replace_references(self, values: dict[str, str]) -> Program:
        """Replace the names that are keys of ``values`` in all expressions and outputs."""

        def renamed(text: str) -> str:
            return _REFERENCE.sub(lambda match: values.get(match.group(), match.group()), text)

        steps = tuple(replace(step, expression=renamed(step.expression)) for step in self.steps)
        return replace(self, steps=steps, outputs=tuple(map(renamed, self.outputs)))

    def prune(self) -> Program:
        """Remove leaves and steps that contribute to no output. Writes in place to a live value remain."""
        live = {reference.split("[")[0] for reference in self.outputs}
        steps = []
        for step in reversed(self.steps):
            if step.name in live or (step.writes and step.reads & live):
                live |= step.reads | {step.name}
                steps.append(step)
        leaves = tuple(leaf for leaf in self.leaves if leaf.name in live)
        return Program(leaves, tuple(reversed(steps)), self.outputs)


def sample_leaf(leaf: Leaf, seed: int = 0) -> Tensor:
    """Draw the values of a leaf."""
    return leaf.spec.sample(make_generator(leaf.seed + 1000 * seed))


def make_generator(seed: int) -> torch.Generator:
    """Create a random generator with this seed."""
    return torch.Generator().manual_seed(seed)


def with_random_parameters(module: nn.Module, seed: int) -> nn.Module:
    """Set the parameters and buffers of ``module``, including running statistics, to random values."""
    generator = make_generator(seed)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        bound = 1 / max(1, tensor[0].numel() if tensor.dim() > 1 else 4) ** 0.5
        low, high = (0.5, 2.0) if "running_var" in name else (-bound, bound)
        tensor.data = torch.rand(tensor.shape, generator=generator) * (high - low) + low
        if tensor.dim() == 1 and name.endswith("weight"):  # gains
            tensor.data += 1
    return module


#: Names that the source of a program may use.
SCOPE: dict[str, Any] = {
    "torch": torch,
    "nn": nn,
    "F": F,
    "aten": torch.ops.aten,
    "Input": Input,
    "make_generator": make_generator,
    "with_random_parameters": with_random_parameters,
    "inf": float("inf"),
    "nan": float("nan"),
    "device": torch.device,
}
