"""Check ``surplus``: does the model leave image features behind the last placeholder token unread?

A micro-batch with fewer images than the program was traced for gets images of zeros behind its own. That is exact where
all that the images become meets the text in ``masked_scatter`` alone, which takes as many features as the mask has
places and gives the rest no gradient::

    x = masked_scatter(embedding(ids), ids == image_token, features)        surplus features are not read
    x = index_put(x, [mask], x[mask] + features)                            needs as many as there are places

Images of different samples don't mix in a model that can be trained on batches at all, so those of zeros change nothing
for the others.
"""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import fx

aten = torch.ops.aten


def reads_surplus(graph: fx.Graph, pixels: Collection[str]) -> str:
    """Where the model reads all features of the images (inputs ``pixels``); "" where it does not."""
    seen: set[fx.Node] = set()
    text: set[fx.Node] = set()
    for node in graph.nodes:
        if node.op == "placeholder":
            (seen if node.name in pixels else text).add(node)
            continue
        if node.op == "output":
            continue
        images = [n for n in node.all_input_nodes if n in seen]
        words = [n for n in node.all_input_nodes if n in text]
        if not images:
            if words:
                text.add(node)
        elif node.target is aten.masked_scatter.default and images == [node.args[2]]:
            text.add(node)
        elif words:
            stack = list((node.meta.get("nn_module_stack") or {}).values())
            module = stack[-1][0] if stack else "the model"
            return f"module {module or 'the model'!r} calls {node.target} on features of images and on tokens"
        else:
            seen.add(node)
    return ""
