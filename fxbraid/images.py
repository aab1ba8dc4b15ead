"""Images and videos in a batch: which of them belong to which sample, and their micro-batches.

``transformers`` puts the images of all samples one behind the other: patches [patches, values] beside a grid
[images, 3] that says how many each has (Qwen2-VL), or pixels [images, channels, height, width] of one size (LLaVA,
Gemma 3). What belongs to a sample is told by its tokens alone: every image fills as many placeholders in ``input_ids``
as it has features. A micro-batch gets the images of its samples, wherever they lie.

All micro-batches run one program, traced for one layout of images. Where those of one micro-batch are the first of
another's, it gets images of zeros behind its own; whether the model leaves such features unread is for its graph to say
(pass ``surplus``). Anything else is refused with the numbers.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor, nn

from .passes.errors import BraidError

Grid = tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Kind:
    """Images or videos of one model. ``pixels``, ``grid``: names of the inputs; ``token``: the placeholder in
    ``input_ids``; ``merge``: patches that make one feature, where there is a grid."""

    name: str
    pixels: str
    grid: str
    token: int
    merge: int

    @property
    def others(self) -> tuple[str, ...]:
        """Parts of the names of further inputs with one row for each of them."""
        return ("video", "second_per_grid") if self.name == "video" else ("image", "pixel")


@dataclass(frozen=True, slots=True)
class Images:
    """The images of one kind in the samples of a batch: how many each sample has, and all grids, in order. Without a
    grid, an image is one row of the pixels."""

    kind: Kind
    per_sample: tuple[int, ...]
    grids: tuple[Grid, ...]

    @property
    def rows(self) -> tuple[int, ...]:
        """Rows of the pixels of each image."""
        return tuple(_patches(grid) for grid in self.grids)


def kinds_of(model: nn.Module) -> tuple[Kind, ...]:
    """What the config of a transformers model says of images and videos; () for a model without."""
    config: Any = getattr(model, "config", None)
    vision = getattr(config, "vision_config", None)
    if vision is None:
        return ()
    merge = int(getattr(vision, "spatial_merge_size", 1)) ** 2
    found = []
    for name, pixels in (("image", "pixel_values"), ("video", "pixel_values_videos")):
        token = getattr(config, f"{name}_token_id", None)
        token = getattr(config, f"{name}_token_index", None) if token is None else token
        if isinstance(token, int):
            found.append(Kind(name, pixels, f"{name}_grid_thw", token, merge))
    return tuple(found)


def find(kinds: Sequence[Kind], batch: Mapping[str, Any]) -> list[Images]:
    """The images of every kind in ``batch``, () where there are none or their samples can't be told.

    ``input_ids`` on the meta device tell nothing: images then lie evenly over the samples. Raises :class:`BraidError`
    where tokens and features differ, as the model would, before anything runs.
    """
    ids = batch.get("input_ids")
    if not isinstance(ids, Tensor) or ids.ndim != 2:
        return []
    found = []
    for kind in kinds:
        pixels = batch.get(kind.pixels)
        if not isinstance(pixels, Tensor):
            if ids.device.type != "meta" and kind.grid in batch:
                raise BraidError(f"the batch has {kind.grid} and no {kind.pixels}; give both, or neither")
            continue
        grids = _grids(kind, batch, pixels)
        if grids is not None and (one := _assigned(kind, grids, ids)) is not None:
            found.append(one)
    return found


def _grids(kind: Kind, batch: Mapping[str, Any], pixels: Tensor) -> tuple[Grid, ...] | None:
    grid = batch.get(kind.grid)
    if grid is None:
        # Pixels of one size; five dims are samples with images of their own.
        return ((1,),) * len(pixels) if pixels.ndim == 4 else None
    if not isinstance(grid, Tensor) or grid.ndim != 2:
        raise BraidError(f"{kind.grid} must be a tensor [{kind.name}s, 3]")
    if grid.device.type == "meta":
        raise BraidError(
            f"{kind.grid} is on the meta device, and the program depends on its values; give an example batch with "
            "real grids (the other inputs may stay on meta)"
        )
    grids = tuple(tuple(row) for row in grid.tolist())
    patches = sum(map(_patches, grids))
    if patches != len(pixels):
        raise BraidError(
            f"{kind.grid} has {len(grids)} {kind.name}s of {patches} patches in all, and {kind.pixels} has "
            f"{len(pixels)} rows"
        )
    return grids


def _assigned(kind: Kind, grids: tuple[Grid, ...], ids: Tensor) -> Images | None:
    samples = len(ids)
    if ids.device.type == "meta":
        if len(grids) % samples:
            raise BraidError(
                f"{len(grids)} {kind.name}s do not lie evenly over {samples} samples whose input_ids are on the meta "
                "device; give real input_ids in the example batch"
            )
        return Images(kind, (len(grids) // samples,) * samples, grids)
    tokens = (ids == kind.token).sum(1).tolist()
    if grids and len(grids[0]) == 1:
        each, rest = divmod(sum(tokens), len(grids))
        sizes = [each] * len(grids)
        if rest or not each:
            if len(grids) == samples:
                return None  # features are no tokens of their own here; one image a sample, cut as any input
            raise BraidError(_unequal(kind, sum(tokens), f"{len(grids)} images of one size"))
    else:
        sizes = [_patches(grid) // kind.merge for grid in grids]
        if sum(sizes) != sum(tokens):
            raise BraidError(
                _unequal(kind, sum(tokens), f"{len(grids)} {kind.name}s with {sum(sizes)} features")
            )
    per_sample, i = [], 0
    for sample, left in enumerate(tokens):
        first = i
        while left > 0 and i < len(sizes):
            left -= sizes[i]
            i += 1
        if left:
            raise BraidError(
                f"sample {sample} has {tokens[sample]} {kind.name} tokens ({kind.token}), which no number of the "
                f"{kind.name}s behind those of the samples before it fills: the next have "
                f"{', '.join(map(str, sizes[first : first + 4]))} features; {kind.name}s lie in the order of samples, "
                "and none over two of them"
            )
        per_sample.append(i - first)
    return Images(kind, tuple(per_sample), grids)


def _unequal(kind: Kind, tokens: int, have: str) -> str:
    return (
        f"input_ids hold {tokens} {kind.name} tokens ({kind.token}), and {kind.pixels} holds {have}; every feature "
        "needs a token of its own"
    )


def _patches(grid: Grid) -> int:
    product = 1
    for size in grid:
        product *= size
    return product


def cut(images: Images, batch: Mapping[str, Any], m: int) -> tuple[dict[str, list[Tensor]], bool]:
    """The inputs of one kind in ``m`` micro-batches of equal numbers of samples, and whether some were filled up with
    images of zeros. Raises :class:`BraidError` where micro-batches differ otherwise."""
    kind = images.kind
    rows = len(images.per_sample) // m
    ends = [0]
    for mb in range(m):
        ends.append(ends[-1] + sum(images.per_sample[mb * rows : (mb + 1) * rows]))
    mine = [images.grids[a:b] for a, b in pairwise(ends)]
    longest = max(mine, key=len)
    for mb, grids in enumerate(mine):
        if grids != longest[: len(grids)]:
            raise BraidError(_differ(kind, mb, grids, mine.index(longest), longest))
    starts = [0]
    for size in images.rows:
        starts.append(starts[-1] + size)
    total = sum(map(_patches, longest))
    parts: dict[str, list[Tensor]] = {}
    for name, value in batch.items():
        if not isinstance(value, Tensor) or not value.ndim:
            continue
        if name == kind.pixels:
            cuts = [value[starts[a] : starts[b]] for a, b in pairwise(ends)]
            parts[name] = [_filled(part, total) for part in cuts]
        elif name == kind.grid:
            parts[name] = [value.new_tensor(longest).reshape(len(longest), value.shape[1])] * m
        elif _one_each(name, value, images):
            cuts = [value[a:b] for a, b in pairwise(ends)]
            most = max(range(m), key=lambda mb: len(cuts[mb]))
            parts[name] = [torch.cat([part, cuts[most][len(part) :]]) for part in cuts]
    return parts, any(len(grids) < len(longest) for grids in mine)


def _one_each(name: str, value: Tensor, images: Images) -> bool:
    """Is it a further input with one row for each image?"""
    kind = images.kind
    video = any(part in name for part in ("video", "second_per_grid"))
    return (
        len(value) == len(images.grids)
        and (kind.name == "video") == video
        and any(part in name for part in kind.others)
    )


def _filled(part: Tensor, rows: int) -> Tensor:
    if len(part) == rows:
        return part
    return torch.cat([part, part.new_zeros((rows - len(part), *part.shape[1:]))])


def _differ(kind: Kind, one: int, a: Sequence[Grid], other: int, b: Sequence[Grid]) -> str:
    def said(grids: Sequence[Grid]) -> str:
        shown = ", ".join(" x ".join(map(str, grid)) for grid in grids[:6]) + (
            ", ..." if len(grids) > 6 else ""
        )
        return f"{len(grids)} {kind.name}s ({shown}; {sum(map(_patches, grids))} patches)"

    return (
        f"micro-batch {one} has {said(a)} and micro-batch {other} has {said(b)}: all micro-batches run one program, "
        f"which is traced for one layout of {kind.name}s. Put samples of the same layout at the same place of every "
        f"micro-batch (bucket the data by grid, or resize {kind.name}s to few sizes), or use n_microbatches=1"
    )
