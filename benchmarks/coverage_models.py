"""The public architectures that ``coverage.py`` exports: torchvision's, transformers' from small configs, timm's.

A name is ``library/model``. Weights are random from a fixed seed. They are scaled so that outputs depend on the inputs.
"""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from tests.models import zoo

LIMIT = 100_000_000
"""Maximum number of parameters of a model."""

CALIBRATION = 2
"""Number of calibration samples."""


class FlatOutputs(nn.Module):
    """Wraps a model or a part of it: takes tensors, returns a flat list of the floating-point outputs."""

    def __init__(self, model: nn.Module, call: Callable[..., Any]) -> None:
        super().__init__()
        self.model = model
        self.call = call

    def forward(self, *inputs: Tensor) -> list[Tensor]:
        """Return all floating-point tensors among the results of the call."""
        found = pytree.tree_leaves(self.call(self.model, *inputs))
        return [value for value in found if isinstance(value, Tensor) and value.is_floating_point()]


class Model(NamedTuple):
    """A network with a function that draws inputs of batch size 1."""

    module: nn.Module
    draw: Callable[[], tuple[Tensor, ...]]


def build(name: str, samples: int = CALIBRATION + 1) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """Build a model and its samples: ``CALIBRATION`` calibration samples first, then held-out samples.

    Raises:
        ValueError: the model has more than ``LIMIT`` parameters.
    """
    library, _, model = name.partition("/")
    torch.manual_seed(0)
    with torch.no_grad():
        module, draw = {"torchvision": _torchvision, "transformers": _transformers, "timm": _timm}[library](model)
    count = sum(parameter.numel() for parameter in module.parameters())
    if count > LIMIT:
        raise ValueError(f"{count / 1e6:.0f} M parameters, more than {LIMIT // 1_000_000} M")
    return initialize(Model(module, draw), samples)


def initialize(model: Model, samples: int) -> tuple[nn.Module, list[tuple[Tensor, ...]]]:
    """Give a model parameters and statistics that are plausible for a trained one, and draw samples."""
    module = model.module.eval()
    with torch.no_grad():
        _vary(module)
        zoo.initialize_batch_norm(module, model.draw)
    torch.manual_seed(1)
    return module, [model.draw() for _ in range(samples)]


def _vary(module: nn.Module) -> None:
    """Move parameters away from values at which a branch has no effect, such as zero.

    Libraries initialize layer scales, biases and the last weights of residual branches at or near 0, and linear layers
    of transformers with a standard deviation of 0.02, whatever their width. Rounding of the residual stream would hide
    the results of such branches.
    """
    for name, parameter in module.named_parameters():
        if not parameter.is_floating_point() or parameter.numel() < 2:
            continue
        spread = float(parameter.std())
        if parameter.ndim >= 2 and parameter[0].numel() > 8:
            wanted = 1 / math.sqrt(parameter[0].numel())
            if spread == 0:
                nn.init.normal_(parameter, std=wanted)
            elif spread < 0.5 * wanted and "embed" not in name:
                parameter.mul_(wanted / spread)
        elif spread == 0:
            value = float(parameter.flatten()[0])
            if "bias" in name or value > 0.5:  # a bias, or the weight of a normalization
                parameter.add_(torch.empty_like(parameter).uniform_(-0.25, 0.25))
            else:  # a layer scale
                nn.init.uniform_(parameter, 0.25, 0.75)


# --- torchvision


def torchvision_names() -> list[str]:
    """The models that torchvision lists, with at most ``LIMIT`` parameters according to its weights' metadata."""
    models = zoo.torchvision().models
    sizes = {name: models.get_model_weights(name).DEFAULT.meta["num_params"] for name in models.list_models()}
    return [name for name, size in sizes.items() if size <= LIMIT]


def _torchvision(name: str) -> Model:
    models = zoo.torchvision().models
    options: dict[str, Any] = {"weights": None}
    takes = inspect.signature(models.get_model_builder(name)).parameters
    if "weights_backbone" in takes:
        options["weights_backbone"] = None
    if "googlenet" in name or "inception" in name:
        options |= {"init_weights": True, "transform_input": False}
    detects = hasattr(models.detection, name)
    side = _SIDES.get(name.split("_")[0], 128 if detects else 64)
    if name.startswith("vit"):
        options["image_size"] = side
    module = models.get_model(name, **options)
    if name.startswith("raft"):
        flow = FlatOutputs(module, lambda model, *pair: model(*pair, num_flow_updates=2))
        return Model(flow, lambda: (torch.rand(1, 3, 128, 128) * 2 - 1, torch.rand(1, 3, 128, 128) * 2 - 1))
    if hasattr(models.video, name):
        frames = 14 if name == "s3d" else 16 if name.startswith("mvit") else 8
        return Model(module, lambda: (torch.randn(1, 3, frames, side, side),))
    shapes = [(1, 3, side, side), *((2, *shape) for shape in _pooled(module))]
    return Model(
        FlatOutputs(module, _detect) if detects else module, lambda: tuple(torch.randn(shape) for shape in shapes)
    )


