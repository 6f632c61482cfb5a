"""Options that several commands share, and what their texts mean."""

from __future__ import annotations

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Any, get_type_hints

import typer
from typer.core import TyperGroup

if TYPE_CHECKING:
    pass


On = Annotated[str, typer.Option(metavar="cpu|gpu|auto", help="gpu: also time on the GPU; auto: if there is one.")]
JsonFile = Annotated[
    str | None, typer.Option("--json", metavar="FILE", help="Write the rows as JSON; - for standard output.")
]


def is_kernel_file(what: str) -> bool:
    """Whether an argument names a Python file of kernels, or one kernel of such a file."""
    return what.endswith(".py") or ".py:" in what


class TakesFiles(TyperGroup):
    """Commands of which the first argument may be FILE.py[:KERNEL] instead of a name: that is the command ``file``."""

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """The command that ``args`` begin with, and the rest of them."""
        return super().resolve_command(ctx, ["file", *args] if args and is_kernel_file(args[0]) else args)


KernelFile = Annotated[
    str, typer.Argument(metavar="FILE.py[:KERNEL]", help="A file with a kernel of yours; of several, its name.")
]
KernelSettings = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="NAME=VALUE", help="Set a trace-time parameter; may be given several times."),
]


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Decorator of a command: a parameter whose type is a dataclass stands for one option per field.

    So commands share options, and take them as one value. Names of fields must not repeat.
    """
    hints, groups, parameters = get_type_hints(command, include_extras=True), {}, []
    for parameter in inspect.signature(command).parameters.values():
        kind = hints[parameter.name]
        if dataclasses.is_dataclass(kind):
            groups[parameter.name] = kind
            parameters += _fields_as_parameters(kind)
        else:
            parameters.append(parameter.replace(annotation=kind, kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        for name, kind in groups.items():
            values[name] = kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)})
        command(**values)

    del run.__wrapped__  # its signature is not this one's
    run.__annotations__ = {parameter.name: parameter.annotation for parameter in parameters}
    vars(run)["__signature__"] = inspect.Signature(parameters)
    return run


def _fields_as_parameters(group: Any) -> list[inspect.Parameter]:
    hints = get_type_hints(group, include_extras=True)
    return [
        inspect.Parameter(
            field.name,
            inspect.Parameter.KEYWORD_ONLY,
            default=inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default,
            annotation=hints[field.name],
        )
        for field in dataclasses.fields(group)
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
    from warploom.cuda.device import has_gpu, require_driver
    from warploom.measure.pytorch import torch_module

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
            raise typer.BadParameter(f"a flag is given as FLAG=VALUE, for example stages=2, not as {text!r}")
        found[name.strip()] = value.strip()
    return found


def sequence_lengths(text: str, what: str = "sequence lengths") -> list[int]:
    """The numbers of ``4096,16384``. Raises typer.BadParameter for anything else."""
    try:
        sizes = [int(part) for part in text.split(",")]
    except ValueError:
        raise typer.BadParameter(f"{what} are numbers with commas between, not {text!r}") from None
    if min(sizes) < 1:
        raise typer.BadParameter(f"{what} are positive, not {text!r}")
    return sizes
