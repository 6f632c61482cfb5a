"""Commands of other packages: found by entry points, imported when they are asked for, listed in one order."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

import warploom
from warploom.cli.commands import ORDER

SOURCES = str(Path(warploom.__file__).resolve().parents[1])
GREETING = '''
import typer

app = typer.Typer(help="Say it otherwise.")

def greet(name: str = "you") -> None:
    """Say hello."""
    typer.echo(f"hello, {name}")

@app.command("loudly")
def loudly() -> None:
    """Say it aloud."""
    typer.echo("HELLO")
'''


@pytest.fixture
def added(tmp_path):
    """Run ``warploom`` as it is where only another package is installed, which adds two commands."""
    folder = tmp_path / "greeting-1.0.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text("Metadata-Version: 2.3\nName: greeting\nVersion: 1.0\n")
    (folder / "entry_points.txt").write_text("[warploom.commands]\ngreet = greeting:greet\nshout = greeting:app\n")
    (tmp_path / "greeting.py").write_text(GREETING)
    (tmp_path / "warploom-0.dist-info").mkdir()
    (tmp_path / "warploom-0.dist-info" / "METADATA").write_text("Metadata-Version: 2.3\nName: warploom\nVersion: 0\n")

    def run(*arguments: str) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), SOURCES]), "COLUMNS": "80"}
        command = [sys.executable, "-m", "warploom", *arguments]
        return subprocess.run(command, env=environment, capture_output=True, text=True, check=False)

    return run


def test_an_installed_package_adds_a_function_or_a_group(added):
    assert added("greet", "--name", "warps").stdout == "hello, warps\n"
    assert added("shout", "loudly").stdout == "HELLO\n"
    assert "Say it aloud." in added("shout", "-h").stdout
    listed = added("--help").stdout
    assert listed.index("check") < listed.index("greet ") < listed.index("shout ")


def test_what_is_no_command_is_refused_and_what_is_not_installed_says_so(added):
    unknown, lab = added("gret"), added("ladder", "attention")
    assert unknown.returncode == lab.returncode == 2
    assert "No such command" in unknown.stderr
    assert "pip install" in lab.stderr
    assert "Traceback" not in lab.stderr + unknown.stderr


def test_help_lists_every_command_in_one_order(invoke):
    lines = invoke("--help").stdout.splitlines()
    names = [
        line.split()[0] for line in lines[lines.index("Commands:") + 1 :] if line.startswith("  ") and line.strip()
    ]
    own = [name for name in names if name in ORDER]
    assert own == list(ORDER)
    assert names[: len(own)] == own


def test_a_command_of_this_package_looks_for_no_other(invoke, monkeypatch):
    def searched(**_):
        pytest.fail("entry points were searched")

    monkeypatch.setattr("importlib.metadata.entry_points", searched)
    assert invoke("layout", "mma.m16n8k16.C.b32").exit_code == 0
