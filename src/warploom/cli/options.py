"""Options that several commands share, and what their texts mean."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from warploom.kernels.ladder import Ladder, Rung

Config = TypeVar("Config")

RungList = Annotated[
    list[str] | None,
    typer.Option("--rung", metavar="RUNG,…", help="Only these rungs: numbers, names, or commas between; default all."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FLAG=VALUE", help="Override a flag of every rung; may be given several times."),
]
HeadDim = Annotated[int, typer.Option(help="Elements per head.")]
DTypeName = Annotated[str, typer.Option(help="Element type: bf16 or f16.")]
Accumulate = Annotated[
    str | None, typer.Option(metavar="f16|f32", help="Accumulate in this type; default each rung's own.")
]
On = Annotated[str, typer.Option(metavar="cpu|gpu|auto", help="gpu: also time on the GPU; auto: if there is one.")]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the rows as JSON; - for standard output.")
]


def on_gpu(choice: str) -> bool:
    """Whether to time on a GPU.

    Raises typer.BadParameter for another word, UnsupportedDeviceError for ``gpu`` where there is none.
    """
    from warploom.core.errors import UnsupportedDeviceError

    if choice not in ("cpu", "gpu", "auto"):
        raise typer.BadParameter(f"--on is cpu, gpu or auto, not {choice!r}")
    if choice == "cpu":
        return False
    from warploom.bench.peers import torch_module
    from warploom.cuda.device import has_gpu, require_driver

    if choice == "auto" and not has_gpu():
        return False
    require_driver()
    try:
        torch_module()
    except UnsupportedDeviceError:
        if choice == "gpu":
            raise
        return False
    return True


def parse_settings(texts: list[str] | None) -> dict[str, str]:
    """``["stages=2"]`` as a mapping. Raises typer.BadParameter for text without ``=``."""
    found: dict[str, str] = {}
    for text in texts or ():
        name, equals, value = text.partition("=")
        if not equals or not name.strip() or not value.strip():
            raise typer.BadParameter(f"--set takes FLAG=VALUE, for example --set stages=2, not {text!r}")
        found[name.strip()] = value.strip()
    return found


def chosen_rungs(ladder: Ladder[Config], names: list[str] | None) -> list[Rung[Config]]:
    """The rungs named (each text may name several with commas between), in the ladder's order; all without names.

    Raises ConfigError that lists the rungs for a name that is none.
    """
    if not names:
        return list(ladder.rungs)
    keys = [key.strip() for text in names for key in text.split(",")]
    wanted = {ladder.rung(key).key for key in keys}
    return [rung for rung in ladder.rungs if rung.key in wanted]
