"""A language model decoder of two layers, with a static key-value cache in buffers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, KV_HEADS, CACHE, TOKENS = 32, 4, 2, 48, 64


class Layer(nn.Module):
    """Grouped-query attention with rotary position embeddings, then a gated feed-forward block."""

    cached_keys: Tensor
    cached_values: Tensor
    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.attention_norm, self.feed_forward_norm = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, n * size, bias=False) for n in (HEADS, KV_HEADS, KV_HEADS))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.register_buffer("cached_keys", torch.zeros(1, KV_HEADS, CACHE, size))
        self.register_buffer("cached_values", torch.zeros(1, KV_HEADS, CACHE, size))
        self.register_buffer("frequencies", 1000.0 ** -(torch.arange(size // 2) / (size // 2)))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.attention_norm(x)
        query, key, value = (self._split_heads(layer(y)) for layer in (self.query, self.key, self.value))
        self.cached_keys[:, :, positions] = self._apply_rotary_embedding(key, positions)
        self.cached_values[:, :, positions] = value
        mask = torch.arange(CACHE, dtype=torch.int32) <= positions[:, None]
        keys, values = (x.repeat_interleave(HEADS // KV_HEADS, 1) for x in (self.cached_keys, self.cached_values))
        y = F.scaled_dot_product_attention(self._apply_rotary_embedding(query, positions), keys, values, mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.feed_forward_norm(x)
        return torch.as_tensor(x + self.down(F.silu(self.gate(y)) * self.up(y)))

    @staticmethod
    def _split_heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

    def _apply_rotary_embedding(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[:, None].float() * self.frequencies
        angle = torch.cat([angle, angle], -1)
        left, right = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-right, left], -1) * angle.sin()


class Decoder(nn.Module):
    """Takes int32 tokens [1, n] and positions [n]; returns the logits of the next token, [1, TOKENS]."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(TOKENS, WIDTH)
        self.layers = nn.ModuleList([Layer(), Layer()])
        self.norm, self.head = nn.RMSNorm(WIDTH), nn.Linear(WIDTH, TOKENS, bias=False)

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        x = self.embedding(tokens)
        for layer in self.layers:
            x = layer(x, positions)
        return torch.as_tensor(self.head(self.norm(x[:, -1])))


class Prefill(nn.Module):
    """The decoder as a second module, which processes the prompt."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.eval()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return torch.as_tensor(self.decoder(tokens, positions))


def decoder() -> Decoder:
    """Make a decoder whose most likely next token is clearly ahead and depends on the earlier tokens, as if trained."""
    torch.manual_seed(0)
    model = Decoder().eval()
    with torch.no_grad():
        for parameter in model.layers.parameters():
            if parameter.dim() > 1:
                parameter.mul_(1.5)
        model.head.weight.copy_(model.embedding.weight[torch.randperm(TOKENS)])
    return model


Sample = tuple[Tensor, Tensor]


def prompt(length: int, start: int = 0) -> Sample:
    """Make random tokens and their positions."""
    tokens = torch.randint(0, TOKENS, (1, length), generator=torch.Generator().manual_seed(start), dtype=torch.int32)
    return tokens, torch.arange(start, start + length, dtype=torch.int32)
