"""Random programs between a column- and a row-parallel linear: refused, or exact."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from fxbraid.passes.errors import BraidError

from .test_cuts import SIZE, Attention, batch
from .test_zoo import PLAN, assert_exact

Step = Callable[[Tensor, Tensor], Tensor]


def program(seed: int) -> list[tuple[str, Step]]:
    """A few operators between two linears, of which many mix features and many do not. The second tensor is another
    column-parallel linear's result. Never along the batch, which micro-batches take apart."""
    pick = random.Random(seed)
    chosen: list[tuple[str, Step]] = []

    def dim() -> int:
        return pick.choice([-1, -1, -1, -2, -2, 1])

    def step() -> tuple[str, Step]:
        d, e, n = dim(), dim(), pick.choice([2, 3, 4, 6, 12])
        steps: list[tuple[str, Step]] = [
            (f"split_in({n})", lambda h, g: h.unflatten(-1, (n, -1))),
            (f"split_by({n})", lambda h, g: h.unflatten(-1, (-1, n))),
            (f"split_by({SIZE})", lambda h, g: h.unflatten(-1, (-1, SIZE))),
            ("flatten", lambda h, g: h.flatten(-2) if h.ndim > 3 else h),
            ("flatten(0)", lambda h, g: h.flatten(0, 1).unflatten(0, (h.shape[0], -1))),
            (f"transpose({d},{e})", lambda h, g: h.transpose(d, e)),
            ("tanh", lambda h, g: h.tanh()),
            (f"softmax({d})", lambda h, g: h.softmax(d)),
            (f"cumsum({d})", lambda h, g: h.cumsum(d) * 0.1),
            (f"flip({d})", lambda h, g: h.flip(d)),
            (f"roll({d})", lambda h, g: h.roll(1, d)),
            (f"sort({d})", lambda h, g: h.sort(d)[0]),
            (f"mean({d})", lambda h, g: h - h.mean(d, keepdim=True)),
            (f"sum({d})", lambda h, g: h + 0.1 * h.sum(d, keepdim=True)),
            (f"amax({d})", lambda h, g: h - h.amax(d, keepdim=True)),
            (f"norm({d})", lambda h, g: F.normalize(h, dim=d)),
            (f"scale({d})", lambda h, g: h * h.shape[d] ** -0.5),
            (f"places({d})", lambda h, g: h + torch.arange(h.shape[d]).view(-1, *[1] * (-d - 1)) if d < 0 else h),
            (f"swap_halves({d})", lambda h, g: torch.cat(h.chunk(2, d)[::-1], d)),
            (f"twice({d})", lambda h, g: torch.cat([h, h.sin()], d).chunk(2, d)[1]),
            (f"repeat({d})", lambda h, g: h.repeat_interleave(2, d).unfold(d, 2, 2).select(-1, 0)),
            (f"interleave({d})", lambda h, g: h.repeat_interleave(2, d).narrow(d, 0, h.shape[d])),
            (f"stack({d})", lambda h, g: torch.stack([h, h.cos()], d).sum(d)),
            ("attend", lambda h, g: F.scaled_dot_product_attention(h, h, h.tanh())),
            ("square", lambda h, g: (h @ h.mT) @ h * 0.1),
            ("linear attention", lambda h, g: h @ (h.mT @ h) * 0.1),
            ("other", lambda h, g: h * g if h.shape == g.shape else h),
            ("other's heads", lambda h, g: h * g.unflatten(-1, (-1, h.shape[-1])) if h.ndim == 4 else h),
            ("mask", lambda h, g: h.masked_fill(torch.ones(h.shape[-2:]).tril().expand_as(h) == 0, 0.5)),
            (f"every other({d})", lambda h, g: torch.stack([h[..., ::2], h[..., 1::2]], -1).flatten(-2)),
            (f"pairs({d})", lambda h, g: torch.stack([h[..., 1::2], h[..., ::2]], -1).flatten(-2)),
            ("zeros", lambda h, g: h + h.new_zeros(h.shape[1:]) + torch.ones(h.shape[-1])),
            (f"select({d})", lambda h, g: h + h.select(d, 0).unsqueeze(d)),
            ("gates", lambda h, g: F.glu(torch.cat([h, g], -1)) if h.shape == g.shape else h),
        ]  # fmt: skip
        return pick.choice(steps)

    for _ in range(pick.randint(1, 6)):
        chosen.append(step())
    return chosen


class Random(Attention):
    """A program between ``up`` and ``down``."""

    def __init__(self, steps: list[tuple[str, Step]]) -> None:
        def block(m: Any, x: Tensor, la: Any) -> Tensor:
            h, g = la["up"](x), la["gate"](x).tanh()
            for _, step in steps:
                h = step(h, g)
            return la["down"](h.reshape(*x.shape[:2], -1))  # type: ignore[no-any-return]

        super().__init__(block)


def judged(seed: int, tp: int = 2) -> str:
    """``exact``, ``refused``, or ``no model`` for a program that does not run unsplit; an exception if it is wrong."""
    model = Random(steps := program(seed))
    try:
        model(**batch())["loss"].backward()
    except (RuntimeError, IndexError):
        return "no model"
    model.zero_grad()
    try:
        assert_exact(model, batch(), tp=tp, n_chunks=1, tp_plan=PLAN)
    except BraidError:
        return "refused"
    except Exception as error:
        raise AssertionError(
            f"program {seed} is wrong at tp {tp}: {', '.join(n for n, _ in steps)}"
        ) from error
    return "exact"


def test_random_programs_are_refused_or_exact() -> None:
    found = [judged(seed) for seed in range(12)]
    assert found.count("exact") >= 2 and found.count("refused") >= 4, found


@pytest.mark.slow
@pytest.mark.parametrize("tp", [2, 4])
def test_many_random_programs_are_refused_or_exact(tp: int) -> None:
    found = [judged(seed, tp) for seed in range(1000, 1600)]
    assert found.count("exact") >= 60, found
