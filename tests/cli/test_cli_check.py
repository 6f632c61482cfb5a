"""``warploom check`` on users' files."""

import json
import textwrap

import pytest

DOUBLE = """
    import numpy as np
    from warploom.lang import Global, Kernel, Launch, f32, kernel

    @kernel(threads=64)
    def double(k: Kernel, source: Global[f32], out: Global[f32]) -> None:
        tile = k.shared(f32, (1, 64), name="tile")
        mine, other = tile.at(k.thread * 4), tile.at((k.thread ^ 32) * 4)
        k.store("shared", mine, f32, [source.load(k.thread)], "", "weak")
        BARRIER
        (value,) = k.load("shared", other, f32, 1, "", "weak")
        out.store(value * FACTOR, k.thread)

    @double.example
    def launch(rng: np.random.Generator) -> Launch:
        source = rng.standard_normal(64, np.float32)
        out = np.full(64, np.nan, np.float32)
        return Launch(1, (source, out), {"out": (np.roll(source, 32) * 2, 0.0)})
"""


@pytest.fixture
def kernel_file(tmp_path):
    def write(barrier="k.syncthreads()", factor="2.0", source=DOUBLE):
        file = tmp_path / "kernels.py"
        file.write_text(textwrap.dedent(source).replace("BARRIER", barrier).replace("FACTOR", factor))
        return file

    return write


def test_a_right_kernel(invoke, kernel_file):
    result = invoke("check", str(kernel_file()))
    assert result.exit_code == 0, result.output
    assert "double: no findings" in result.stdout
    assert "out is right" in result.stdout


def test_a_missing_barrier_is_a_race_with_both_lines_shown(invoke, kernel_file, monkeypatch):
    file = kernel_file(barrier="pass")
    result = invoke("check", f"{file}:double")
    assert result.exit_code == 1
    assert "race" in result.stdout
    for number, line in enumerate(file.read_text().splitlines(), 1):
        if "k.store" in line or "k.load" in line:
            assert f"> {number:4d} | {line}"[:60] in result.stdout
    monkeypatch.setattr("warploom.cli.output.PLAIN_WIDTH", 60)
    said = invoke("check", str(file)).stdout.partition("\n  /")[0]
    assert max(map(len, said.splitlines())) <= 60
    assert "st.shared.b32 of warp" in " ".join(said.split())
    result = invoke("check", str(file), "--json", "--seed", "3")
    assert result.exit_code == 1
    (kernel,) = json.loads(result.stdout)["kernels"]
    assert (kernel["kernel"], kernel["ok"]) == ("double", False)
    assert "race" in {f["kind"] for f in kernel["findings"]}
    assert kernel["findings"][0]["where"].startswith("kernels.py:")


@pytest.mark.parametrize(
    "store", ["out.store(value * 2.5", "with k.when(k.thread < 63):\n            out.store(value * 2.0"]
)
def test_a_wrong_or_unwritten_element_is_told(invoke, kernel_file, store):
    result = invoke("check", str(kernel_file(source=DOUBLE.replace("out.store(value * FACTOR", store))))
    assert result.exit_code == 1
    assert "out is WRONG" in result.stdout


@pytest.mark.parametrize(
    ("source", "suffix", "says"),
    [
        ("x = 1", "", "defines no kernel"),
        (DOUBLE, ":triple", "no kernel 'triple'; it has double"),
        (DOUBLE.split("@double.example")[0].rstrip(), "", "@double.example"),
        ("import a_package_that_is_nowhere", "", "a_package_that_is_nowhere"),
        ("def f(:", "", "kernels.py:1: "),
        ("import sys; sys.exit(3)", "", "cannot be imported: SystemExit: 3"),
        (DOUBLE.replace('{"out"', '{"result"'), "", "'result'"),
        (DOUBLE.replace("(np.roll(source, 32) * 2, 0.0)", "source"), "", "(array, tolerance)"),
        (DOUBLE.replace("out: Global[f32])", "out: Global[f32], *, size: int)"), "", "without defaults: size"),
        (DOUBLE.replace("return Launch(1, ", "return (0, "), "", "tuple, not a warploom.lang.Launch"),
        (DOUBLE.replace("return Launch(1, ", "return missing("), "", "kernels.py:18: "),
        (DOUBLE.replace("value * FACTOR", "1.0 if value else 2.0"), "", "select"),
        (DOUBLE, "x", "there is no file"),
    ],
)
def test_a_file_that_cannot_be_checked(invoke, kernel_file, source, suffix, says):
    result = invoke("check", f"{kernel_file(source=source)}{suffix}")
    assert result.exit_code == 2, result.output
    assert says in " ".join(result.stderr.split())
    assert "Traceback" not in result.output


