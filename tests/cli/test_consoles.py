"""The ways to start the command line, and consoles that cannot show every character."""

import io
import json
import subprocess
import sys

import pytest
from tests.project import ROOT

from warploom.cli.main import main
from warploom.cli.output import accept_any_text

COMMANDS = [
    "--help",
    "doctor",
    "layout mma.m16n8k16.C.b32",
    "discover movmatrix --on emulator --figures",
    "ladder attention --rung 2 --seq 64 --on cpu",
    f"check {ROOT / 'examples' / 'rowmax.py'}",
    "ladder attention --rung none-of-them",
]


UNSET = """
import numpy as np
from warploom.lang import Global, Kernel, Launch, f32, kernel

@kernel(threads=32)
def unset(k: Kernel, y: Global[f32]) -> None:
    y.store(k.shared(f32, 32).load(0, k.thread), k.thread)

@unset.example
def launch(rng):
    return Launch(1, [np.zeros(32, np.float32)])
"""


@pytest.mark.usefixtures("no_compiler")
@pytest.mark.parametrize("command", COMMANDS)
def test_no_command_needs_more_than_ascii(monkeypatch, command):
    streams = [io.TextIOWrapper(io.BytesIO(), encoding="ascii") for _ in range(2)]
    monkeypatch.setattr(sys, "stdout", streams[0])
    monkeypatch.setattr(sys, "stderr", streams[1])
    monkeypatch.setattr(sys, "argv", ["warploom", *command.split()])
    with pytest.raises(SystemExit) as ended:
        main()
    for stream in streams:
        stream.flush()
    assert ended.value.code == (2 if "none-of-them" in command else 0)


@pytest.mark.parametrize(("encoding", "shown"), [("ascii", "1.5x -> 2 us ?"), ("cp1252", "1.5× -> 2 µs ?")])
def test_a_poor_console_shows_something_like_it(encoding, shown):
    buffer = io.BytesIO()
    stream = io.TextIOWrapper(buffer, encoding=encoding)
    accept_any_text(stream, io.StringIO())
    print("1.5× → 2 µs 字", file=stream, end="", flush=True)
    assert buffer.getvalue().decode(encoding) == shown


@pytest.mark.parametrize("start", [["-m", "warploom"], ["-c", "from warploom.cli.main import main; main()"]])
def test_the_package_is_a_command(start):
    done = subprocess.run([sys.executable, *start, "--version"], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout.split()[0]) == (0, "warploom"), done.stderr


def test_importing_what_starts_it_starts_nothing():
    start = [sys.executable, "-c", "import warploom.__main__"]
    done = subprocess.run(start, capture_output=True, text=True, check=False)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")


@pytest.mark.parametrize("command", ["layout", "show attention", "doctor --json", "--help", "show --help"])
def test_a_reader_that_has_seen_enough_is_no_error(command):
    """As ``| head`` is; here it has gone before anything is written."""
    start = [sys.executable, "-m", "warploom", *command.split()]
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        process.stdout.close()
        assert process.stderr is not None
        said = process.stderr.read()
    assert (process.returncode, said) == (0, "")


@pytest.mark.parametrize("options", [[], ["--json"]])
def test_a_check_says_the_same_without_its_reader(tmp_path, options):
    """``warploom check … | head`` under pipefail: the exit code and the reports are those of the whole run."""
    kernel = tmp_path / "unset.py"
    kernel.write_text(UNSET)
    report = tmp_path / "found.sarif"
    start = [sys.executable, "-m", "warploom", "check", str(kernel), "--sarif", str(report), *options]
    with subprocess.Popen(start, stdout=subprocess.PIPE, stderr=subprocess.STDOUT) as process:
        assert process.stdout is not None
        process.stdout.close()
    assert process.returncode == 1
    assert json.loads(report.read_text())["runs"][0]["results"]
