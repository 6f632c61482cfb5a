"""What ncu prints becomes figures; what it cannot do becomes one message."""

import json
import stat
import sys

import pytest
from typer.testing import CliRunner

from warploom.bench import ncu as tool
from warploom.bench import profile
from warploom.bench.counters import METRICS, OPCODES, STALLS, choose_metrics, compare_wavefronts, parse_profiles
from warploom.bench.ncu import SAMPLED, available_metrics, find_ncu, ncu_version, refusal
from warploom.bench.profile import GemmLaunch, Launch, profile_launches
from warploom.core.errors import ConfigError, UnsupportedDeviceError

LDSM = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WIDE = "\n".join(
    [
        "==PROF== Connected to process 12 (/usr/bin/python3)",
        '==PROF== Profiling "attention" - 0: 0%....50%....100% - 9 passes',
        f'"ID","Process ID","Kernel Name","Block Size","Grid Size","{CONFLICTS}","{OPCODES}","{TENSOR}",'
        f'"{STALL.format("wait")}","{STALL.format("selected")}","{STALL.format("gmma")}","{LDSM}"',
        '"","","","","","","inst","%","inst","inst","inst",""',
        '"0","12","attention","(128, 1, 1)","(4, 1, 1)","118,272","24,576 (HMMA: 8,192; LDSM: 4,608; IMAD: 11,776)",'
        '"66.15","2.5","1.0","n/a","135,168"',
        '"1","12","other","(1, 1, 1)","(1, 1, 1)","5","1 (HMMA: 1)","1","9","9","9","9"',
    ]
)
LONG = "\n".join(
    [
        '"ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"',
        f'"0","attention","Command line profiler metrics","{LDSM}","","16,896"',
        f'"0","attention","Command line profiler metrics","{TENSOR}","%","71.78"',
        f'"1","other","Command line profiler metrics","{TENSOR}","%","1"',
    ]
)


def test_a_column_a_metric():
    found = parse_profiles(WIDE, choose_metrics(frozenset()))[0]
    assert found.kernel == "attention"
    assert found.tables["wavefronts"]["ldmatrix"] == 135168
    assert found.tables["bank conflicts"]["all shared"] == 118272
    assert found.tables["pipes, %"]["tensor"] == 66.15
    assert found.tables["stalls"] == {"wait": 2.5, "selected": 1.0}, "n/a is left out"
    assert found.opcodes == {"HMMA": 8192, "LDSM": 4608, "IMAD": 11776}
    assert json.loads(json.dumps(found.json()))["executed by opcode"]["HMMA"] == 8192


def test_a_row_a_metric():
    found = parse_profiles(LONG, choose_metrics(frozenset()))[0]
    assert found.tables["wavefronts"]["ldmatrix"] == 16896
    assert found.tables["pipes, %"]["tensor"] == 71.78, "the first kernel's"


def test_shares_and_groups():
    found = parse_profiles(WIDE, choose_metrics(frozenset()))[0]
    assert found.stall_shares == pytest.approx({"wait": 100 * 2.5 / 3.5, "selected": 100 / 3.5})
    assert list(found.stall_shares) == ["wait", "selected"]
    assert found.groups == {"tensor": 8192, "shared/global memory": 4608, "address & logic": 11776}


def test_wavefronts_beside_the_emulators():
    found = parse_profiles(WIDE, choose_metrics(frozenset()))[0]
    emulated = {"ldmatrix": {"actual": 135168, "ideal": 16896}, "st.shared": {"actual": 4096, "ideal": 512}}
    assert compare_wavefronts(found, emulated) == {"ldmatrix": {"emulator": 135168, "ncu": 135168}}


@pytest.mark.parametrize("text", ["", "==ERROR== nothing", WIDE.rsplit("\n", 3)[0]])
def test_no_counters_no_profile(text):
    with pytest.raises(ConfigError, match="ncu"):
        parse_profiles(text, choose_metrics(frozenset()))


