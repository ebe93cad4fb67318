"""A random program as data: it renders to Python source, and the source is what runs."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from tests.ops.runner import Input

#: A value by its name, or one of the several results of a step.
_REFERENCE = re.compile(r"\bv\d+\b(?:\[\d+\])?")


@dataclass(frozen=True)
class Leaf:
    """A tensor that no step makes: an input of the program, or one of its buffers."""

    name: str
    drawn: Input
    constant: bool = False

    @property
    def seed(self) -> int:
        """Every leaf has random numbers of its own, which stay when others are taken away."""
        return int(self.name[1:])


@dataclass(frozen=True)
class Step:
    """``name = expression``; a module that the expression calls is ``self.<name>``, made by ``module``.

    Attributes:
        operator: what the table of the fuzzer counts, for example ``aten.add.Tensor`` or ``nn.Conv2d``.
    """

    name: str
    operator: str
    expression: str
    module: str = ""

    @property
    def reads(self) -> set[str]:
        """Names of the values in the expression."""
        return {reference.split("[")[0] for reference in references(self.expression)}

    @property
    def writes(self) -> bool:
        """Whether an operand is changed in place."""
        return re.search(r"\w_(\.\w+)?\(", self.expression) is not None


def references(text: str) -> list[str]:
    """Values that an expression names."""
    return _REFERENCE.findall(text)


@dataclass(frozen=True)
class Program:
    """Leaves, steps in order, and what is returned."""

    leaves: tuple[Leaf, ...]
    steps: tuple[Step, ...]
    outputs: tuple[str, ...]

    @property
    def inputs(self) -> list[Input]:
        """What ``forward`` takes, in its order."""
        return [leaf.drawn for leaf in self.leaves if not leaf.constant]

    def samples(self, seed: int = 0) -> tuple[Tensor, ...]:
        """Values of the inputs."""
        return tuple(sample(leaf, seed) for leaf in self.leaves if not leaf.constant)

    @property
    def source(self) -> str:
        """The program as a class ``Model``."""
        made = [
            f"self.{leaf.name} = nn.Buffer({leaf.drawn!r}.sample(seeded({leaf.seed})))"
            for leaf in self.leaves
            if leaf.constant
        ]
        made += [f"self.{step.name} = seasoned({step.module}, {step.name[1:]})" for step in self.steps if step.module]
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
        """The model, in eval mode."""
        scope = dict(SCOPE)
        exec(self.source, scope)
        model: nn.Module = scope["Model"]().eval()
        return model.requires_grad_(False)

    def values(self, seed: int = 0) -> dict[str, Tensor]:
        """Every value by the name that expressions use, as PyTorch computes it."""
        names = [leaf.name for leaf in self.leaves] + [step.name for step in self.steps]
        with torch.no_grad():
            results = replace(self, outputs=tuple(names)).module()(*self.samples(seed))
        values: dict[str, Tensor] = {}
        for name, result in zip(names, results, strict=True):
            several = isinstance(result, (tuple, list))
            values |= {f"{name}[{i}]": x for i, x in enumerate(result)} if several else {name: result}
        return values

    def replaced(self, values: dict[str, str]) -> Program:
        """Every reference to a key of ``values`` becomes a reference to its value."""

        def renamed(text: str) -> str:
            return _REFERENCE.sub(lambda match: values.get(match.group(), match.group()), text)

        steps = tuple(replace(step, expression=renamed(step.expression)) for step in self.steps)
        return replace(self, steps=steps, outputs=tuple(map(renamed, self.outputs)))

    def pruned(self) -> Program:
        """Without what contributes to no output; writes in place stay."""
        live = {reference.split("[")[0] for reference in self.outputs}
        steps = []
        for step in reversed(self.steps):
            if step.name in live or (step.writes and step.reads & live):
                live |= step.reads | {step.name}
                steps.append(step)
        leaves = tuple(leaf for leaf in self.leaves if leaf.name in live)
        return Program(leaves, tuple(reversed(steps)), self.outputs)


def sample(leaf: Leaf, seed: int = 0) -> Tensor:
    """Values of a leaf."""
    return leaf.drawn.sample(seeded(leaf.seed + 1000 * seed))


def seeded(seed: int) -> torch.Generator:
    """A generator of random numbers in a known state."""
    return torch.Generator().manual_seed(seed)


def seasoned(module: nn.Module, seed: int) -> nn.Module:
    """``module`` with random parameters, and with statistics that are not the initial ones."""
    generator = seeded(seed)
    for name, tensor in [*module.named_parameters(), *module.named_buffers()]:
        if not tensor.is_floating_point():
            continue
        bound = 1 / max(1, tensor[0].numel() if tensor.dim() > 1 else 4) ** 0.5
        low, high = (0.5, 2.0) if "running_var" in name else (-bound, bound)
        tensor.data = torch.rand(tensor.shape, generator=generator) * (high - low) + low
        if tensor.dim() == 1 and name.endswith("weight"):  # gains
            tensor.data += 1
    return module


#: What the source of a program may name.
SCOPE: dict[str, Any] = {
    "torch": torch,
    "nn": nn,
    "F": F,
    "aten": torch.ops.aten,
    "Input": Input,
    "seeded": seeded,
    "seasoned": seasoned,
    "inf": float("inf"),
    "nan": float("nan"),
    "device": torch.device,
}
