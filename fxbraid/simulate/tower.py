"""What the analytic model needs to know of a vision tower, from ``vision_config`` of a Hugging Face ``config.json``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from fxbraid.schedule import ScheduleError


@dataclass(frozen=True, slots=True)
class TowerConfig:
    """Equal blocks, in which the patches of an image attend to each other without a causal mask, and a merger that
    makes tokens of patches.

    patch: values of a patch. merge: patches that make a token. between: the merger's products, (in, out) for every
    token. tokens: of an image, where the merger pools them to a fixed number. patches: of an image, 0 where images have
    any size. extra: tokens beside the patches (CLIP's class). window: patches that attend to each other, in all blocks
    but those in ``full``; 0: all of an image. deep: blocks behind which a merger of its own feeds the decoder.
    """

    hidden: int
    layers: int
    heads: int
    ffn: int
    patch: int
    between: tuple[tuple[int, int], ...]
    merge: int = 1
    gated: bool = False
    tokens: int = 0
    patches: int = 0
    extra: int = 0
    window: int = 0
    full: tuple[int, ...] = ()
    deep: tuple[int, ...] = ()

    @property
    def block_parameters(self) -> int:
        """Of one block, with biases and two norms."""
        h, up = self.hidden, (2 if self.gated else 1) * self.ffn
        return 4 * h * h + 4 * h + up * h + up + self.ffn * h + h + 4 * h

    @property
    def merger_parameters(self) -> int:
        """Of one merger's products."""
        return sum(a * b + b for a, b in self.between)

    @property
    def parameters(self) -> int:
        """All of them, but for positions and the last norm."""
        embedding = self.patch * self.hidden
        return embedding + self.layers * self.block_parameters + (1 + len(self.deep)) * self.merger_parameters

    def features(self, patches: int) -> int:
        """Tokens of an image."""
        return self.tokens or patches // self.merge

    def sequence(self, patches: int) -> int:
        """What a block works on, for an image."""
        return patches + self.extra

    def context(self, block: int, patches: int) -> int:
        """What a patch attends to in a block."""
        whole = self.sequence(patches)
        return whole if not self.window or block in self.full else min(self.window, whole)

    def embedding_flops(self, patches: int) -> float:
        """Of an image's patches, forward."""
        return 2.0 * patches * self.patch * self.hidden

    def block_flops(self, block: int, patches: int) -> float:
        """Of an image in a block, forward."""
        h, up = self.hidden, (3 if self.gated else 2) * self.ffn
        rows = float(self.sequence(patches))
        return 2 * rows * (4 * h * h + up * h) + 4 * rows * self.context(block, patches) * h

    def merger_flops(self, patches: int) -> float:
        """Of an image in one merger, forward."""
        return 2.0 * self.features(patches) * sum(a * b for a, b in self.between)

    def forward_flops(self, patches: int) -> float:
        """Of an image in the tower."""
        blocks = sum(self.block_flops(k, patches) for k in range(self.layers))
        return self.embedding_flops(patches) + blocks + (1 + len(self.deep)) * self.merger_flops(patches)

    def sized(self, patches: int, name: str) -> int:
        """``patches`` of an image, or where it is 0 those that the tower is made for. Raises ScheduleError for a number
        that can't be."""
        if not patches and not self.patches:
            raise ScheduleError(
                f"images of {name} have any size; give the patches of one, for example 1024 for 448 x 448 pixels in "
                "patches of 14 x 14"
            )
        found = patches or self.patches
        if found < 1 or (not self.tokens and found % self.merge):
            raise ScheduleError(
                f"{found} patches do not make tokens of {self.merge} patches each; take "
                f"{max(self.merge, found // self.merge * self.merge)}"
            )
        return found

    @classmethod
    def from_dict(cls, config: Mapping[str, Any], hidden: int, name: str = "model") -> TowerConfig | None:
        """From the dict of a whole configuration; None where no tower in it is known. ``hidden``: of the decoder."""
        vision = config.get("vision_config")
        if not isinstance(vision, Mapping):
            return None
        kind = str(config.get("model_type", ""))
        make = {
            "qwen2_vl": _qwen,
            "qwen2_5_vl": _qwen,
            "qwen3_vl": _qwen,
            "llava": _llava,
            "gemma3": _gemma3,
        }.get(kind)
        if make is None:
            return None
        try:
            return make(kind, config, vision, hidden)
        except KeyError as missing:
            raise ScheduleError(f"vision_config of {name} ({kind}) has no {missing}") from None


def _qwen(kind: str, config: Mapping[str, Any], vision: Mapping[str, Any], hidden: int) -> TowerConfig:
    wide = int(vision["embed_dim"] if kind == "qwen2_vl" else vision["hidden_size"])
    side, merge = int(vision["patch_size"]), int(vision.get("spatial_merge_size", 2)) ** 2
    channels = int(vision.get("in_channels") or vision.get("in_chans") or 3)
    ffn = wide * int(vision.get("mlp_ratio", 4)) if kind == "qwen2_vl" else int(vision["intermediate_size"])
    out = int(vision.get("out_hidden_size", hidden)) if kind != "qwen2_vl" else hidden
    window = (int(vision["window_size"]) // side) ** 2 if kind == "qwen2_5_vl" else 0
    return TowerConfig(
        wide,
        int(vision["depth"]),
        int(vision["num_heads"]),
        ffn,
        channels * int(vision.get("temporal_patch_size", 2)) * side * side,
        ((merge * wide, merge * wide), (merge * wide, out)),
        merge,
        gated=kind == "qwen2_5_vl",
        window=window,
        full=tuple(vision.get("fullatt_block_indexes", ())) if window else (),
        deep=tuple(vision.get("deepstack_visual_indexes", ())) if kind == "qwen3_vl" else (),
    )


def _llava(kind: str, config: Mapping[str, Any], vision: Mapping[str, Any], hidden: int) -> TowerConfig:
    made, wide = _square(vision), int(vision["hidden_size"])
    layer = config.get("vision_feature_layer", -2)
    # Blocks behind the one whose output is taken compute nothing that is read.
    blocks = made.layers + layer + 1 if isinstance(layer, int) and layer < 0 else made.layers
    return replace(made, layers=blocks, between=((wide, hidden), (hidden, hidden)), extra=1)


def _gemma3(kind: str, config: Mapping[str, Any], vision: Mapping[str, Any], hidden: int) -> TowerConfig:
    pooled = int(config.get("mm_tokens_per_image", 256))
    return replace(_square(vision), between=((int(vision["hidden_size"]), hidden),), tokens=pooled)


def _square(vision: Mapping[str, Any]) -> TowerConfig:
    """CLIP's and SigLIP's towers: images of one size."""
    side = int(vision["patch_size"])
    return TowerConfig(
        int(vision["hidden_size"]),
        int(vision["num_hidden_layers"]),
        int(vision["num_attention_heads"]),
        int(vision["intermediate_size"]),
        int(vision.get("num_channels", 3)) * side * side,
        (),
        patches=(int(vision["image_size"]) // side) ** 2,
    )
