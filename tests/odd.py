"""One model that does everything that broke gradients in some public system: see :class:`Odd`."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

HIDDEN, HEADS, INNER, VOCAB = 32, 4, 48, 96
#: A plan as a user would write it: the fused projections are columns like any other.
PLAN = {
    "layers.*.qkv": "colwise",
    "layers.*.out": "rowwise",
    "layers.*.gate_up": "colwise",
    "layers.*.down": "rowwise",
    "layers.*.between": "colwise",
}


class OddLayer(nn.Module):
    """Attention on the three chunks of a fused projection, and an MLP that goes through ``down`` twice."""

    def __init__(self) -> None:
        super().__init__()
        self.qkv = nn.Linear(HIDDEN, 3 * HIDDEN)
        self.out = nn.Linear(HIDDEN, HIDDEN)
        self.gate_up = nn.Linear(HIDDEN, 2 * INNER, bias=False)
        self.down = nn.Linear(INNER, HIDDEN)
        self.between = nn.Linear(HIDDEN, INNER)

    def forward(self, x: Tensor, norm: nn.Module, mask: Tensor) -> Tensor:
        x = x + self.out(self.attention(norm(x), mask))
        gate, up = self.gate_up(norm(x)).split(self.gate_up.weight.shape[0] // 2, dim=-1)
        once = self.down(F.silu(gate) * up)
        return x + self.down(torch.tanh(self.between(once)))

    def attention(self, x: Tensor, mask: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (-1, HIDDEN // HEADS)).transpose(1, 2) for part in self.qkv(x).chunk(3, -1)
        )
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask).transpose(1, 2).flatten(2)


class Odd(nn.Module):
    """A language model with, all at once: chunk and split outputs of fused projections; one Linear used twice with
    another between; one norm for all layers; a weight made of weights and a penalty on weights (paths to the loss
    without activations); an unused parameter; a head tied to the embedding across all chunks; an attention mask that
    differs from micro-batch to micro-batch; a keyword that is no tensor.
    """

    def __init__(self, layers: int = 4) -> None:
        super().__init__()
        self.config = SimpleNamespace(tie_word_embeddings=True)
        self.embed = nn.Embedding(VOCAB, HIDDEN)
        self.layers = nn.ModuleList(OddLayer() for _ in range(layers))
        self.norm = nn.LayerNorm(HIDDEN)
        self.left = nn.Parameter(torch.empty(HIDDEN, 4))
        self.right = nn.Parameter(torch.empty(4, HIDDEN))
        self.unused = nn.Parameter(torch.empty(3))
        self.head = nn.Linear(HIDDEN, VOCAB, bias=False)
        self.head.weight = self.embed.weight
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) * 0.3)
        self.double()

    def forward(
        self, input_ids: Tensor, labels: Tensor, attention_mask: Tensor, mixing: str = "plain"
    ) -> dict[str, Any]:
        x = self.embed(input_ids)
        causal = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device=x.device).tril()
        # Every query sees itself: a padded row must not be all masked.
        mask = causal & (attention_mask[:, None, None, :].bool() | torch.eye(x.shape[1], dtype=torch.bool))
        mix = self.left.tanh() @ self.right
        for layer in self.layers:
            x = layer(x, self.norm, mask)
            x = x + x @ mix if mixing == "left" else x
        logits = self.head(self.norm(x))
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return {"loss": loss + 0.1 * (self.left.square().sum() + self.norm.weight.square().mean())}
