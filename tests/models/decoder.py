"""A decoder of language models with a static cache of keys and values in buffers, of two layers."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

WIDTH, HEADS, GROUPS, CACHE, TOKENS = 32, 4, 2, 48, 64


class Layer(nn.Module):
    """Attention with rotary positions and fewer heads of keys than of queries, then a gated block."""

    cached_keys: Tensor
    cached_values: Tensor
    frequencies: Tensor

    def __init__(self) -> None:
        super().__init__()
        size = WIDTH // HEADS
        self.first, self.second = nn.RMSNorm(WIDTH), nn.RMSNorm(WIDTH)
        self.query, self.key, self.value = (nn.Linear(WIDTH, n * size, bias=False) for n in (HEADS, GROUPS, GROUPS))
        self.out = nn.Linear(WIDTH, WIDTH, bias=False)
        self.gate, self.up = nn.Linear(WIDTH, 2 * WIDTH, bias=False), nn.Linear(WIDTH, 2 * WIDTH, bias=False)
        self.down = nn.Linear(2 * WIDTH, WIDTH, bias=False)
        self.register_buffer("cached_keys", torch.zeros(1, GROUPS, CACHE, size))
        self.register_buffer("cached_values", torch.zeros(1, GROUPS, CACHE, size))
        self.register_buffer("frequencies", 1000.0 ** -(torch.arange(size // 2) / (size // 2)))

    def forward(self, x: Tensor, positions: Tensor) -> Tensor:
        y = self.first(x)
        query, key, value = (self._heads(layer(y)) for layer in (self.query, self.key, self.value))
        self.cached_keys[:, :, positions] = self._turned(key, positions)
        self.cached_values[:, :, positions] = value
        mask = torch.arange(CACHE, dtype=torch.int32) <= positions[:, None]
        keys, values = (x.repeat_interleave(HEADS // GROUPS, 1) for x in (self.cached_keys, self.cached_values))
        y = F.scaled_dot_product_attention(self._turned(query, positions), keys, values, mask)
        x = x + self.out(y.transpose(1, 2).flatten(2))
        y = self.second(x)
        return torch.as_tensor(x + self.down(F.silu(self.gate(y)) * self.up(y)))

    @staticmethod
    def _heads(x: Tensor) -> Tensor:
        return x.unflatten(-1, (-1, WIDTH // HEADS)).transpose(1, 2)

    def _turned(self, x: Tensor, positions: Tensor) -> Tensor:
        angle = positions[:, None].float() * self.frequencies
        angle = torch.cat([angle, angle], -1)
        left, right = x.chunk(2, -1)
        return x * angle.cos() + torch.cat([-right, left], -1) * angle.sin()


class Decoder(nn.Module):
    """Takes tokens [1, n] and their positions [n], int32; returns scores of the token after the last one."""

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
    """The same decoder, for the tokens that are known."""

    def __init__(self, decoder: Decoder) -> None:
        super().__init__()
        self.decoder = decoder
        self.eval()

    def forward(self, tokens: Tensor, positions: Tensor) -> Tensor:
        return torch.as_tensor(self.decoder(tokens, positions))


def decoder() -> Decoder:
    """With a likeliest token that stands out, as in a trained one, by what came before."""
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
    """Some tokens and their positions."""
    tokens = torch.randint(0, TOKENS, (1, length), generator=torch.Generator().manual_seed(start), dtype=torch.int32)
    return tokens, torch.arange(start, start + length, dtype=torch.int32)
