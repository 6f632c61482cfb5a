"""``warploom ladder attention``: rows, overrides, and every kind of bad input."""

import json
import re

import pytest
from typer.testing import CliRunner

from warploom.cli.main import app
from warploom.core.errors import ConfigError
from warploom.kernels.attention.reference import attention_reference
from warploom_lab.bench.ladder import missing_compiler
from warploom_lab.cli.ladder import attention_rungs
from warploom_lab.kernels.attention.ladder import FULL_LADDER


@pytest.fixture(scope="module")
def base_rows():
    result = CliRunner().invoke(app, ["ladder", "attention", "--rung", "1,2", "--on", "cpu", "--json", "-"])
    assert result.exit_code == 0, result.output
    return json.loads(result.stdout)


@pytest.fixture
def small(invoke, no_compiler):
    """A run of rung 2 on few rows, on the emulator alone."""

    def run(*options: str, code: int = 0):
        result = invoke("ladder", "attention", "--rung", "2", "--seq", "64", "--on", "cpu", *options)
        assert result.exit_code == code, result.output
        return result

    return run


def test_the_rows_have_the_agreed_shape(base_rows):
    assert base_rows["environment"]["packages"]["numpy"]
    assert [row["rung"] for row in base_rows["rows"]] == ["1", "2"]
    for row in base_rows["rows"]:
        assert set(row) == {"rung", "name", "config", "digest", "error", "findings", "wavefronts", "targets", "gpu"}
        assert set(row["error"]) == {"metric", "value", "bound"}
        assert {"ldmatrix", "st.shared", "ld.shared", "cp.async"} <= set(row["wavefronts"])
        assert (row["gpu"], row["findings"], row["config"]["dtype"]) == (None, [], "bf16")
        assert 0.01 < row["error"]["value"] <= row["error"]["bound"]


def test_rungs_1_and_2_have_the_known_conflicts(base_rows):
    """Hardware counters at (64, 64, 4 warps), seq 256, bf16: conflicts of eight in rung 1, none in rung 2."""
    for row, factor in zip(base_rows["rows"], (8, 1), strict=True):
        assert row["wavefronts"]["ldmatrix"] == {"actual": factor * 16896, "ideal": 16896, "accesses": 4224}
        assert row["wavefronts"]["st.shared"] == {"actual": factor * 512, "ideal": 512, "accesses": 512}


@pytest.mark.skipif(missing_compiler() is not None, reason="needs NVRTC")
def test_registers_and_spills_of_both_targets(base_rows):
    for row, most in zip(base_rows["rows"], (202, 232), strict=True):
        assert set(row["targets"]) == {"sm_80", "sm_90a"}
        for entry in row["targets"].values():
            assert entry["spill_bytes"] == 0
            assert entry["shared_bytes"] == 48 * 1024
        assert 64 < row["targets"]["sm_80"]["registers"] <= most


def test_a_table_and_a_json_file_without_a_compiler(small, tmp_path, monkeypatch):
    monkeypatch.setattr("warploom_lab.cli.ladder.SHOWN_AFTER", 0.0)
    file = tmp_path / "deep" / "rows.json"
    result = small("--json", str(file))
    assert "2  swizzle" in result.stdout
    assert "not compiled" in result.stderr
    (row,) = json.loads(file.read_text())["rows"]
    assert (row["rung"], row["targets"]) == ("2", {})


def test_the_time_on_this_machine_is_said_after_each_rung(small, monkeypatch):
    monkeypatch.setattr("warploom_lab.cli.ladder.SHOWN_AFTER", 0.0)
    assert re.search(r"rung 2 .*about \d+ s to go", small("--rung", "3").stderr)