@pytest.mark.parametrize(
    ("change", "line", "says"),
    [
        (("value * FACTOR", "1.0 if value else 2.0"), "out.store(", "select"),
        (("threads=64", "threads=50"), "@kernel(", "multiple of 32"),
        (("out = np.full(64", "out = missing(64"), "out = missing", "'missing' is not defined"),
        (("np.full(64, np.nan, np.float32)", "np.full(64, np.nan)"), "@double.example", "float64"),
        (("rng.standard_normal", "rng.standard_normals"), "source = r", "standard_normals"),
        (("source = ", "TensorMapSpec(f32, (64, 8), (256,), (64, 8), 128); source = "), "source = r", "box[0]=32"),
        (("def launch(", "def launch(:"), "def launch", "invalid syntax"),
    ],
)
def test_an_error_begins_with_its_line_and_shows_it(invoke, kernel_file, change, line, says):
    source = DOUBLE.replace(
        "import numpy as np", "import numpy as np; from warploom.layout.tensor_map import TensorMapSpec"
    )
    assert change[0] in source
    file = kernel_file(source=source.replace(*change))
    at = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if line in text)
    text = file.read_text().splitlines()[at - 1]
    refused = invoke("check", str(file))
    assert refused.exit_code == 2
    assert refused.stderr.startswith(f"error: kernels.py:{at}: ")
    assert f"{file}:{at}\n" in refused.stderr
    assert f"> {at:4d} | {text}" in refused.stderr
    assert says in refused.stderr
    result = invoke("check", str(file), "--json")
    assert result.exit_code == 2
    found = json.loads(result.stdout)
    assert not found["kernels"]
    (error,) = found["errors"]
    assert (error["file"], error["line"]) == (str(file), at)
    assert says in error["message"]


TWO = """
    import numpy as np
    from warploom.lang import Global, Kernel, Launch, f32, kernel

    @kernel(threads=32)
    def first(k: Kernel, out: Global[f32]) -> None:
        out.store(1.0, k.lane)

    @kernel(threads=32)
    def second(k: Kernel, out: Global[f32]) -> None:
        out.store(True and k.lane, k.lane)

    @first.example
    @second.example
    def launch(rng: np.random.Generator) -> Launch:
        return Launch(1, [np.zeros(32, np.float32)])
"""


def test_what_ran_before_a_refused_kernel_is_told(invoke, kernel_file):
    file = kernel_file(source=TWO)
    assert "first: no findings" in invoke("check", str(file)).stdout
    found = json.loads(invoke("check", str(file), "--json").stdout)
    assert [one["kernel"] for one in found["kernels"]] == ["first"]
    assert [(e["kernel"], e["kind"]) for e in found["errors"]] == [("second", "TraceError")]


CONFLICTS = """
    from warploom.lang import Global, Kernel, Launch, f32, kernel
    import numpy as np

    @kernel(threads=32)
    def twice(k: Kernel, out: Global[f32]) -> None:
        tile = k.shared(f32, (32, 32))
        tile.store(1.0, k.lane, 3)
        k.syncwarp()
        tile.store(2.0, 5, k.lane)

    @twice.example
    def launch(rng: np.random.Generator) -> Launch:
        return Launch(1, [np.zeros(32, np.float32)])

    @kernel(threads=32)
    def other(k: Kernel, out: Global[f32]) -> None:
        out.store(1.0, k.lane)
"""


def test_the_line_of_a_bank_conflict_is_named(invoke, kernel_file):
    file = kernel_file(source=CONFLICTS)
    line = next(i for i, text in enumerate(file.read_text().splitlines(), 1) if "k.lane, 3" in text)
    shown = invoke("check", f"{file}:twice").stdout.splitlines()
    first = next(i for i, text in enumerate(shown) if "st.shared takes 33 wavefronts" in text)
    assert shown[first + 1] == f"  kernels.py:{line}: 32, 1 without"
    assert "kernels.py" not in shown[first + 2]


def test_a_file_of_kernels_is_inspected(invoke, kernel_file):
    pytest.importorskip("cuda.core")
    file = kernel_file(source=CONFLICTS)
    result = invoke("inspect", str(file))
    assert result.exit_code != 0
    assert "several kernels: choose one by" in " ".join(result.output.split())
    for arguments in ([f"{file}:other"], [str(file), "--kernel", "other"]):
        result = invoke("inspect", *arguments, "--arch", "sm_80")
        assert result.exit_code == 0, result.output
        assert "0 bytes of spill stores" in " ".join(result.output.split())
    assert invoke("inspect", f"{file}:nothing").exit_code != 0
