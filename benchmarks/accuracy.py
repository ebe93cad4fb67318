"""Accuracy of INT8 on held-out samples: the output SQNR of PyTorch's quantized graph.

    python benchmarks/accuracy.py --out rows.jsonl                                   # the ten models, by default
    python benchmarks/accuracy.py --out rows.jsonl --variants default algorithms=False peer
    python benchmarks/accuracy.py --out rows.jsonl --models low --variants default observer=minmax
    python benchmarks/accuracy.py --out rows.jsonl --table benchmarks/accuracy.md

A variant is ``default``, ``peer`` (ExecuTorch's own Arm backend), or arguments of a recipe such as
``observer=mse,algorithms=bias_correction+int16_outputs`` or ``recipe=TOSA_A16W8``. Each row is measured in a new
process. Rows that the file already contains are not measured again.

Most models have the same quantized graph for TOSA and the NPUs. Exceptions: RMS norms (Ethos-U recipes omit
fused_rms_norms by default), sums and products per channel, and on U55 and U65 some matrix products. Tests compare
programs with the graph of their recipe.

The SQNR is that of ``coverage.py``: the signal is an output minus its mean, and the minimum over the outputs counts.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

from benchmarks.rows import Row, add_row, index_rows, parse_printed_row

LOW_SQNR_MODELS = [
    "torchvision/maxvit_t",
    "torchvision/swin_v2_t",
    "torchvision/inception_v3",
    "torchvision/fcn_resnet50",
    "torchvision/resnet18",
    "torchvision/shufflenet_v2_x0_5",
    "torchvision/mnasnet0_5",
    "torchvision/regnet_y_400mf",
    "torchvision/vit_b_16",
    "torchvision/convnext_tiny",
    "torchvision/googlenet",
    "transformers/mobilenet-v1",
    "transformers/mobilevitv2",
    "transformers/autoformer",
    "transformers/patchtst",
    "transformers/gemma",
    "transformers/llama",
    "transformers/qwen2",
    "transformers/beit",
    "transformers/bert",
    "transformers/swinv2",
    "transformers/segformer",
    "transformers/t5-encoder",
    "transformers/gpt2",
    "transformers/mamba",
    "timm/efficientvit_b0",
    "timm/visformer_tiny",
    "timm/pit_ti_224",
    "timm/dpn48b",
    "timm/convmixer_768_32",
    "timm/crossvit_tiny_240",
    "timm/nest_tiny",
    "timm/coat_tiny",
    "timm/inception_v4",
]
"""Models of ``coverage.md`` with a low SQNR, and some models of other families."""

TEST_SAMPLES = 4
FIELDS = ("model", "variant")


def main() -> None:
    """Measure what the arguments select, or write the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="JSON Lines file to which rows are appended")
    parser.add_argument(
        "--models",
        nargs="+",
        default=["zoo"],
        help="zoo (tests/models/zoo.py), low (LOW_SQNR_MODELS), or names of models in either or in coverage.md",
    )
    parser.add_argument("--variants", nargs="+", default=["default"])
    parser.add_argument(
        "--table", type=Path, help="write a table of earlier measurements to this file, and measure nothing"
    )
    parser.add_argument("--row", nargs=2, metavar=("MODEL", "VARIANT"), help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.row:
        print(json.dumps(measure(*given.row)))
        return
    if given.table:
        given.table.write_text(format_table(index_rows(FIELDS, given.out).values()))
        return
    known = index_rows(FIELDS, given.out)
    for name in _names(given.models):
        for variant in given.variants:
            if (name, variant) in known:
                continue
            row = {"model": name, "variant": variant, **_measure_in_process(name, variant)}
            add_row(given.out, row)
            print(f"{name:36} {variant:30} {row.get('error') or row['sqnr']}", flush=True)


def _names(wanted: Iterable[str]) -> list[str]:
    from tests.models import zoo

    sets = {"zoo": list(zoo.NAMES), "low": list(LOW_SQNR_MODELS)}
    return [name for word in wanted for name in sets.get(word, [word])]


def _measure_in_process(name: str, variant: str) -> Row:
    command = [sys.executable, __file__, "--out", os.devnull, "--row", name, variant]
    done = subprocess.run(command, capture_output=True, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"})
    silent = f"the process ended with code {done.returncode} and printed no error"
    return parse_printed_row(done.stdout) or {"error": (done.stderr.strip().splitlines() or [silent])[-1][:300]}


# --- one row


def measure(name: str, variant: str) -> Row:
    """Measure the SQNR of a model, and the processor time of its capture and quantization."""
    warnings.simplefilter("ignore")
    import torch

    from benchmarks.coverage import _flat, sqnr

    torch.set_num_threads(1)
    model, samples, test_samples = _build(name)
    with torch.no_grad():
        expected = [_flat(model(*sample)) for sample in test_samples]
        quantize = _quantize_with_peer if variant == "peer" else _quantize_with_ours
        run, seconds = quantize(model, samples, {} if variant in ("peer", "default") else _arguments(variant))
        found = [_flat(run(*sample)) for sample in test_samples]
    joined = [[torch.stack(values) for values in zip(*rows, strict=True)] for rows in (expected, found)]
    return {"sqnr": sqnr(*joined), "seconds": round(seconds, 2)}


def _build(name: str) -> tuple[Any, list[Any], list[Any]]:
    """Build a model; return it with calibration samples and held-out samples."""
    from tests.models import zoo

    if name in zoo.NAMES:
        entry = zoo.build(name, 4 + TEST_SAMPLES)
        return entry.model, entry.samples[:4], entry.samples[4:]
    from benchmarks import coverage_models

    count = coverage_models.CALIBRATION
    model, samples = coverage_models.build(name, count + TEST_SAMPLES)
    return model, samples[:count], samples[count:]


def _arguments(variant: str) -> dict[str, Any]:
    """Parse arguments such as ``per_channel=False,algorithms=bias_correction+int16_outputs``."""
    values = {"True": True, "False": False}
    pairs = (part.split("=") for part in variant.split(","))
    return {key: values.get(value, value.split("+") if key == "algorithms" else value) for key, value in pairs}


def _quantize_with_ours(model: Any, samples: list[Any], arguments: dict[str, Any]) -> tuple[Callable[..., Any], float]:
    import torch

    from arm_recipes import ArmRecipeType, ExportRecipe
    from arm_recipes.pipeline.pipeline import Pipeline
    from arm_recipes.samples.call_inputs import as_inputs

    given = {"recipe": "TOSA_INT8", **arguments}
    recipe = ExportRecipe.get_recipe(ArmRecipeType[given.pop("recipe")], **given)
    inputs = [as_inputs(sample, "a sample") for sample in samples]
    options: dict[str, Any] = {"dynamic_shapes": None, "constant_methods": None, "strict": None, "progress": False}
    pipeline = Pipeline(recipe, {"forward": model}, {"forward": inputs}, **options)
    started = time.process_time()
    unlowered, _ = pipeline.quantize_programs()
    seconds = time.process_time() - started
    module = unlowered.programs["forward"].module(check_guards=False)
    for node in module.graph.nodes:  # attention's result has other strides than in the trace
        if node.target is torch.ops.aten.view.default:
            node.target = torch.reshape
    module.recompile()
    return module, seconds


def _quantize_with_peer(model: Any, samples: list[Any], _: dict[str, Any]) -> tuple[Callable[..., Any], float]:
    """Quantize a model as the peer's recipe does."""
    import torch
    from executorch.backends.arm.quantizer import TOSAQuantizer, get_symmetric_quantization_config
    from executorch.backends.arm.tosa.specification import TosaSpecification
    from torchao.quantization.pt2e.quantize_pt2e import convert_pt2e, prepare_pt2e

    quantizer = TOSAQuantizer(TosaSpecification.create_from_string("TOSA-1.0+INT"))
    quantizer.set_global(get_symmetric_quantization_config())
    started = time.process_time()
    prepared = prepare_pt2e(torch.export.export(model, samples[0]).module(check_guards=False), quantizer)
    for sample in samples:
        prepared(*sample)
    converted = convert_pt2e(prepared)
    return converted, time.process_time() - started


# --- the table


def format_table(rows: Iterable[Row]) -> str:
    """Format the rows as Markdown: a row per model, a column per variant, and the median gain of each variant."""
    rows = list(rows)
    variants = list(dict.fromkeys(row["variant"] for row in rows))
    models: dict[str, dict[str, Row]] = {}
    for row in rows:
        models.setdefault(row["model"], {})[row["variant"]] = row
    lines = ["# INT8 on held-out samples", "", "Written by `accuracy.py`; README.md explains the figures.", ""]
    lines += ["| model | " + " | ".join(variants) + " |", "|---|" + "---|" * len(variants)]
    for model, cells in models.items():
        lines.append(f"| {model} | " + " | ".join(_cell(cells.get(variant)) for variant in variants) + " |")
    first = variants[0]
    gains = []
    for variant in variants[1:]:
        pairs = [(cells.get(variant, {}).get("sqnr"), cells.get(first, {}).get("sqnr")) for cells in models.values()]
        found = [one - other for one, other in pairs if one is not None and other is not None]
        gains.append(f"{statistics.median(found):+.1f} ({min(found):+.1f} to {max(found):+.1f})" if found else "")
    lines.append(f"| median of the differences from {first} | | " + " | ".join(gains) + " |")
    return "\n".join(lines) + "\n"


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    return "fails" if "error" in row else f"{row['sqnr']} dB, {row['seconds']} s"


if __name__ == "__main__":
    main()
