"""Products with a constant operand become layers, with a scale for each channel."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from arm_recipes import ArmRecipeType, ExportRecipe, ExportResult, export
from tests.sqnr import sqnr

F = nn.functional
U55, U85 = ArmRecipeType.ETHOSU_U55_INT8, ArmRecipeType.ETHOSU_U85_INT8


class Product(nn.Module):
    """A function of an input and a constant, whose channels differ in magnitude."""

    def __init__(self, function: Callable[[Tensor, Tensor], Tensor], *shape: int, trained: bool = True) -> None:
        super().__init__()
        scales = torch.logspace(-2, 0, shape[-1])
        value = torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * scales
        self.function = function
        self.w = nn.Parameter(value) if trained else nn.Buffer(value)

    def forward(self, x: Tensor) -> Tensor:
        """x [1, 8, 64]."""
        return self.function(x, self.w)


PRODUCTS: dict[str, tuple[Callable[[Tensor, Tensor], Tensor], tuple[int, ...]]] = {
    "matmul": (lambda x, w: x @ w, (64, 24)),
    "matmul, constant to the left": (lambda x, w: w.t() @ x.transpose(1, 2), (64, 24)),
    "bmm": (lambda x, w: torch.bmm(x, w[None]), (64, 24)),
    "mm": (lambda x, w: torch.mm(x[0], w * 2), (64, 24)),
    "einsum": (lambda x, w: torch.einsum("bnk,ko->bno", x, w), (64, 24)),
    "einsum, transposed": (lambda x, w: torch.einsum("bnk,ok->bon", x, w), (24, 64)),
    "vector": (lambda x, w: x @ w[:, 0], (64, 1)),
    "vector to the left": (lambda x, w: w[:, 0] @ x.transpose(1, 2), (64, 1)),
    "linear of a constant": (lambda x, w: F.linear(w.t(), x[0]), (64, 24)),
    "addmm": (lambda x, w: torch.addmm(w[0], x[0], w, alpha=2), (64, 24)),
    "tensordot": (lambda x, w: torch.tensordot(x, w, dims=([2], [0])), (64, 24)),
}
HEADS = {
    "heads": (lambda x, w: torch.einsum("bhnk,hko->bhno", x.unflatten(2, (4, 16)).transpose(1, 2), w), (4, 16, 8)),
    "heads to the left": (lambda x, w: w.mT @ x.reshape(4, 16, 8), (4, 16, 8)),
}


def _samples() -> list[tuple[Tensor]]:
    generator = torch.Generator().manual_seed(0)
    return [(torch.randn(1, 8, 64, generator=generator),) for _ in range(8)]


def _exported(model: nn.Module, recipe: ArmRecipeType = U55) -> ExportResult:
    return export(model.eval(), ExportRecipe.get_recipe(recipe), _samples())


def _cycles(result: ExportResult) -> int:
    (delegate,) = result.report.delegates
    assert delegate.vela is not None
    return delegate.vela.total_cycles


def _kinds(result: ExportResult) -> list[str]:
    (delegate,) = result.report.delegates
    assert delegate.vela is not None
    return [layer.npu_operator for layer in delegate.vela.layers]


def _sqnr(result: ExportResult, model: nn.Module) -> float:
    (x,) = _samples()[0]
    expected = model(x).detach()
    return float(10 * torch.log10(expected.square().sum() / (result.run(x) - expected).square().sum()))


@pytest.mark.parametrize("product", [*PRODUCTS, *HEADS])
def test_product_with_a_constant_is_a_layer(product: str) -> None:
    function, shape = {**PRODUCTS, **HEADS}[product]
    model = Product(function, *shape)
    result = _exported(model)
    assert "MatMul" not in _kinds(result)
    assert {"Conv2D", "FullyConnected"} & set(_kinds(result))
    assert _sqnr(result, model) > 30


def test_constant_matrices_of_heads_stay_in_matmul_where_that_is_fast() -> None:
    function, shape = HEADS["heads"]
    assert "Conv2D" not in _kinds(_exported(Product(function, *shape), U85))


@pytest.mark.parametrize("recipe", [U55, U85], ids=lambda recipe: recipe.name)
def test_product_with_a_constant_takes_the_cycles_of_a_linear_layer(recipe: ArmRecipeType) -> None:
    product, layer = (Product(function, 64, 24) for function in (lambda x, w: x @ w, lambda x, w: F.linear(x, w.t())))
    assert _cycles(_exported(product, recipe)) <= _cycles(_exported(layer, recipe))


@pytest.mark.parametrize(("trained", "sqnr"), [(True, 40), (False, 60)])
def test_constants_that_are_not_trained_are_int16_in_a16w8(trained: bool, sqnr: int) -> None:
    model = Product(lambda x, w: x @ w, 64, 24, trained=trained)
    assert _sqnr(_exported(model, ArmRecipeType.ETHOSU_U55_A16W8), model) > sqnr


def test_products_of_two_activations_stay_matmul() -> None:
    assert "Conv2D" not in _kinds(_exported(Product(lambda x, w: x @ (x.transpose(1, 2) * w.mean()), 64, 24)))


def test_a_short_time_transform_is_one_layer() -> None:
    class Spectrum(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            """|STFT| of x [1, 8, 64]."""
            window = torch.hann_window(64)
            return torch.stft(x.flatten(1), 64, 32, window=window, center=False, return_complex=True).abs()

    kinds = _kinds(_exported(Spectrum()))
    assert "MatMul" not in kinds
    assert kinds.count("Conv2D") + kinds.count("FullyConnected") == 1


class _RuntimeWeight(nn.Module):
    """An LSTM with a constant initial state and a recurrent weight that is an input."""

    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.state = nn.Buffer(torch.randn(1, 4, 2, generator=generator))
        self.weight = nn.Buffer(torch.randn(8, 3, generator=generator))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        """x [4, 3, 3], weight [8, 2]."""
        parameters = [self.weight, weight]
        return torch.lstm(x, [self.state, self.state], parameters, False, 1, 0.0, False, False, True)[0]


def test_time_steps_share_no_scale_with_a_constant_initial_state() -> None:
    model = _RuntimeWeight().eval()
    samples = [(torch.randn(4, 3, 3), torch.randn(8, 2)) for _ in range(4)]
    result = export(model, ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8), samples)
    assert sqnr(model(*samples[0]), result.run(*samples[0])) > 20
