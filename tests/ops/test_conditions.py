"""``torch.cond``: both branches are computed and one of the results is chosen."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.export import ExportedProgram

from arm_backend_core.quantizer import TOSAQuantizer, get_symmetric_quantization_config
from arm_recipes.stages.post_training import Observed
from tests.ops import runner


class _Branches(nn.Module):
    """Weights and a condition inside a branch, several results, an operand that is a result as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)
        self.offset: Tensor
        self.register_buffer("offset", torch.linspace(-1, 1, 4))

    def forward(self, x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
        def positive(x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
            inner = torch.cond(x[0, 0] > y[0, 0], lambda z: z * 2, lambda z: z + self.offset, [x])
            return self.linear(x), inner + y

        first, second = torch.cond(x.sum() > 0, positive, lambda x, y: (x - y, y * 1.0), [x, y])
        return first, second.tanh()


def _inputs() -> list[tuple[Tensor, ...]]:
    """Inputs that take every way through the branches."""
    x = torch.linspace(-1, 1.5, 8).reshape(2, 4)
    return [(sign * x, torch.full((2, 4), level)) for sign in (1.0, -1.0) for level in (-1.5, 1.5)]


def _quantized(model: nn.Module, samples: list[tuple[Tensor, ...]]) -> ExportedProgram:
    quantizer = TOSAQuantizer(runner.spec("int")).set_global(get_symmetric_quantization_config())
    observed = Observed(runner.export(model, samples[0]), quantizer)
    with torch.no_grad():
        for sample in samples:
            observed(*sample)
        return observed.quantized()


@pytest.mark.parametrize("target", ["fp", "int8", "u85"])
def test_either_branch_is_taken(target: str) -> None:
    model, samples = _Branches().eval(), _inputs()
    program = runner.export(model, samples[0]) if target == "fp" else _quantized(model, samples)
    lowered = runner.lower(program, {"int8": "int"}.get(target, target))
    lowered.check_delegated()
    for sample in samples:
        for ours, theirs in zip(lowered.run(sample), runner.flat(model(*sample)), strict=True):
            torch.testing.assert_close(ours, theirs, atol=1e-5 if target == "fp" else 0.08, rtol=1e-5)


class _Known(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        chosen = torch.cond(torch.tensor([True]), lambda x: (x.sin(),), lambda x: (x.cos(),), [x])
        result: Tensor = chosen[0]
        return result


def test_a_condition_of_one_element_that_is_known() -> None:
    x = torch.linspace(-1, 1, 5)
    lowered = runner.lower(runner.export(_Known(), (x,)), "fp")
    lowered.check_delegated()
    torch.testing.assert_close(lowered.run([x])[0], x.sin())


def test_what_lacks_booleans_runs_the_branches() -> None:
    """Ethos-U55 has no SELECT: the choice stays on the CPU, the layers in the branches do not."""
    lowered = runner.lower(_quantized(_Branches().eval(), _inputs()), "u55")
    lowered.check_refused("ethos-u55-128 has no")
    assert any("linear" in name for made in lowered.log.delegates for name in made.operators)


class _Contexts(nn.Module):
    """What ``no_grad`` and a disabled ``autocast`` are around, as transformers and timm have it."""

    def forward(self, x: Tensor) -> Tensor:
        y = torch.relu(x)
        with torch.autocast("cpu", enabled=False), torch.set_grad_enabled(not torch.is_grad_enabled()):
            z = y @ y.transpose(0, 1)
        return z + 1


@pytest.mark.parametrize("target", ["fp", "int8"])
def test_what_stands_in_a_context_is_written_out(target: str) -> None:
    x = torch.linspace(-1, 2, 16).reshape(4, 4)
    program = runner.export(_Contexts(), (x,)) if target == "fp" else _quantized(_Contexts().eval(), [(x,)])
    lowered = runner.lower(program, {"int8": "int"}.get(target, target))
    lowered.check_delegated()
    torch.testing.assert_close(lowered.run([x])[0], _Contexts()(x), atol=1e-5 if target == "fp" else 0.08, rtol=1e-5)
