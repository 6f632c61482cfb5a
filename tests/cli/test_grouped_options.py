"""Commands that take groups of options as values."""

from dataclasses import dataclass
from typing import Annotated

import pytest
import typer
from typer.testing import CliRunner

from warploom.cli.options import grouped


@dataclass(frozen=True)
class Shape:
    """A group with a required argument and an option."""

    rows: Annotated[int, typer.Argument(min=1)]
    cols: Annotated[int, typer.Option(min=1, help="How wide.")] = 7


@pytest.fixture
def app():
    made = typer.Typer()

    @made.command()
    @grouped
    def show(shape: Shape, loud: bool = False) -> None:
        """Says it."""
        typer.echo(f"{shape} {loud}")

    return made


def test_fields_are_options_and_come_back_as_one_value(app):
    assert CliRunner().invoke(app, ["3"]).stdout == "Shape(rows=3, cols=7) False\n"
    assert CliRunner().invoke(app, ["3", "--cols", "4", "--loud"]).stdout == "Shape(rows=3, cols=4) True\n"


def test_help_and_ranges_are_those_of_the_fields(app):
    text = CliRunner().invoke(app, ["--help"]).stdout
    assert "How wide." in text
    assert "Says it." in text
    assert CliRunner().invoke(app, ["3", "--cols", "0"]).exit_code == 2
    assert CliRunner().invoke(app, []).exit_code == 2
