"""Batches of images: whose image is whose, micro-batches of equal layouts, and what is refused."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from fxbraid import images as fx_images
from fxbraid.images import Kind
from fxbraid.inputs import Inputs
from fxbraid.passes.errors import BraidError

IMAGE = Kind("image", "pixel_values", "image_grid_thw", 90, 4)
VIDEO = Kind("video", "pixel_values_videos", "video_grid_thw", 91, 4)
INPUTS = Inputs((IMAGE, VIDEO))


def batch(samples: list[list[tuple[int, int, int]]], token: int = 90, seq: int = 40) -> dict[str, Tensor]:
    """Each sample with images of these grids; every patch holds its own number."""
    ids = torch.zeros(len(samples), seq, dtype=torch.long)
    for row, grids in enumerate(samples):
        at = 0
        for t, h, w in grids:
            ids[row, at : at + t * h * w // 4] = token
            at += t * h * w // 4
    grids = [grid for sample in samples for grid in sample]
    rows = sum(t * h * w for t, h, w in grids)
    kind = IMAGE if token == 90 else VIDEO
    return {
        "input_ids": ids,
        "labels": ids.clone(),
        kind.pixels: torch.arange(1.0, rows + 1)[:, None].repeat(1, 3),
        kind.grid: torch.tensor(grids).reshape(-1, 3),
    }


def numbers(parts: list[Any]) -> list[list[int]]:
    return [part[:, 0].int().tolist() for part in parts]


SMALL, LARGE, CLIP = (1, 2, 2), (1, 2, 4), (2, 2, 2)


def test_patches_go_with_their_samples() -> None:
    parts = INPUTS.split(batch([[SMALL], [LARGE], [], [SMALL, LARGE]]), 2)
    assert numbers(parts["pixel_values"]) == [[*range(1, 13)], [*range(13, 25)]]
    assert [g.tolist() for g in parts["image_grid_thw"]] == [[list(SMALL), list(LARGE)]] * 2
    assert [len(ids) for ids in parts["input_ids"]] == [2, 2]


def test_one_image_a_sample_by_number_is_not_one_in_each_sample() -> None:
    parts = INPUTS.split(batch([[SMALL, SMALL], [], [SMALL], [SMALL]]), 2)
    assert numbers(parts["pixel_values"]) == [[*range(1, 9)], [*range(9, 17)]]
    plain = {"input_ids": torch.zeros(4, 8), "pixel_values": torch.arange(4.0)[:, None]}
    assert numbers(Inputs().split(plain, 2)["pixel_values"]) == [[0, 1], [2, 3]]


def test_videos_are_cut_beside_images() -> None:
    both = batch([[SMALL], [], [], [SMALL]])
    clips = batch([[], [CLIP], [CLIP], []], token=91)
    both["input_ids"] = torch.where(clips["input_ids"] == 91, clips["input_ids"], both["input_ids"])
    both |= {name: clips[name] for name in (VIDEO.pixels, VIDEO.grid)}
    both["second_per_grid_ts"] = torch.tensor([0.5, 1.0])
    parts = INPUTS.split(both, 2)
    assert numbers(parts["pixel_values_videos"]) == [[*range(1, 9)], [*range(9, 17)]]
    assert [part.tolist() for part in parts["second_per_grid_ts"]] == [[0.5], [1.0]]


def test_fewer_images_are_filled_up_with_zeros() -> None:
    parts, filled = INPUTS.cut(batch([[SMALL, LARGE], [], [SMALL], []]), 2)
    assert filled and numbers(parts["pixel_values"])[1] == [13, 14, 15, 16, *([0] * 8)]
    assert torch.equal(parts["image_grid_thw"][0], parts["image_grid_thw"][1])
    assert not INPUTS.cut(batch([[SMALL], [SMALL]]), 2)[1]


def test_other_layouts_are_refused_with_the_numbers() -> None:
    with pytest.raises(
        BraidError, match=r"micro-batch 0 has 1 images \(1 x 2 x 2; 4 patches\) and micro-batch 1 has 2 "
    ):
        INPUTS.split(batch([[SMALL], [LARGE, SMALL]]), 2)
    INPUTS.split(batch([[SMALL], [LARGE, SMALL]]), 1)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"pixel_values": torch.zeros(5, 3)}, "8 patches in all, and pixel_values has 5 rows"),
        ({"input_ids": torch.full((2, 40), 90)}, "hold 80 image tokens .* 2 images with 2 features"),
        ({"image_grid_thw": torch.tensor([[1, 2, 2]] * 2, device="meta")}, "is on the meta device"),
        ({"pixel_values": None}, "image_grid_thw and no pixel_values"),
    ],
)
def test_what_does_not_fit_together_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(BraidError, match=words):
        INPUTS.split({**batch([[SMALL], [SMALL]]), **change}, 2)


def test_images_over_two_samples_are_refused() -> None:
    torn = batch([[LARGE], []])
    torn["input_ids"][0, 1], torn["input_ids"][1, 0] = 0, 90
    with pytest.raises(BraidError, match="sample 0 has 1 image tokens"):
        INPUTS.split(torn, 1)


def test_square_images_are_counted_by_their_tokens() -> None:
    ids = torch.zeros(4, 8, dtype=torch.long)
    ids[0, :6], ids[3, :3] = 90, 90
    squares = {"input_ids": ids, "pixel_values": torch.arange(3.0)[:, None, None, None].expand(3, 3, 2, 2)}
    parts, filled = INPUTS.cut(squares, 2)
    assert filled and [part[:, 0, 0, 0].tolist() for part in parts["pixel_values"]] == [[0, 1], [2, 0]]
    ids[3, 0] = 0
    with pytest.raises(BraidError, match="3 images of one size"):
        INPUTS.split(squares, 2)


def test_meta_tokens_spread_images_evenly() -> None:
    whole = batch([[SMALL], [SMALL]])
    meta = {**{k: v.to("meta") for k, v in whole.items()}, "image_grid_thw": whole["image_grid_thw"]}
    assert [part.shape[0] for part in INPUTS.split(meta, 2)["pixel_values"]] == [4, 4]
    with pytest.raises(BraidError, match="do not lie evenly"):
        fx_images.find([IMAGE], {**meta, "input_ids": torch.zeros(4, 40, device="meta")})


def test_signatures_tell_layouts_apart_and_not_who_has_which_image() -> None:
    def key(samples: list[Any]) -> Any:
        return INPUTS.signature(batch(samples), 2, {"image_grid_thw"})

    assert key([[SMALL], [], [SMALL], []]) == key([[], [SMALL], [], [SMALL]])
    assert key([[SMALL], [], [SMALL], []]) == key([[], [], [SMALL], []])
    assert key([[LARGE], [LARGE]]) != key([[(1, 4, 2)], [(1, 4, 2)]])