_SIDES = {"inception": 96, "quantized": 96, "maxvit": 224, "s3d": 224, "mvit": 224, "ssd300": 300}
"""Height and width of the input images, by the first word of the model's name. Default: 64, 128 for detectors."""


def _detect(model: Any, image: Tensor, *pooled: Tensor) -> Any:
    """A detector without anchors and non-maximum suppression. The heads of regions take their features as inputs."""
    features = model.backbone(image)
    features = list(features.values()) if isinstance(features, dict) else [features]
    if not hasattr(model, "rpn"):
        return model.head(features)
    heads = [
        getattr(model.roi_heads, f"{part}_predictor")(getattr(model.roi_heads, f"{part}_head")(value))
        for part, value in zip(_regions(model), pooled, strict=True)
    ]
    return model.rpn.head(features), heads


def _regions(model: Any) -> list[str]:
    """Names of the region heads of a detector: box, mask, keypoint."""
    found = getattr(model, "roi_heads", None)
    return [part for part in ("box", "mask", "keypoint") if getattr(found, f"{part}_head", None) is not None]


def _pooled(model: Any) -> list[tuple[int, ...]]:
    """Shapes (C, H, W) of a region's features for each of ``_regions``."""
    pools = [getattr(model.roi_heads, f"{part}_roi_pool") for part in _regions(model)]
    return [(model.backbone.out_channels, *pool.output_size) for pool in pools]


# --- transformers

_SMALL: dict[str, Any] = {
    "vocab_size": 1000,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "intermediate_size": 128,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
}
_VISION: dict[str, Any] = {**_SMALL, "image_size": 64, "patch_size": 8}
_STAGES: dict[str, Any] = {"depths": [1, 1, 1, 1], "image_size": 64}
_AUDIO: dict[str, Any] = {
    **_SMALL,
    "conv_dim": (32, 32, 32),
    "conv_stride": (5, 4, 4),
    "conv_kernel": (10, 8, 8),
    "num_feat_extract_layers": 3,
    "num_conv_pos_embeddings": 16,
    "num_conv_pos_embedding_groups": 4,
}
_SERIES: dict[str, Any] = {
    "prediction_length": 8,
    "context_length": 16,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 64,
    "decoder_ffn_dim": 64,
    "lags_sequence": [1, 2, 3],
    "num_time_features": 2,
    "scaling": None,
}
_GROUPED: dict[str, Any] = {**_SMALL, "num_key_value_heads": 2, "head_dim": 16}
_T5: dict[str, Any] = {"vocab_size": 1000, "d_model": 64, "num_layers": 2, "num_heads": 4, "d_kv": 16, "d_ff": 128}


def _tokens() -> tuple[Tensor, ...]:
    return (torch.randint(3, 1000, (1, 32), dtype=torch.int32),)


def _image() -> tuple[Tensor, ...]:
    return (torch.randn(1, 3, 64, 64),)


def _audio() -> tuple[Tensor, ...]:
    return (torch.randn(1, 3200),)


def _call_with(argument: str, part: str = "") -> Callable[..., Any]:
    """Build a function that calls a model, or its ``part``, with one argument and returns the first output."""

    def call(model: Any, value: Tensor) -> Any:
        model = getattr(model, part) if part else model
        keywords = {"use_cache": False} if argument == "input_ids" and hasattr(model.config, "use_cache") else {}
        return model(**{argument: value}, return_dict=False, **keywords)[0]

    return call


_TEXT, _PIXELS = (_call_with("input_ids"), _tokens), (_call_with("pixel_values"), _image)
_SOUND = (_call_with("input_values"), _audio)


def _series() -> tuple[Tensor, ...]:
    return torch.randn(1, 19), torch.randn(1, 19, 2), torch.ones(1, 19), torch.randn(1, 8), torch.randn(1, 8, 2)


def _forecast(model: Any, *inputs: Tensor) -> Any:
    names = ("past_values", "past_time_features", "past_observed_mask", "future_values", "future_time_features")
    return model(**dict(zip(names, inputs, strict=True)), use_cache=False, return_dict=False)[0]


