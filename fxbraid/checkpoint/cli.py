"""``fxbraid checkpoint``: what a folder of checkpoints holds, whether it is whole, and as plain Hugging Face files."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console
from rich.table import Table

from fxbraid.checkpoint.folder import Saved, complete, find, open_saved, order, problems
from fxbraid.passes.errors import BraidError
from fxbraid.terminal import refuse

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Look at checkpoints, check them, and turn them into Hugging Face folders.",
)

Folder = Annotated[Path, typer.Argument(help="A Checkpointer's folder, or one checkpoint in it.")]
Step = Annotated[int | None, typer.Option(help="Of this step (default: the one that would be loaded).")]


@app.command()
def show(folder: Folder, step: Step = None) -> None:
    """Say which checkpoints there are, and what one of them holds: layout, parameters, optimizer, files."""
    console = _console()
    try:
        saved = _saved(folder, step)
        if saved.path != folder:
            console.print(_list(folder, saved))
        console.print(_facts(saved))
        console.print(_parameters(saved))
    except BraidError as error:
        refuse(error)


@app.command()
def verify(
    folder: Folder,
    step: Step = None,
    every: Annotated[bool, typer.Option("--all", help="All steps.")] = False,
) -> None:
    """Compare every file with the size and the hash that it was written with. Exits with 1 where one differs."""
    console = _console()
    try:
        paths = [folder / name for name in complete(folder)] if every else [_saved(folder, step).path]
        if not paths:
            raise BraidError(f"{folder} has no checkpoint")
    except BraidError as error:
        refuse(error)
    good = True
    for path in paths:
        try:
            saved = open_saved(path)
            found = problems(saved)
        except BraidError as error:
            found = [str(error)]
        good = good and not found
        for problem in found:
            console.print(f"[red]no[/]  {path.name}: ", end="")
            console.print(problem, markup=False, highlight=False, soft_wrap=True)
        if not found:
            size = sum(one["size"] for one in saved.files.values())
            console.print(
                f"[green]ok[/]  {path.name}: {len(saved.files)} files, {_size(size)}", highlight=False
            )
    if not good:
        raise typer.Exit(1)


@app.command()
def convert(
    folder: Folder,
    out: Annotated[Path, typer.Argument(help="The Hugging Face folder to write.")],
    step: Step = None,
    dtype: Annotated[str, typer.Option(help="float32, bfloat16 or float16; default: as it was saved.")] = "",
    max_shard_size: Annotated[str, typer.Option(help="Of a file of weights.")] = "5GB",
) -> None:
    """Write the model as plain Hugging Face safetensors. One process is enough."""
    import torch

    from fxbraid.checkpoint.export import convert as write

    try:
        saved = _saved(folder, step)
        kind = getattr(torch, dtype, None) if dtype else None
        if dtype and not (isinstance(kind, torch.dtype) and kind.is_floating_point):
            raise BraidError(f"--dtype {dtype} is no floating-point type; give float32, bfloat16 or float16")
        write(saved, out, max_shard_size=max_shard_size, dtype=kind)
    except (BraidError, OSError) as error:
        refuse(error)
    _console().print(f"step {saved.step} of {folder} -> {out}", markup=False, highlight=False, soft_wrap=True)


def _console() -> Console:
    console = Console(emoji=False)
    if not console.is_terminal:
        console.width = 150
    return console


def _saved(folder: Path, step: int | None) -> Saved:
    path = find(folder, step)
    if path is None:
        raise BraidError(f"{folder} has no checkpoint")
    return open_saved(path)


def _list(folder: Path, chosen: Saved) -> Table:
    table = Table(title=str(folder), title_justify="left")
    for name, right in (
        ("step", True),
        ("size", True),
        ("ranks", True),
        ("tp x pp", True),
        ("written", False),
    ):
        table.add_column(name, justify="right" if right else "left")
    for name in complete(folder):
        mark = "  <- latest" if name == chosen.path.name else ""
        try:
            saved = open_saved(folder / name)
        except BraidError:
            table.add_row(str(order(name)[0]), "damaged", "", "", mark)
            continue
        layout, size = saved.manifest["layout"], sum(one["size"] for one in saved.files.values())
        table.add_row(
            str(saved.step),
            _size(size),
            str(layout["ranks"]),
            f"{layout['tp']} x {layout['pp']}",
            saved.manifest["written"] + mark,
        )
    return table


def _facts(saved: Saved) -> Table:
    layout, state = saved.manifest["layout"], saved.state()
    table = Table(title=saved.path.name, title_justify="left", show_header=False)
    rows: dict[str, Any] = {
        "layout": f"tp {layout['tp']} x pp {layout['pp']}, {layout['schedule']}, m = {layout['n_microbatches']}, "
        f"layers by chunk {layout['layers']}",
        "written by": ", ".join(f"{name} {version}" for name, version in saved.manifest["versions"].items()),
        "files": f"{len(saved.files)}, {_size(sum(one['size'] for one in saved.files.values()))}",
    }
    if optimizer := state.get("optimizer"):
        keys = Counter(name.split("/")[1] for name in saved.tensors if "/" in name)
        tensors = ", ".join(f"{key} of {count}" for key, count in keys.items()) or "no tensors yet"
        rows["optimizer"] = f"{optimizer['kind']}: {len(optimizer['groups'])} groups, {tensors}"
    if scheduler := state.get("scheduler"):
        rows["scheduler"] = scheduler["kind"]
    rows["data position"] = "saved" if state.get("data") else "none"
    for name, value in rows.items():
        table.add_row(name, str(value))
    return table


def _parameters(saved: Saved) -> Table:
    table = Table(title="parameters and buffers", title_justify="left")
    for name, right in (("name", False), ("shape", False), ("type", False), ("size", True), ("boxes", True)):
        table.add_column(name, justify="right" if right else "left", overflow="fold")
    total = count = 0
    for name, said in saved.tensors.items():
        if "/" in name:
            continue
        sizes = _bytes_of(said)
        total, count = total + sizes, count + math.prod(said["shape"])
        shape = " x ".join(map(str, said["shape"])) or "1"
        table.add_row(name, shape, said["dtype"], _size(sizes), str(len(said["chunks"])))
    table.add_section()
    table.add_row(f"all: {count:,} elements", "", "", _size(total), "")
    return table


def _bytes_of(said: Any) -> int:
    digits = "".join(c for c in said["dtype"].split("_")[0] if c.isdigit())
    return math.prod(said["shape"]) * (int(digits) // 8 if digits else 1)


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000:
            return f"{count:.0f} {unit}" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.1f} TB"
