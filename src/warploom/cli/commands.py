"""The commands that ``warploom`` has: its own, and those that installed packages add as entry points."""

from __future__ import annotations

from functools import cached_property
from typing import TYPE_CHECKING, Any

import typer
from typer.core import TyperGroup

from warploom.cli.errors import ends_with_its_reader

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "warploom.commands"
"""The group of entry points: each is a Typer app or a function, by the command's name."""
SETTINGS: dict[str, Any] = {
    "add_completion": False,
    "pretty_exceptions_enable": False,
    "rich_markup_mode": None,
    "context_settings": {"help_option_names": ["-h", "--help"]},
}
"""Settings of every app, so that help and errors look the same wherever a command comes from."""
ORDER = (
    "ladder",
    "check",
    "new",
    "show",
    "bench",
    "tune",
    "pack",
    "doctor",
    "inspect",
    "plot",
    "profile",
    "layout",
    "discover",
)
"""The order of ``--help``; commands of other packages follow."""


class Commands(TyperGroup):
    """The commands of this package and of entry points; a module of an entry point is imported when it is asked for."""

    @cached_property
    def _added(self) -> dict[str, EntryPoint]:
        """Entry points by the names of their commands."""
        from importlib.metadata import entry_points  # imports forty modules, which this package's commands do without

        return {entry.name: entry for entry in entry_points(group=GROUP)}

    def list_commands(self, ctx: Any) -> list[str]:
        """The names of all commands."""
        names = dict.fromkeys((*super().list_commands(ctx), *self._added))
        return sorted(names, key=lambda name: ORDER.index(name) if name in ORDER else len(ORDER))

    def get_command(self, ctx: Any, cmd_name: str) -> Any:
        """The command of a name, None if there is none.

        Raises click.UsageError for a command that comes with warploom where the distribution is not installed.
        """
        own = super().get_command(ctx, cmd_name)
        if own is not None:
            return own
        if cmd_name in self._added:
            return _command(cmd_name, self._added[cmd_name].load())
        if cmd_name in ORDER:
            ctx.fail(
                f"warploom {cmd_name} is found by an entry point, which Python sees of an installed warploom alone: "
                "pip install warploom, or pip install -e . in a checkout"
            )
        return None

    def make_context(self, *args: Any, **kwargs: Any) -> Any:
        """Read the arguments; ``--help`` may print, and its reader leave."""
        with ends_with_its_reader():
            return super().make_context(*args, **kwargs)

    def invoke(self, ctx: Any) -> Any:
        """Run the command that the arguments name, whose reader may leave."""
        with ends_with_its_reader():
            return super().invoke(ctx)


def _command(name: str, loaded: Any) -> Any:
    """The command that a Typer app or a function stands for, with the settings of all."""
    app = typer.Typer(**SETTINGS)
    app.callback()(lambda: None)  # with a callback, an app with one command is a group too
    if isinstance(loaded, typer.Typer):
        app.add_typer(loaded, name=name)
    else:
        app.command(name)(loaded)
    group: Any = typer.main.get_command(app)
    return group.commands[name]
