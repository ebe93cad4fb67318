"""Export a decoder of SmolLM2-135M's shape in two methods: time, memory, program size and cycles.

    python benchmarks/decoder.py                                   # 30 layers; about 6 GiB of memory
    python benchmarks/decoder.py --layers 2 --recipe TOSA_INT8 --profile

The model is Llama of the library transformers with its ``StaticCache`` and random weights. ``prefill`` takes a prompt,
``decode`` one token.
"""

from __future__ import annotations

import argparse
import cProfile
import json
import pstats
import resource
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))


def main() -> None:
    """Measure one export, and print the figures as JSON."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=30)
    parser.add_argument("--prompt", type=int, default=32, help="tokens that prefill takes")
    parser.add_argument("--cache", type=int, default=256, help="tokens that the cache holds")
    parser.add_argument("--tokens", type=int, default=2, help="tokens that calibrate decode")
    parser.add_argument("--recipe", default="ETHOSU_U85_INT8")
    parser.add_argument("--methods", nargs="+", default=["prefill", "decode"], choices=["prefill", "decode"])
    parser.add_argument(
        "--run",
        type=int,
        default=0,
        metavar="TOKENS",
        help="generate tokens with the program and with PyTorch's quantized graphs",
    )
    parser.add_argument("--profile", action="store_true", help="profile the export")
    print(json.dumps(measure(parser.parse_args()), indent=1))


def measure(given: argparse.Namespace) -> dict[str, Any]:
    """Measure seconds, memory, bytes and cycles of an export."""
    import torch
    from executorch.export import ExportRecipe

    from arm_recipes import ArmRecipeType, export
    from tests.models import zoo

    zoo.torchvision()  # must precede transformers, which imports torchvision
    torch.manual_seed(0)
    torch.set_num_threads(1)
    methods = _methods(given.layers, given.cache)
    tokens = torch.randint(0, 49152, (1, given.prompt + given.tokens), dtype=torch.int32)
    positions = torch.arange(given.prompt + given.tokens, dtype=torch.int32)
    step = [(tokens[:, i : i + 1], positions[i : i + 1]) for i in range(given.prompt, given.prompt + given.tokens)]
    samples = {"prefill": [(tokens[:, : given.prompt], positions[: given.prompt])], "decode": step}
    weights = sum(parameter.numel() * 4 for parameter in methods["decode"].parameters())
    before = _peak()
    profile = cProfile.Profile()
    start = time.perf_counter()
    if given.profile:
        profile.enable()
    chosen = {method: methods[method] for method in given.methods}
    recipe = ExportRecipe.get_recipe(ArmRecipeType[given.recipe])
    result = export(chosen, recipe, {method: samples[method] for method in given.methods})
    profile.disable()
    seconds = time.perf_counter() - start
    with tempfile.TemporaryDirectory() as folder:
        result.save(Path(folder, "decoder.pte"))
    if given.profile:
        pstats.Stats(profile, stream=sys.stderr).sort_stats("cumulative").print_stats(70)
    return {
        "recipe": given.recipe,
        "layers": given.layers,
        "seconds": round(seconds, 1),
        "stages": {stage: round(taken, 1) for stage, taken in result.report.seconds.items()},
        "weights MiB": weights >> 20,
        "peak MiB": _peak() >> 20,
        "peak before MiB": before >> 20,
        "increase / weights": round((_peak() - before) / weights, 2),
        "program MiB": round(result.report.program_bytes / (1 << 20), 2),
        "methods": [_method(method) for method in result.report.methods],
    } | ({"run": _compare_generation(result, samples["prefill"][0], given.run)} if given.run else {})


def _compare_generation(result: Any, prompt: tuple[Any, Any], count: int) -> dict[str, Any]:
    """Compare greedy decoding by the program with that by PyTorch's quantized graphs (teacher forcing).

    The next input of both is the graphs' token.

    Returns:
        Tokens and seconds of each call. In steps of the output scale: the largest difference of the scores, and by how
        much the score of the program's token is below the best score of the graph.
    """
    import torch

    program, modules = result.program(), {name: made.module() for name, made in result.exported_programs.items()}
    for module in modules.values():
        for node in module.graph.find_nodes(op="call_function", target=torch.ops.aten.view.default):
            node.target = torch.ops.aten.reshape.default  # attention's result has other strides than in the trace
        module.recompile()
    states = {
        name: {path.removeprefix("decode."): buffer for path, buffer in module.named_buffers()}
        for name, module in modules.items()
    }
    mutated_buffers = [
        path.removeprefix("decode.")
        for path in result.exported_programs["decode"].graph_signature.buffers_to_mutate.values()
    ]
    tokens: dict[str, list[int]] = {"program": [], "quantized": []}
    seconds: dict[str, list[float]] = {"program": [], "quantized": []}
    differences, deficits, sample, method = [], [], prompt, "prefill"
    for step in range(count + 1):
        start = time.perf_counter()
        actual = program.run(*sample, method=method)[0]
        middle = time.perf_counter()
        with torch.no_grad():
            expected = modules[method](*sample)
        for name, elapsed in (("program", middle - start), ("quantized", time.perf_counter() - middle)):
            seconds[name].append(round(elapsed, 2))
        for name, scores in (("program", actual), ("quantized", expected)):
            tokens[name].append(int(scores.argmax()))
        levels = expected.unique()
        scale = float((levels[1:] - levels[:-1]).min())
        differences.append(round(float((actual - expected).abs().max()) / scale))
        deficits.append(round(float(expected.max() - expected.flatten()[tokens["program"][-1]]) / scale))
        for path in mutated_buffers:
            for state in states.values():
                state[path].copy_(states[method][path])
        position = torch.tensor([prompt[1].numel() + step], dtype=torch.int32)
        sample, method = (torch.tensor([[tokens["quantized"][-1]]], dtype=torch.int32), position), "decode"
    return {
        "tokens": tokens,
        "seconds": seconds,
        "score difference, output steps": differences,
        "score deficit, output steps": deficits,
    }


def _method(method: Any) -> dict[str, Any]:
    vela = [delegate.vela for delegate in method.delegates if delegate.vela is not None]
    return {
        "method": method.name,
        "delegates": len(method.delegates),
        "operators on the CPU": sum(operator.count for operator in method.cpu_operators),
        "boundary": method.boundary,
        "payload MiB": round(sum(delegate.payload_bytes for delegate in method.delegates) / (1 << 20), 2),
        "cycles": sum(figures.total_cycles for figures in vela),
        "weights MiB": round(sum(figures.weight_bytes for figures in vela) / (1 << 20), 2),
    }


def _peak() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss << 10


def _methods(layers: int, cache: int) -> dict[str, Any]:
    """Build the decoder. Its KV cache is in buffers, which both methods share."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM, StaticCache

    class Decode(torch.nn.Module):
        """Compute the scores of the next token."""

        def __init__(self, model: LlamaForCausalLM) -> None:
            super().__init__()
            self.model = model
            config = model.config
            self.cache = StaticCache(config=config, max_cache_len=cache)
            size = config.hidden_size // config.num_attention_heads
            device = torch.device("cpu")
            self.cache.early_initialization(1, config.num_key_value_heads, size, torch.float32, device)
            for index, layer in enumerate(self.cache.layers):
                for name, value in vars(layer).items():
                    if isinstance(value, torch.Tensor):
                        self.register_buffer(f"{name}{index}", value)

        def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
            outputs = self.model.model(
                input_ids=tokens, position_ids=positions[None], past_key_values=self.cache, use_cache=True
            )
            return self.model.lm_head(outputs.last_hidden_state[:, -1:])

    class Prefill(torch.nn.Module):
        """The same model, for a prompt of several tokens."""

        def __init__(self, decode: Decode) -> None:
            super().__init__()
            self.decode = decode

        def forward(self, tokens: torch.Tensor, positions: torch.Tensor) -> Any:
            return self.decode(tokens, positions)

    config = LlamaConfig(
        hidden_size=576,
        intermediate_size=1536,
        num_hidden_layers=layers,
        num_attention_heads=9,
        num_key_value_heads=3,
        vocab_size=49152,
        max_position_embeddings=8192,
        rope_parameters={"rope_type": "default", "rope_theta": 100000.0},
        tie_word_embeddings=True,
        attn_implementation="sdpa",
    )
    decode = Decode(LlamaForCausalLM(config).eval()).eval()
    return {"prefill": Prefill(decode).eval(), "decode": decode}


if __name__ == "__main__":
    main()