_TRANSFORMERS: dict[str, tuple[str, dict[str, Any], tuple[Callable[..., Any], Callable[[], tuple[Tensor, ...]]]]] = {
    "bert": ("Bert", _SMALL, _TEXT),
    "distilbert": ("DistilBert", {**_SMALL, "hidden_dim": 128}, _TEXT),
    "roberta": ("Roberta", _SMALL, _TEXT),
    "xlm-roberta": ("XLMRoberta", _SMALL, _TEXT),
    "albert": ("Albert", {**_SMALL, "embedding_size": 32}, _TEXT),
    "electra": ("Electra", {**_SMALL, "embedding_size": 32}, _TEXT),
    "deberta": ("Deberta", {**_SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, _TEXT),
    "deberta-v2": ("DebertaV2", {**_SMALL, "relative_attention": True, "pos_att_type": ["c2p", "p2c"]}, _TEXT),
    "mpnet": ("MPNet", _SMALL, _TEXT),
    "mobilebert": ("MobileBert", {**_SMALL, "embedding_size": 32, "intra_bottleneck_size": 32}, _TEXT),
    "squeezebert": ("SqueezeBert", {**_SMALL, "embedding_size": 64}, _TEXT),
    "convbert": ("ConvBert", {**_SMALL, "embedding_size": 64}, _TEXT),
    "fnet": ("FNet", _SMALL, _TEXT),
    "modernbert": ("ModernBert", _SMALL, _TEXT),
    "t5-encoder": ("T5", _T5, (_call_with("input_ids", "encoder"), _tokens)),
    "gpt2": ("GPT2", {**_SMALL, "n_positions": 64}, _TEXT),
    "opt": ("OPT", {**_SMALL, "ffn_dim": 128, "word_embed_proj_dim": 64}, _TEXT),
    "gpt-neo": ("GPTNeo", {**_SMALL, "attention_types": [[["global", "local"], 1]]}, _TEXT),
    "gpt-neox": ("GPTNeoX", _SMALL, _TEXT),
    "gptj": ("GPTJ", {**_SMALL, "n_positions": 64, "rotary_dim": 8}, _TEXT),
    "bloom": ("Bloom", _SMALL, _TEXT),
    "llama": ("Llama", _GROUPED, _TEXT),
    "mistral": ("Mistral", {**_GROUPED, "sliding_window": 16}, _TEXT),
    "qwen2": ("Qwen2", _GROUPED, _TEXT),
    "qwen3": ("Qwen3", _GROUPED, _TEXT),
    "phi": ("Phi", _SMALL, _TEXT),
    "gemma": ("Gemma", _GROUPED, _TEXT),
    "gemma2": ("Gemma2", {**_GROUPED, "sliding_window": 16}, _TEXT),
    "stablelm": ("StableLm", {**_GROUPED}, _TEXT),
    "mamba": ("Mamba", {**_SMALL, "state_size": 8}, _TEXT),
    "whisper-encoder": (
        "Whisper",
        {"d_model": 64, "encoder_layers": 2, "decoder_layers": 1, "encoder_attention_heads": 4, "encoder_ffn_dim": 128}
        | {"max_source_positions": 64, "num_mel_bins": 40, "decoder_attention_heads": 4, "decoder_ffn_dim": 128},
        (_call_with("input_features", "encoder"), lambda: (torch.randn(1, 40, 128),)),
    ),
    "wav2vec2": ("Wav2Vec2", _AUDIO, _SOUND),
    "hubert": ("Hubert", _AUDIO, _SOUND),
    "audio-spectrogram-transformer": (
        "AST",
        {**_SMALL, "num_mel_bins": 32, "max_length": 64},
        (_call_with("input_values"), lambda: (torch.randn(1, 64, 32),)),
    ),
    "vit": ("ViT", _VISION, _PIXELS),
    "deit": ("DeiT", _VISION, _PIXELS),
    "beit": ("Beit", {**_VISION, "use_relative_position_bias": True}, _PIXELS),
    "dinov2": ("Dinov2", _VISION, _PIXELS),
    "clip-vision": ("CLIPVision", _VISION, _PIXELS),
    "siglip-vision": ("SiglipVision", _VISION, _PIXELS),
    "swin": ("Swin", {**_STAGES, "embed_dim": 32, "window_size": 2, "num_heads": [2, 2, 4, 4]}, _PIXELS),
    "swinv2": ("Swinv2", {**_STAGES, "embed_dim": 32, "window_size": 2, "num_heads": [2, 2, 4, 4]}, _PIXELS),
    "mobilevit": ("MobileViT", {"image_size": 64}, _PIXELS),
    "mobilevitv2": ("MobileViTV2", {"image_size": 64}, _PIXELS),
    "segformer": ("Segformer", {"depths": [1, 1, 1, 1]}, _PIXELS),
    "poolformer": ("PoolFormer", {"depths": [1, 1, 1, 1]}, _PIXELS),
    "convnext": ("ConvNext", {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 64, 96, 128]}, _PIXELS),
    "convnextv2": ("ConvNextV2", {"depths": [1, 1, 1, 1], "hidden_sizes": [32, 64, 96, 128]}, _PIXELS),
    "regnet": ("RegNet", {"hidden_sizes": [32, 64, 96, 128], "depths": [1, 1, 2, 1], "groups_width": 16}, _PIXELS),
    "resnet": ("ResNet", {"hidden_sizes": [64, 64, 96, 128], "depths": [1, 1, 1, 1]}, _PIXELS),
    "efficientnet": ("EfficientNet", {"image_size": 64, "hidden_dim": 1280, "width_coefficient": 1.0}, _PIXELS),
    "mobilenet-v1": ("MobileNetV1", {"image_size": 64}, _PIXELS),
    "levit": ("Levit", {"image_size": 64, "depths": [1, 1, 1]}, _PIXELS),
    "cvt": ("Cvt", {"depth": [1, 2, 3]}, _PIXELS),
    "pvt": ("Pvt", {"depths": [1, 1, 1, 1], "image_size": 64}, _PIXELS),
    "patchtst": (
        "PatchTST",
        {"num_input_channels": 2, "context_length": 64, "patch_length": 8, "patch_stride": 8, "d_model": 32}
        | {"num_hidden_layers": 2, "num_attention_heads": 4, "ffn_dim": 64},
        (_call_with("past_values"), lambda: (torch.randn(1, 64, 2),)),
    ),
    "patchtsmixer": (
        "PatchTSMixer",
        {"num_input_channels": 2, "context_length": 64, "patch_length": 8, "patch_stride": 8, "d_model": 32},
        (_call_with("past_values"), lambda: (torch.randn(1, 64, 2),)),
    ),
    "informer": ("Informer", {**_SERIES, "distil": False}, (_forecast, _series)),
    "autoformer": ("Autoformer", {**_SERIES, "d_model": 64, "scaling": True, "label_length": 8}, (_forecast, _series)),
    "time-series-transformer": ("TimeSeriesTransformer", _SERIES, (_forecast, _series)),
}