def test_flags_are_overridden(small):
    words = "--set tile_n=32 --set swizzle=no --head-dim 64 --dtype f16 --json -"
    (row,) = json.loads(small(*words.split()).stdout)["rows"]
    flags = row["config"]
    assert (flags["tile_n"], flags["swizzle"], flags["head_dim"], flags["dtype"]) == (32, False, 64, "f16")
    assert row["wavefronts"]["ldmatrix"]["actual"] > row["wavefronts"]["ldmatrix"]["ideal"]


def test_a_seed_draws_other_inputs_and_finds_nothing_new(small):
    results = [json.loads(small("--json", "-", "--seed", seed).stdout) for seed in ("1", "2")]
    one, other = (result["rows"][0]["error"]["value"] for result in results)
    assert one != other


@pytest.mark.parametrize(("head_dim", "dtype"), [(128, "f16"), (80, "bf16"), (256, "bf16")])
def test_a_rung_without_room_for_its_idea_is_left_out_unless_asked_for(head_dim, dtype):
    """Row sums as a column of P·V need bf16 and whole panels of V."""
    keys = [r.key for r in attention_rungs(None, None, 256, 1, head_dim, dtype)[1]]
    assert keys == [r.key for r in FULL_LADDER.rungs if r.key != "h9"]
    assert [r.key for r in attention_rungs(None, None, 256, 1, 64, "bf16")[1]][-2:] == ["h8", "h9"]
    with pytest.raises(ConfigError, match="sum_column"):
        attention_rungs(["h9"], None, 256, 1, head_dim, dtype)


@pytest.mark.usefixtures("no_compiler")
def test_rungs_that_do_not_fit_are_left_out_unless_asked_for(invoke, monkeypatch):
    from warploom_lab.kernels.attention import ladder

    few = ladder.LADDER.__class__("attention", tuple(r for r in ladder.LADDER.rungs if r.key in ("2", "best")))
    monkeypatch.setattr(ladder, "FULL_LADDER", few)
    size = ("--head-dim", "256", "--seq", "64", "--on", "cpu", "--json", "-")  # too much shared memory for one
    result = invoke("ladder", "attention", *size)
    assert result.exit_code == 0, result.output
    assert [row["rung"] for row in json.loads(result.stdout)["rows"]] == ["2"]
    assert "rung best is left out" in result.stderr
    result = invoke("ladder", "attention", "--rung", "2,best", *size)
    assert result.exit_code == 2
    assert "shared memory" in result.stderr


def test_debug_shows_the_traceback(invoke):
    result = invoke("--debug", "ladder", "attention", "--rung", "99")
    assert isinstance(result.exception, ConfigError)


def test_a_folder_that_cannot_be_written_is_an_error(small, tmp_path):
    blocked = tmp_path / "file"
    blocked.write_text("")
    assert str(blocked) in small("--json", str(blocked / "x.json"), code=2).stderr


def test_a_wrong_kernel_ends_with_exit_code_1(small, monkeypatch):
    def of_other_inputs(q, k, v, **options):
        return attention_reference(q, k, -v, **options)

    monkeypatch.setattr("warploom_lab.bench.attention.attention_reference", of_other_inputs)
    assert "over its bound" in small("--json", "-", code=1).stderr


@pytest.mark.gpu
def test_rungs_are_checked_and_timed_on_the_gpu(invoke):
    pytest.importorskip("torch")
    result = invoke("ladder", "attention", "--rung", "2", "--on", "gpu", "--gpu-seq", "512,1024", "--json", "-")
    assert result.exit_code == 0, result.output
    found = json.loads(result.stdout)
    gpu = found["rows"][0]["gpu"]
    assert [cell["seq"] for cell in gpu["cells"]] == [512, 1024]
    for cell in gpu["cells"]:
        assert 0 < cell["tflops"]["low"] <= cell["tflops"]["median"] <= cell["tflops"]["high"]
        assert cell["ratio"]["torch_flash"] > 0.05
        assert cell["error"]["value"] <= cell["error"]["bound"]
    assert found["environment"]["gpu"]["name"]
    assert found["environment"]["clocks"]["after"]
