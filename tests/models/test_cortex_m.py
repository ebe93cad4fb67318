"""The ten networks as int8 kernels of a Cortex-M: bit-equal to the kernels' records, with nearly TOSA_INT8's SQNR."""

from __future__ import annotations

import pytest
import torch
from executorch.export import ExportRecipe

from arm_recipes import ArmRecipeType, export
from tests.models import expectations, zoo
from tests.models.exported_models import CALIBRATION_SAMPLES
from tests.sqnr import sqnr

#: ``TOSA_INT8`` has int16 outputs and attention; measured differences are 0.4 dB (ds_cnn) to 2.3 dB (tiny_vit).
_MAX_LOSS_DB = 4
#: Networks with layer normalization, whose residual additions stay in floating point.
_WITH_FLOAT_OPERATORS = ("transformer_encoder", "tiny_bert", "tiny_vit")
_NAMES = [pytest.param(name, marks=[pytest.mark.verify] if i else []) for i, name in enumerate(zoo.NAMES)]


@pytest.mark.parametrize("name", _NAMES)
def test_cortex_m_programs_are_verified_and_accurate(name: str) -> None:
    entry = zoo.build(name, CALIBRATION_SAMPLES + 4)
    samples, test_samples = entry.samples[:CALIBRATION_SAMPLES], entry.samples[CALIBRATION_SAMPLES:]
    result = export(entry.model, ExportRecipe.get_recipe(ArmRecipeType.CORTEX_M_INT8), samples, verify=True)
    assert bool(result.report.cpu_operators) == (name in _WITH_FLOAT_OPERATORS)
    with torch.no_grad():
        expected = [entry.model(*sample) for sample in test_samples]
    recorded = expectations.read_file()[name]["TOSA_INT8"]["sqnr_db"]
    assert isinstance(recorded, float)
    assert sqnr(expected, [result.run(*sample) for sample in test_samples]) > recorded - _MAX_LOSS_DB