def test_of_several_names_the_one_the_gpu_has():
    only = frozenset({"sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm", "sm__pipe_tensor_cycles_active"})
    chosen = choose_metrics(only)
    assert chosen["wavefronts"] == {"ldmatrix": "sm__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum"}
    assert chosen["pipes, %"] == {"tensor": "sm__pipe_tensor_cycles_active.avg.pct_of_peak_sustained_active"}
    assert "stalls" not in chosen


def test_every_metric_is_a_name_with_a_roll_up():
    names = [name for table in METRICS.values() for candidates in table.values() for name in candidates]
    assert len(names) == len(set(names))
    for name in names:
        base, _, roll_up = name.partition(".")
        assert base.split("__")[0] in {"gpu", "sm", "smsp", "l1tex", "lts"}
        assert roll_up.split(".")[0] in {"sum", "avg", "max", "ratio", "pct"}
    assert set(METRICS["stalls"]) == set(STALLS)


def test_refusals_say_what_to_do():
    assert "NVreg_RestrictProfilingToAdminUsers=0" in refusal("==ERROR== ERR_NVGPUCTRPERM - The user ...")
    assert "saw no kernel" in refusal("==WARNING== No kernels were profiled.")
    assert "driver resource was unavailable" in refusal(
        "==ERROR== Profiling failed because a driver resource was unavailable"
    )


def test_no_ncu_no_profile(monkeypatch):
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    monkeypatch.setattr(tool.Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(UnsupportedDeviceError, match="Nsight Compute"):
        find_ncu()


ONE = "\n".join(WIDE.splitlines()[:-1])
SOURCE = "\n".join(
    [
        '"Kernel Name","attention"',
        '"Address","Source","# Samples","stall_wait","stall_short_sb","stall_selected","stall_wait (Not Issued)"',
        '"7f00","      LDSM.16.M88.4 R8, [R2] ","5","1","0","4","0"',
        '"7f10","      HMMA.16816.F32.BF16 R20, R4, R8, R20 ","95","10","80","5","77"',
    ]
)


@pytest.fixture
def ncu(tmp_path, monkeypatch):
    """A stand-in on PATH: lists two metrics, writes a report, and prints what ``output`` and SOURCE hold."""
    script, output, asked = tmp_path / "ncu", tmp_path / "output", tmp_path / "asked"
    script.write_text(
        f"#!{sys.executable}\nimport sys\n"
        f"if '--query-metrics' in sys.argv:\n    print('Device NVIDIA H200 (GH100)')\n"
        f"    print('{LDSM.partition('.')[0]}  Counter  # of wavefronts')\n"
        f"    print('{TENSOR.partition('.')[0]}  Counter  # of cycles')\n    sys.exit()\n"
        f"if '--version' in sys.argv:\n    sys.exit(print('Version 2025.3.1.0 (build 36398880)'))\n"
        f"text = open({str(output)!r}).read()\n"
        f"if '-o' in sys.argv:\n"
        f"    open({str(asked)!r}, 'w').write('\\n'.join(sys.argv))\n"
        f"    if 'ERROR' in text:\n        sys.exit(text)\n"
        f"    open(sys.argv[sys.argv.index('-o') + 1], 'w').close()\n    sys.exit()\n"
        f"print({SOURCE!r} if 'source' in sys.argv else text)\n",
        encoding="utf-8",
    )
    script.chmod(script.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path))
    output.write_text(ONE, encoding="utf-8")
    return output, asked


def test_a_run_asks_for_what_there_is(ncu):
    _, asked = ncu
    found = profile_launches([Launch("8", 256, settings=("swizzle=off",))])[0]
    assert found.tables == {"wavefronts": {"ldmatrix": 135168.0}, "pipes, %": {"tensor": 66.15}}
    assert found.samples is not None
    assert found.samples.total == 100
    arguments = asked.read_text(encoding="utf-8").splitlines()
    metrics = arguments[arguments.index("--metrics") + 1].split(",")
    assert sorted(metrics) == sorted([LDSM, TENSOR, OPCODES])
    assert arguments[arguments.index("--section") + 1] == SAMPLED
    assert arguments[arguments.index("--clock-control") + 1] == "none"
    assert json.loads(arguments[-1]) == [{"rung": "8", "seq": 256, "batch": 1, "heads": 1, "settings": ["swizzle=off"]}]


