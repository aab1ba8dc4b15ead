"""Values that are no tensors, as JSON: what comes back is equal and of the same type, or it is refused.

JSON alone turns tuples into lists and keys into strings, and has no bytes; a scheduler's or a data loader's state has
all of them. So what JSON lacks is written as an object with one key, a tag: ``{"!tuple": [...]}``. Reading builds
data of these few types and nothing else, whatever the file says.
"""

from __future__ import annotations

import base64
from collections import Counter, OrderedDict
from collections.abc import Callable, Mapping
from typing import Any

from ..passes.errors import BraidError


def encode(value: Any, where: str) -> Any:
    """``value`` as JSON has it. ``where``: what the error calls it.

    Takes None, bool, int, float, str, bytes, list, tuple, dict (any keys of these types), Counter, and tensors and
    numpy arrays (meant for small ones). Raises BraidError for anything else, with its place and type.
    """
    if value is None or type(value) in (bool, int, float, str):
        return value
    if type(value) is list:
        return [encode(one, f"{where}[{i}]") for i, one in enumerate(value)]
    if type(value) is tuple:
        return {"!tuple": [encode(one, f"{where}[{i}]") for i, one in enumerate(value)]}
    if type(value) in (dict, OrderedDict):
        if all(type(key) is str and not key.startswith("!") for key in value):
            return {key: encode(one, f"{where}[{key!r}]") for key, one in value.items()}
        return {"!dict": _items(value, where)}
    if type(value) is Counter:
        return {"!counter": _items(value, where)}
    if type(value) in (bytes, bytearray):
        return {"!bytes": base64.b64encode(value).decode()}
    return _encode_array(value, where)


def decode(value: Any) -> Any:
    """What :func:`encode` was given. Raises BraidError for a tag that it does not write."""
    if isinstance(value, list):
        return [decode(one) for one in value]
    if not isinstance(value, dict):
        return value
    tag = next(iter(value)) if len(value) == 1 else ""
    if not tag.startswith("!"):
        return {key: decode(one) for key, one in value.items()}
    if tag not in _MAKE:
        raise BraidError(f"the checkpoint has a value of the unknown kind {tag}; a newer fxbraid wrote it")
    return _MAKE[tag](value[tag])


def _items(value: Mapping[Any, Any], where: str) -> list[Any]:
    return [
        [encode(key, f"a key of {where}"), encode(one, f"{where}[{key!r}]")] for key, one in value.items()
    ]


def _encode_array(value: Any, where: str) -> Any:
    import numpy as np
    import torch

    if isinstance(value, torch.Tensor) and value.layout is torch.strided:
        flat = value.detach().cpu().contiguous().reshape(-1).view(torch.uint8)
        data = base64.b64encode(flat.numpy().tobytes()).decode()
        return {"!tensor": [str(value.dtype).removeprefix("torch."), list(value.shape), data]}
    if isinstance(value, np.ndarray | np.generic) and value.dtype.kind in "biufc":
        kind = "!array" if isinstance(value, np.ndarray) else "!scalar"
        data = base64.b64encode(np.ascontiguousarray(value).tobytes()).decode()
        return {kind: [value.dtype.str, list(value.shape), data]}
    raise BraidError(
        f"{where} is a {type(value).__module__}.{type(value).__qualname__}, which a checkpoint can't hold: it takes "
        "numbers, strings, bytes, None, lists, tuples, dicts and small tensors; give a state_dict() of these"
    )


def _tensor(said: Any) -> Any:
    import torch

    name, shape, data = said
    dtype = getattr(torch, name, None)
    if not isinstance(dtype, torch.dtype):
        raise BraidError(f"the checkpoint has a tensor of the unknown type {name}")
    raw = bytearray(base64.b64decode(data))
    flat = torch.frombuffer(raw, dtype=torch.uint8) if raw else torch.empty(0, dtype=torch.uint8)
    return flat.view(dtype).reshape(shape).clone()


def _array(said: Any) -> Any:
    import numpy as np

    kind, shape, data = said
    return np.frombuffer(base64.b64decode(data), dtype=np.dtype(str(kind))).reshape(shape).copy()


_MAKE: dict[str, Callable[[Any], Any]] = {
    "!tuple": lambda said: tuple(decode(one) for one in said),
    "!dict": lambda said: {decode(key): decode(one) for key, one in said},
    "!counter": lambda said: Counter({decode(key): decode(one) for key, one in said}),
    "!bytes": base64.b64decode,
    "!tensor": _tensor,
    "!array": _array,
    "!scalar": lambda said: _array(said)[()],
}