TRANSFORMERS = list(_TRANSFORMERS)
"""Architectures with two layers, or with one layer per stage."""


def _transformers(name: str) -> Model:
    zoo.torchvision()  # transformers imports it where it is installed
    library = importlib.import_module("transformers")
    prefix, options, (call, draw) = _TRANSFORMERS[name]
    config = getattr(library, f"{prefix}Config")(**options)
    return Model(FlatOutputs(getattr(library, f"{prefix}Model")(config), call), draw)


# --- timm

TIMM = (
    "beit_base_patch16_224 lambda_resnet26t cait_xxs24_224 coat_tiny convit_tiny convmixer_768_32 crossvit_tiny_240 "
    "cspresnet50 davit_tiny deit_tiny_patch16_224 dla34 dpn48b edgenext_xx_small efficientformer_l1 "
    "efficientformerv2_s0 efficientvit_b0 efficientvit_m0 eva02_tiny_patch14_224 fasternet_t0 fastvit_t8 "
    "focalnet_tiny_srf gcvit_xxtiny ghostnet_050 hgnetv2_b0 hrnet_w18_small inception_next_tiny inception_resnet_v2 "
    "inception_v4 levit_128s mambaout_femto coatnet_pico_rw_224 poolformer_s12 mixer_s32_224 mobilenetv3_small_050 "
    "mobilenetv4_conv_small mobilevit_xxs mobilevitv2_050 mvitv2_tiny nest_tiny nextvit_small nfnet_f0 dm_nfnet_f0 "
    "pit_ti_224 pvt_v2_b0 rdnet_tiny regnety_002 repghostnet_050 repvgg_a0 repvit_m0_9 res2net50_26w_4s resnest14d "
    "resnet10t resnetv2_50 rexnet_100 selecsls42 seresnet50 sequencer2d_s shvit_s1 skresnet18 starnet_s1 "
    "swiftformer_xs swin_tiny_patch4_window7_224 swinv2_cr_tiny_ns_224 tiny_vit_5m_224 tnt_s_patch16_224 tresnet_m "
    "twins_pcpvt_small visformer_tiny vit_tiny_patch16_224 volo_d1_224 ese_vovnet19b_dw xception41 "
    "xcit_nano_12_p16_224 "
)
"""One small model of each family."""


def _timm(name: str) -> Model:
    zoo.torchvision()
    timm = importlib.import_module("timm")
    module = timm.create_model(name, pretrained=False, num_classes=100)
    fixed = module.default_cfg.get("fixed_input_size", False)
    size = module.default_cfg["input_size"] if fixed else (3, 96, 96)
    return Model(FlatOutputs(module, lambda model, image: model(image)), lambda: (torch.randn(1, *size),))


def names() -> list[str]:
    """The names of all models.

    timm is no dependency of this project: its models are listed where it can be imported.
    """
    more = TIMM.split() if importlib.util.find_spec("timm") else []
    return [
        f"{library}/{name}"
        for library, found in (("torchvision", torchvision_names()), ("transformers", TRANSFORMERS), ("timm", more))
        for name in found
    ]