def test_a_run_of_gemm_launches_products(ncu):
    _, asked = ncu
    launch = GemmLaunch("02", 64, 72, 96, "f32", ("stages=2",))
    assert launch.config.stages == 2
    assert launch.config.accumulate.name == "f32"
    assert launch.plan().problem.k == 96
    assert profile_launches([launch])[0].tables["wavefronts"] == {"ldmatrix": 135168.0}
    arguments = asked.read_text(encoding="utf-8").splitlines()
    assert arguments[-2] == "warploom.bench.profile:GemmLaunch"
    assert json.loads(arguments[-1])[0] == {
        "rung": "02", "m": 64, "n": 72, "k": 96, "accumulate": "f32", "settings": ["stages=2"],
    }  # fmt: skip
    with pytest.raises(ConfigError, match="no rung"):
        profile_launches([GemmLaunch("99", 64, 64, 64)])


def test_the_watched_process_launches_each_once(monkeypatch):
    ran = []

    def record(*arrays, config, **_):
        ran.append((*(x.shape for x in arrays), config.stages))

    monkeypatch.setattr("warploom.ops.attention.attention", record)
    monkeypatch.setattr("warploom.ops.matmul.matmul", record)
    monkeypatch.setattr(profile, "require_driver", lambda: None)
    for kind, one in (
        ("Launch", {"rung": "best", "seq": 64}),
        ("GemmLaunch", {"rung": "02", "m": 64, "n": 72, "k": 96}),
    ):
        described = json.dumps([one | {"settings": ["stages=2"]}, one | {"settings": ["stages=3"]}])
        profile.main(f"warploom.bench.profile:{kind}", described)
    qkv, ab = 3 * [(1, 64, 1, 128)], [(64, 96), (96, 72)]
    assert ran == [(*qkv, 2), (*qkv, 3), (*ab, 2), (*ab, 3)]


def test_another_number_of_kernels_is_an_error(ncu):
    with pytest.raises(UnsupportedDeviceError, match="1 kernels where 2 were launched"):
        profile_launches([Launch("8", 256), Launch("9", 256)])


def test_the_query_is_read_by_base_names(ncu):
    assert ncu_version() == "2025.3.1.0"
    assert available_metrics(find_ncu()) == {LDSM.partition(".")[0], TENSOR.partition(".")[0]}


def test_the_command_prints_tables_or_the_refusal(ncu, tmp_path):
    from warploom.cli.main import app

    output, _ = ncu
    done = CliRunner().invoke(app, ["profile", "attention", "--rung", "8", "--json", str(tmp_path / "a.json")])
    assert done.exit_code == 0, done.output
    assert "135,168" in done.stdout
    assert "66.15" in done.stdout
    assert "HMMA.16816.F32.BF16 R20" in done.stdout
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["kernel"] == "attention"
    done = CliRunner().invoke(app, ["profile", "gemm", "--rung", "02", "--size", "256"])
    assert "rung 02, 256×256×256" in done.stdout
    output.write_text("==ERROR== ERR_NVGPUCTRPERM", encoding="utf-8")
    done = CliRunner().invoke(app, ["profile", "attention", "--rung", "8"])
    assert done.exit_code == 2
    assert "administrators" in done.stderr


@pytest.mark.parametrize("family", ["attention", "gemm"])
def test_an_unknown_rung_is_named(ncu, family):
    from warploom.cli.main import app

    done = CliRunner().invoke(app, ["profile", family, "--rung", "99"])
    assert done.exit_code == 2
    assert "no rung '99'" in done.stderr
