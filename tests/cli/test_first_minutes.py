"""Help, version and doctor."""

import json
import subprocess
import sys

import pytest

import warploom
from warploom.cuda.device import has_gpu


def test_version(invoke):
    assert invoke("--version").stdout == f"warploom {warploom.__version__}\n"


@pytest.mark.parametrize("command", [["ladder", "attention"], ["check"], ["doctor"], ["show", "attention"], ["bench"]])
def test_every_help_teaches_with_an_example(invoke, command):
    result = invoke(*command, "--help")
    assert result.exit_code == 0
    assert "Example" in result.stdout
    assert f"\n    warploom {' '.join(command)}" in result.stdout, "the example stands on a line of its own"


@pytest.mark.parametrize("group", [[], *([name] for name in ("ladder", "new", "tune", "profile"))])
def test_no_help_of_a_command_is_cut_at_80_columns(invoke, monkeypatch, group):
    monkeypatch.setenv("COLUMNS", "80")
    lines = invoke(*group, "--help").stdout.splitlines()
    commands = lines[lines.index("Commands:") + 1 :]
    assert commands
    assert [line for line in commands if line.endswith("...")] == []


def test_help_loads_nothing_heavy():
    code = (
        "import sys; from typer.testing import CliRunner; from warploom.cli.main import app; "
        "r = CliRunner().invoke(app, ['--help']); assert r.exit_code == 0; "
        "print([m for m in ('numpy', 'torch', 'cuda', 'rich') if m in sys.modules])"
    )
    output = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert output.strip() == "[]"


def test_no_arguments_show_the_commands(invoke):
    result = invoke()
    assert all(name in result.output for name in ("ladder", "check", "show", "bench", "doctor"))


def test_doctor_as_json(invoke):
    report = json.loads(invoke("doctor", "--json").stdout)
    assert report["works"]["write kernels and run them on the emulator with all checks"] is True
    assert report["works"]["run kernels on a GPU"] is has_gpu()
    assert report["packages"]["numpy"]


def test_doctor_says_what_is_missing_and_what_works_without(invoke, monkeypatch, tmp_path):
    from warploom.cuda import device

    bare = device.DeviceReport(
        driver=None,
        gpus=(),
        nvrtc=None,
        nvdisasm=None,
        cuda_core=None,
        cache_folder=tmp_path,
        cache_writable=False,
        cache_bytes=0,
        packages={"numpy": "2.0", "torch": None},
        problems=("no compiler: pip install it",),
    )
    monkeypatch.setattr(device, "probe", lambda: bare)
    result = invoke("doctor")
    assert result.exit_code == 0
    assert "no compiler: pip install it" in result.stdout
    assert "yes  write kernels" in result.stdout
    assert " no  compile kernels" in result.stdout
    assert "not writable" in result.stdout
