"""Weights that a plan cuts in one piece while the model reads them in several: cut in sections, or refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from fxbraid.passes.errors import PlanError

from .parity import make_batches
from .test_zoo import PLAN, Blocks, assert_exact


class Wider(Blocks):
    """With one more linear, which takes half of ``up``'s features."""

    def parts(self) -> dict[str, nn.Module]:
        return {**super().parts(), "out": nn.Linear(12, 16)}


class TestFeaturesTakenApart:
    """A weight that the plan cuts in one piece while the model reads it in several."""

    def run(self, block: Any, **plan: str) -> Any:
        batch = make_batches(2, 2, mask=False, steps=1)[0]
        plan = {f"layers.*.{name}": style for name, style in plan.items()} or PLAN
        return assert_exact(Wider(block), batch, tp_plan=plan)

    def test_equal_parts_become_sections(self) -> None:
        def block(m: Any, x: Tensor, la: Any) -> Tensor:
            a, b = la["up"](x).chunk(2, -1)
            c, d = la["gate"](x).unflatten(-1, (2, -1)).unbind(-2)
            return la["out"](a.sin() * b + c * d.cos())

        lowered = self.run(block, up="colwise", gate="packed_colwise", out="rowwise")
        assert [s.size for s in lowered.plan.params["layers.0.up.weight"].sections] == [12, 12]

    def test_parts_side_by_side_in_front_of_one_weight_are_refused(self) -> None:
        def block(m: Any, x: Tensor, la: Any) -> Tensor:
            h, g = la["up"](x), la["gate"](x)
            half = h.shape[-1] // 2
            return la["down"](torch.cat([h[..., half:].sin(), g[..., :half]], -1))

        with pytest.raises(
            PlanError, match=r"layers\.0\.down\.weight into 12 on each .* as 6 \+ 6 side by side"
        ):
            self.run(block)

    def test_heads_told_apart_by_number_are_refused(self) -> None:
        def block(m: Any, x: Tensor, la: Any) -> Tensor:
            first, second = la["up"](x).unflatten(-1, (-1, 6)).transpose(1, 2).chunk(2, 1)
            return la["down"](torch.cat([second, first.sin()], 1).transpose(1, 2).flatten(2))

        with pytest.raises(
            PlanError, match=r"layers\.0\.up\.weight into 2 on each rank, but .* apart into 1 \+ 1"
        ):
            self.run(block)

    def test_features_counted_in_the_whole_are_refused(self) -> None:
        def block(m: Any, x: Tensor, la: Any) -> Tensor:
            h = la["up"](x)
            return la["down"](torch.cat([h[..., :16].sin(), h[..., 16:]], -1))

        with pytest.raises(
            PlanError,
            match=r"layers\.0\.up\.weight into 12 on each rank, but .* apart into (0 \+ 16|16 \+ 0)",
        ):
            self.run(block)
