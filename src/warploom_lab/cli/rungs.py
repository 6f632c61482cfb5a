"""Options of the commands that take rungs of a ladder."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, TypeVar

import typer

if TYPE_CHECKING:
    from warploom_lab.kernels.ladder import Ladder, Rung


Config = TypeVar("Config")
RungList = Annotated[
    list[str] | None,
    typer.Option("--rung", metavar="RUNG,…", help="Only these rungs: numbers, names, or commas between; default all."),
]
Settings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="FLAG=VALUE", help="Override a flag of every rung; may be given several times."),
]
HeadDim = Annotated[int, typer.Option(metavar="N", help="Elements per head.")]
DTypeName = Annotated[str, typer.Option(metavar="bf16|f16", help="Element type.")]
Accumulate = Annotated[
    str | None, typer.Option(metavar="f16|f32", help="Accumulate in this type; default each rung's own.")
]


def chosen_rungs(ladder: Ladder[Config], names: list[str] | None) -> list[Rung[Config]]:
    """The rungs named (each text may name several with commas between), in the ladder's order; all without names.

    Raises ConfigError that lists the rungs for a name that is none.
    """
    if not names:
        return list(ladder.rungs)
    keys = [key.strip() for text in names for key in text.split(",")]
    wanted = {ladder.rung(key).key for key in keys}
    return [rung for rung in ladder.rungs if rung.key in wanted]
