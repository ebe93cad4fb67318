"""Exported programs for the tests of firmware folders; each is exported once per process."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from executorch.export import ExportRecipe
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportResult, export
from tests.models.decoder import Prefill, decoder, prompt
from tests.runtime.host_programs import MIXED, Counting, CpuBetween, Mixed, Small, export_small, export_striped
from tests.small_models import images, vectors

U55, U65, U85 = (ArmRecipeType[f"ETHOSU_{npu}_INT8"] for npu in ("U55", "U65", "U85"))
U85_A16W8 = ArmRecipeType.ETHOSU_U85_A16W8


class Largest(nn.Module):
    """``topk``, which no NPU supports."""

    def forward(self, x: Tensor) -> Tensor:
        """Return the six largest numbers."""
        return x.topk(6).values


class Pictures(nn.Module):
    """Two convolutions with channels-last images as input and output."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layers = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1), nn.ReLU(), nn.Conv2d(16, 5, 1))

    def forward(self, x: Tensor) -> Tensor:
        """Return an image of five channels."""
        y: Tensor = self.layers(x)
        return y


def _exported(model: Any, recipe: ArmRecipeType, samples: Any, **options: Any) -> ExportResult:
    return export(model, ExportRecipe.get_recipe(recipe, **options), samples)


class Pixels(nn.Module):
    """A network for uint8 images: the conversion is a part of the model."""

    def __init__(self) -> None:
        super().__init__()
        self.body = Small()

    def forward(self, x: Tensor) -> Tensor:
        """Return the results of ``Small`` for pixels from -1 to 1."""
        return torch.as_tensor(self.body(x.float() / 128 - 1))


def _pixels() -> ExportResult:
    generator = torch.Generator().manual_seed(1)
    shape = images()[0][0].shape
    samples = [(torch.randint(0, 256, shape, generator=generator).to(torch.uint8),) for _ in range(2)]
    return _exported(Pixels().eval(), U85, samples)


def _pictures() -> ExportResult:
    generator = torch.Generator().manual_seed(1)
    samples = [
        (torch.randn(1, 3, 12, 10, generator=generator).to(memory_format=torch.channels_last),) for _ in range(2)
    ]
    return _exported(Pictures().eval(), U85, samples, macs=512)


def _methods() -> ExportResult:
    """Export two methods of different size and memory."""
    models = {"first": Counting().eval(), "between": CpuBetween().eval()}
    return _exported(models, U55, dict.fromkeys(models, vectors(2)))


class Recurrent(nn.Module):
    """An LSTM, exported as a loop of three steps per call."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = nn.LSTM(8, 6, batch_first=True)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        """Return the states of all steps, and the last cell state."""
        y, (_, c) = self.layer(x)
        return y, c


def _loop() -> ExportResult:
    generator = torch.Generator().manual_seed(1)
    samples = [(torch.randn(1, 8, 8, generator=generator),) for _ in range(2)]
    return _exported(Recurrent().eval(), U55, samples, steps_per_call=3)


def _decoder() -> ExportResult:
    """Export two methods that share weights and state."""
    model = decoder()
    methods = {"prefill": Prefill(model), "decode": model}
    return _exported(methods, U85, {"prefill": [prompt(3)], "decode": [prompt(1, 3 + at) for at in range(3)]})


PROGRAMS: dict[str, Callable[[], ExportResult]] = {
    "float_u55": lambda: export_small(U55),
    "quantized_u55": lambda: export_small(U55, quantized_io=True),
    "quantized_u85": lambda: export_small(U85, quantized_io=True),
    "uint8_u55": lambda: export_small(U55, input_dtype="uint8"),
    "pixels_u85": _pixels,
    "a16w8_u85": lambda: export_small(U85_A16W8),
    "fast_scratch_u65": lambda: export_striped(U65)[0],
    "stripes_u55": lambda: export_striped(U55)[0],
    "mixed_u85": lambda: _exported(Mixed().eval(), U85, [MIXED]),
    "state_u55": lambda: _exported(Counting().eval(), U55, vectors(2)),
    "cpu_between_u85": lambda: _exported(CpuBetween().eval(), U85, vectors(2)),
    "no_npu": lambda: _exported(Largest().eval(), U55, vectors(2)),
    # topk needs 16 bytes of the temp allocator per element, more than all other operators.
    "kernels_memory": lambda: _exported(Largest().eval(), U55, [(torch.arange(600.0)[None],)] * 2),
    "channels_last_u85": _pictures,
    "methods_u55": _methods,
    "decoder_u85": _decoder,
    "loop_u55": _loop,
    "memories_u85": lambda: _exported(CpuBetween().eval(), U85, vectors(2), memory={"dtcm": 2000, "sram": None}),
    "two_memories_u85": lambda: _exported(Small().eval(), U85, images(), memory={"dtcm": 800, "sram": None}),
    "external_u85": lambda: export_small(U85, quantized_io=True, external=True),
    "external_weights_u55": lambda: export_small(U55, external=("weights",)),
    "corstone_300": lambda: export_small(U55, board="corstone-300"),
    "corstone_315": lambda: export_small(U65, board="corstone-315"),
    "corstone_320": lambda: export_small(U85, board="corstone-320"),
    "alif_e8": lambda: export_small(U55, board="alif-e8-hp"),
    "himax": lambda: export_small(U55, board="himax-we2"),
    "cpu_between_board": lambda: _exported(CpuBetween().eval(), U85, vectors(2), board="corstone-320"),
    "nuvoton": lambda: export_small(U55, board="nuvoton-m55m1"),
}


#: Samples of the self-tests, if not the default of one random sample.
_SAMPLES: dict[str, Callable[[], Any]] = {
    "state_u55": lambda: vectors(3),
    "methods_u55": lambda: {"first": vectors(3), "between": vectors(2)},
    "float_u55": lambda: images(2),
    "external_weights_u55": lambda: images(2),
    "mixed_u85": lambda: [MIXED],
    "decoder_u85": lambda: {"prefill": [prompt(3)], "decode": [prompt(1, 3 + at) for at in range(2)]},
}


def samples(name: str) -> Any:
    """Return the samples of a program for ``save_firmware``."""
    return _SAMPLES[name]() if name in _SAMPLES else None


@cache
def program(name: str) -> ExportResult:
    """Export one of ``PROGRAMS``."""
    return PROGRAMS[name]()
