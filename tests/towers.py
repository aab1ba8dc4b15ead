"""Models of two towers, and with long skips: a vision encoder merged into a decoder, an encoder-decoder, a U-Net."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from fxbraid.bench.towers_model import VOCAB, DecoderLayer, Model, TwoTowers, VisionBlock, plan, towers_batch


class EncoderDecoder(Model):
    """Every decoder layer reads the encoder's output, and a bias that a table of its own makes once."""

    def __init__(self, encoders: int = 2, layers: int = 4, *, encoder: int = 16, width: int = 32) -> None:
        super().__init__()
        self.shared = nn.Embedding(VOCAB, width)
        self.enter = nn.Linear(width, encoder)
        self.encoder = nn.ModuleList(VisionBlock(encoder, 4) for _ in range(encoders))
        self.last = nn.LayerNorm(encoder)
        self.decoder = nn.ModuleList(DecoderLayer(width, 4, encoder) for _ in range(layers))
        self.bias = nn.Embedding(8, 1)
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.finish()

    def forward(self, input_ids: Tensor, decoder_input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        encoded = self.enter(self.shared(input_ids))
        for block in self.encoder:
            encoded = block(encoded)
        encoded = self.last(encoded)
        x = self.shared(decoder_input_ids)
        # What is far from what, from the inputs: an activation, made once and read by every layer.
        apart = (decoder_input_ids[:, :, None] - decoder_input_ids[:, None, :]) % 8
        bias = self.bias(apart).permute(0, 3, 1, 2)
        bias = bias.masked_fill(torch.ones(x.shape[1], x.shape[1], dtype=torch.bool).triu(1), -1e30)
        for layer in self.decoder:
            x = layer(x, encoded, bias)
        return self.result(x, labels)


class UNet(Model):
    """Halves that mirror each other: what down block k makes, the k-th last up block reads, transposed on its way."""

    def __init__(self, depth: int = 3, *, width: int = 16) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.down = nn.ModuleList(VisionBlock(width, 4) for _ in range(depth))
        self.middle = VisionBlock(width, 4)
        self.up = nn.ModuleList(DecoderLayer(width, 4, width) for _ in range(depth))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCAB, bias=False)
        self.finish()

    def forward(self, input_ids: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        kept = []
        for block in self.down:
            x = block(x)
            kept.append(x.transpose(1, 2))
        x = self.middle(x)
        for block in self.up:
            x = block(x, kept.pop().transpose(1, 2))
        return self.result(x, labels)


def batch(model: str, rows: int, seq: int = 8, *, seed: int = 0) -> dict[str, Tensor]:
    """Random inputs of ``model`` (a key of :data:`MODELS`), ragged labels."""
    result = towers_batch(rows, seq, seed=seed)
    if model.startswith("towers"):
        return result
    del result["pixel_values"]
    if model == "encoder-decoder":
        generator = torch.Generator().manual_seed(seed + 1)
        result["decoder_input_ids"] = torch.randint(0, VOCAB, (rows, seq), generator=generator)
    return result


MODELS: dict[str, Any] = {
    "towers": TwoTowers,
    "towers-deep": lambda: TwoTowers(deep=(0, 1, 2)),
    "encoder-decoder": EncoderDecoder,
    "unet": UNet,
}


__all__ = ["MODELS", "EncoderDecoder", "UNet", "batch", "plan"]
