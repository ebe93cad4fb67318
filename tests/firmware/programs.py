"""Programs for the tests of firmware folders, each exported once in a process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportResult, export
from tests.models.decoder import Prefill, decoder, prompt
from tests.runtime.host_programs import MIXED, Between, Counting, Mixed, small, wide
from tests.small_models import images, vectors

U55, U65, U85 = (ArmRecipeType[f"ETHOSU_{npu}_INT8"] for npu in ("U55", "U65", "U85"))
U85_A16W8 = ArmRecipeType.ETHOSU_U85_A16W8


class Largest(nn.Module):
    """No NPU takes any of it."""

    def forward(self, x: Tensor) -> Tensor:
        """The largest numbers."""
        return x.topk(6).values


class Pictures(nn.Module):
    """Takes and returns pictures that lie channels last."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Another picture."""
        y: Tensor = self.layers(x)
        return y


def _exported(model: Any, recipe: ArmRecipeType, samples: Any, **options: Any) -> ExportResult:
    return export(model, ExportRecipe.get_recipe(recipe, **options), samples)


def _pictures() -> ExportResult:
    generator = torch.Generator().manual_seed(1)
    samples = [
        (torch.randn(1, 3, 12, 10, generator=generator).to(memory_format=torch.channels_last),) for _ in range(2)
    ]
    return _exported(Pictures().eval(), U85, samples, macs=512)


def _methods() -> ExportResult:
    """Two methods of different size and memory."""
    models = {"first": Counting().eval(), "between": Between().eval()}
    return _exported(models, U55, dict.fromkeys(models, vectors(2)))


class Recurrent(nn.Module):
    """What it has heard, of three steps at once."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.LSTM(8, 6, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """All states, and the last one of the cells."""
        y, (_, c) = self.layer(x)
        return y, c


def _loop() -> ExportResult:
    generator = torch.Generator().manual_seed(1)
    samples = [(torch.randn(1, 8, 8, generator=generator),) for _ in range(2)]
    return _exported(Recurrent().eval(), U55, samples, steps_per_call=3)


def _decoder() -> ExportResult:
    """Two methods with weights and state in common."""
    model = decoder()
    methods = {"prefill": Prefill(model), "decode": model}
    return _exported(methods, U85, {"prefill": [prompt(3)], "decode": [prompt(1, 3 + at) for at in range(3)]})


PROGRAMS: dict[str, Callable[[], ExportResult]] = {
    "float_u55": lambda: small(U55),
    "quantized_u55": lambda: small(U55, quantized_io=True),
    "quantized_u85": lambda: small(U85, quantized_io=True),
    "a16w8_u85": lambda: small(U85_A16W8),
    "fast_scratch_u65": lambda: wide(U65)[0],
    "stripes_u55": lambda: wide(U55)[0],
    "mixed_u85": lambda: _exported(Mixed().eval(), U85, [MIXED]),
    "state_u55": lambda: _exported(Counting().eval(), U55, vectors(2)),
    "cpu_between_u85": lambda: _exported(Between().eval(), U85, vectors(2)),
    "no_npu": lambda: _exported(Largest().eval(), U55, vectors(2)),
    # topk takes 16 bytes of the temp allocator for each number, more than what else is there.
    "kernels_memory": lambda: _exported(Largest().eval(), U55, [(torch.arange(600.0)[None],)] * 2),
    "channels_last_u85": _pictures,
    "methods_u55": _methods,
    "decoder_u85": _decoder,
    "loop_u55": _loop,
}


#: What the self-tests run, where it is more than one sample of noise.
_SAMPLES: dict[str, Callable[[], Any]] = {
    "state_u55": lambda: vectors(3),
    "methods_u55": lambda: {"first": vectors(3), "between": vectors(2)},
    "float_u55": lambda: images(2),
    "mixed_u85": lambda: [MIXED],
    "decoder_u85": lambda: {"prefill": [prompt(3)], "decode": [prompt(1, 3 + at) for at in range(2)]},
}


def samples(name: str) -> Any:
    """For ``save_firmware``."""
    return _SAMPLES[name]() if name in _SAMPLES else None


@cache
def program(name: str) -> ExportResult:
    """One of ``PROGRAMS``."""
    return PROGRAMS[name]()
