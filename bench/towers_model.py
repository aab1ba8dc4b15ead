"""A model of two towers: a vision encoder of uneven blocks, merged into a decoder. For the proofs, and for tests."""

from __future__ import annotations

from types import SimpleNamespace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

VOCAB, IMAGE = 96, 5
PATCHES, PATCH, PER_TOKEN = 8, 12, 4

STYLES = {
    **dict.fromkeys(("q", "k", "v", "up", "gate"), "colwise"),
    **dict.fromkeys(("out", "down"), "rowwise"),
}


def plan(model: nn.Module) -> dict[str, str]:
    """A tensor-parallel plan of both towers, by hand."""
    names = (name for name, module in model.named_modules() if isinstance(module, nn.Linear))
    return {name: STYLES[last] for name in names if (last := name.rpartition(".")[2]) in STYLES}


class Attention(nn.Module):
    """Multi-head attention of ``x`` on ``y``."""

    def __init__(self, width: int, heads: int, of: int | None = None) -> None:
        super().__init__()
        self.head = width // heads
        self.q, self.out = nn.Linear(width, width), nn.Linear(width, width)
        self.k, self.v = nn.Linear(of or width, width), nn.Linear(of or width, width)

    def forward(self, x: Tensor, y: Tensor, *, causal: bool = False, bias: Tensor | None = None) -> Tensor:
        q, k, v = (
            t.unflatten(-1, (-1, self.head)).transpose(1, 2) for t in (self.q(x), self.k(y), self.v(y))
        )
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=bias, is_causal=causal)
        return self.out(out.transpose(1, 2).flatten(2))  # type: ignore[no-any-return]


class Mlp(nn.Module):
    def __init__(self, width: int, inner: int, *, gated: bool) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width)
        self.gate = nn.Linear(width, inner) if gated else None

    def forward(self, x: Tensor) -> Tensor:
        up = self.up(x)
        up = F.gelu(up) if self.gate is None else F.silu(self.gate(x)) * up
        return self.down(up)  # type: ignore[no-any-return]


class VisionBlock(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.attn, self.mlp = Attention(width, heads), Mlp(width, 2 * width, gated=False)

    def forward(self, x: Tensor) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attn(normed, normed)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class DecoderLayer(nn.Module):
    """Causal attention and a gated MLP, and with ``cross`` attention on an encoder's output of that width."""

    def __init__(self, width: int, heads: int, cross: int | None = None) -> None:
        super().__init__()
        self.norm1, self.norm2 = nn.RMSNorm(width), nn.RMSNorm(width)
        self.attn, self.mlp = Attention(width, heads), Mlp(width, 2 * width, gated=True)
        if cross is not None:
            self.norm3, self.cross = nn.RMSNorm(width), Attention(width, heads, cross)

    def forward(self, x: Tensor, encoded: Tensor | None = None, bias: Tensor | None = None) -> Tensor:
        normed = self.norm1(x)
        x = x + self.attn(normed, normed, causal=bias is None, bias=bias)
        if encoded is not None:
            x = x + self.cross(self.norm3(x), encoded)
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class Vision(nn.Module):
    """Patches [b, n, PATCH] -> features [b, n / PER_TOKEN, out], and those of the blocks in ``deep``."""

    def __init__(self, blocks: int, width: int, heads: int, out: int, deep: tuple[int, ...]) -> None:
        super().__init__()
        self.patch = nn.Linear(PATCH, width)
        self.blocks = nn.ModuleList(VisionBlock(width, heads) for _ in range(blocks))
        self.deep = deep
        self.merger = nn.ModuleDict(
            {
                "norm": nn.LayerNorm(width),
                "first": nn.Linear(PER_TOKEN * width, out),
                "last": nn.Linear(out, out),
            }
        )
        self.deep_norm = nn.LayerNorm(width)

    def forward(self, pixel_values: Tensor) -> tuple[Tensor, list[Tensor]]:
        x, found = self.patch(pixel_values), []
        for i, block in enumerate(self.blocks):
            x = block(x)
            if i in self.deep:
                found.append(self.merged(self.deep_norm(x)))
        return self.merged(self.merger["norm"](x)), found

    def merged(self, x: Tensor) -> Tensor:
        x = x.unflatten(1, (-1, PER_TOKEN)).flatten(2)
        return self.merger["last"](F.gelu(self.merger["first"](x)))  # type: ignore[no-any-return]


def _scattered(x: Tensor, mask: Tensor, features: Tensor) -> Tensor:
    return x.masked_scatter(mask[..., None].expand_as(x), features)


class Model(nn.Module):
    """With a loss over ``logits``; every parameter away from its trivial value, float64."""

    norm: nn.Module
    head: nn.Module

    def finish(self) -> None:
        self.config = SimpleNamespace(tie_word_embeddings=False)
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.2)
        self.double()

    def result(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss, "logits": logits}


class TwoTowers(Model):
    """Image tokens (id ``IMAGE``) take the vision tower's features; ``deep``: features of vision block k are added
    behind decoder layer k (as in Qwen3-VL). No ``blocks``: the decoder alone, on the same inputs."""

    def __init__(
        self,
        blocks: int = 4,
        layers: int = 4,
        *,
        vision: int = 16,
        width: int = 32,
        deep: tuple[int, ...] = (),
        tied: bool = False,
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCAB, width)
        self.visual = Vision(blocks, vision, 4, width, deep) if blocks else None
        self.layers = nn.ModuleList(DecoderLayer(width, 4) for _ in range(layers))
        self.norm, self.head = nn.RMSNorm(width), nn.Linear(width, VOCAB, bias=False)
        if tied:
            self.head.weight = self.embed.weight
        self.finish()

    def forward(self, input_ids: Tensor, pixel_values: Tensor, labels: Tensor) -> dict[str, Tensor]:
        x = self.embed(input_ids)
        mask = input_ids == IMAGE
        features, deep = (None, []) if self.visual is None else self.visual(pixel_values)
        x = x if features is None else _scattered(x, mask, features)
        for i, layer in enumerate(self.layers):
            x = layer(x)
            if i < len(deep):
                x = x + _scattered(torch.zeros_like(x), mask, deep[i])
        return self.result(x, labels)


def towers_batch(
    rows: int, seq: int = 8, *, patches: int = PATCHES, seed: int = 0, dtype: torch.dtype = torch.float64
) -> dict[str, Tensor]:
    """Random inputs of :class:`TwoTowers`, ragged labels; each row has its image tokens elsewhere."""
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(IMAGE + 1, VOCAB, (rows, seq), generator=generator)
    labels = ids.clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    labels[0, : seq - 2] = -100
    for row in range(rows):
        at = torch.randperm(seq - 1, generator=generator)[: patches // PER_TOKEN]
        ids[row, at] = IMAGE
        labels[row, at] = -100
    pixels = torch.randn(rows, patches, PATCH, generator=generator, dtype=dtype)
    return {"input_ids": ids, "labels": labels, "pixel_values": pixels}
