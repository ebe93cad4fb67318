"""The first screen of the page: the answers to "Fast?", "Fits?" and "Accurate?"."""

from __future__ import annotations

from dataclasses import replace

from arm_backend_core.compilation_log import DelegateRecord
from arm_recipes.comparison.accuracy import Accuracy
from arm_recipes.comparison.result import Comparison
from arm_recipes.report.context import ExportContext
from arm_recipes.report.page_summary import answer_questions
from arm_recipes.report.ram import Ram, RamPart
from arm_recipes.report.report import Report
from tests.report.test_report import DELEGATE, METHOD, REPORT, VELA

_RAM = Ram((RamPart("NPU scratch", 20_480, "SRAM"),), (RamPart("runtime", 10_240, "SRAM"),))
_FITTING = replace(
    REPORT, methods=(replace(METHOD, delegates=(replace(DELEGATE, vela=replace(VELA, sram_limit=40_960)),)),), ram=_RAM
)
_COMPARISON = Comparison(
    "program", "the model", "forward", 8, 8, (), (), Accuracy("top-1 accuracy", 0.75, 0.5, 8, 6), 1
)


def _answers(report: Report, context: ExportContext, *comparisons: Comparison) -> dict[str, tuple[str, str]]:
    found = answer_questions(report, context, comparisons, {})
    return {answer.question: (answer.value, "; ".join(answer.details)) for answer in found}


def test_fast_has_time_cycles_and_omitted_costs() -> None:
    figure, details = _answers(REPORT, ExportContext())["Fast?"]
    assert figure == "0.100 ms"
    assert details == (
        "100,000 cycles at 1000 MHz on ethos-u85-256, estimated by Vela; without the time of 2 operators on the CPU"
    )


def test_fast_prefers_measured_cycles() -> None:
    fast, *_ = answer_questions(REPORT, ExportContext(), (), {METHOD.name: 250_000.0})
    assert fast.value == "0.250 ms"
    assert fast.details[:2] == (
        "250,000 cycles of the NPU, measured; the time assumes 1000 MHz on ethos-u85-256",
        "100,000 cycles estimated by Vela",
    )


def test_fast_shows_the_slowest_method() -> None:
    slow: DelegateRecord = replace(DELEGATE, vela=replace(VELA, inference_seconds=2e-3))
    report = replace(REPORT, methods=(METHOD, replace(METHOD, name="prefill", delegates=(slow,))))
    figure, details = _answers(report, ExportContext())["Fast?"]
    assert figure == "2.000 ms"
    assert "method 'prefill', the slowest of 2" in details


def test_fits_compares_with_the_limits_and_names_the_board() -> None:
    context = ExportContext(board="demo", sram_budget=40_960, flash_budget=20_480)
    assert _answers(_FITTING, context)["Fits?"] == (
        "yes",
        "SRAM 30.0 KiB of 40.0 KiB; program 12.1 KiB of 20.0 KiB; the firmware's code and constants need flash in "
        "addition; board demo",
    )
    assert _answers(_FITTING, replace(context, sram_budget=20_480))["Fits?"][0] == "no"
    figure, details = _answers(_FITTING, ExportContext())["Fits?"]
    assert figure == "30.0 KiB RAM"
    assert "No limit is set" in details


def test_fits_counts_the_data_file_as_flash() -> None:
    """The board stores both files there, as ``flash_budget`` of the export counts them."""
    report = replace(_FITTING, data_file_bytes=10_240)
    figure, details = _answers(report, ExportContext(flash_budget=20_480))["Fits?"]
    assert figure == "no"
    assert "program and data file 22.1 KiB of 20.0 KiB; the firmware's code" in details
    assert "firmware's code" not in _answers(report, ExportContext(sram_budget=40_960))["Fits?"][1]
    assert _answers(replace(report, ram=None), ExportContext())["Fits?"][0] == "22.1 KiB program and data file"


def test_fits_checks_the_limit_of_the_memory_mode() -> None:
    figure, details = _answers(replace(REPORT, ram=_RAM), ExportContext(sram_budget=40_960))["Fits?"]
    assert figure == "no"
    assert "NPU: 19.5 KiB of 9.8 KiB SRAM; exceeds the limit of memory mode Mode" in details


def test_accurate_is_the_metric_of_the_task_if_there_are_labels() -> None:
    figure, details = _answers(REPORT, ExportContext(), _COMPARISON)["Accurate?"]
    assert figure == "50.00 %"
    assert details.startswith("top-1 accuracy; 75.00 % of the model; SQNR ")
    figure, details = _answers(REPORT, ExportContext(), replace(_COMPARISON, accuracy=None))["Accurate?"]
    assert figure.startswith("SQNR ")
    assert "labels= or metric=" in details
    two = _answers(REPORT, ExportContext(), _COMPARISON, replace(_COMPARISON, method="decode"))
    assert {"Accurate? 'forward'", "Accurate? 'decode'"} <= set(two)


def test_accurate_without_a_comparison_is_the_sqnr_of_calibration() -> None:
    assert METHOD.quantization is not None
    assert _answers(REPORT, ExportContext())["Accurate?"][0] == "not measured"
    quantization = replace(METHOD.quantization, sqnr={"a": 40.0, "b": 31.25})
    report = replace(REPORT, methods=(replace(METHOD, quantization=quantization),))
    assert _answers(report, ExportContext())["Accurate?"][0] == "SQNR 31.2 dB"
    floating = replace(REPORT, methods=(replace(METHOD, quantization=None),))
    assert _answers(floating, ExportContext())["Accurate?"][0] == "not quantized"


def test_answers_for_targets_without_estimates() -> None:
    report = replace(REPORT, methods=(replace(METHOD, delegates=(replace(DELEGATE, vela=None),)),))
    answers = _answers(report, ExportContext())
    assert answers["Fast?"] == ("no estimate", "Cycles and RAM are estimated for Ethos-U and Cortex-M programs only.")
    assert answers["Fits?"][0] == "12.1 KiB program"
