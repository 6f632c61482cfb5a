"""What ncu prints becomes figures; what it cannot do becomes one message."""

import json
import stat
import sys
from itertools import pairwise

import pytest

from tests.project import load
from warploom.core.errors import ConfigError, UnsupportedDeviceError
from warploom_lab.bench import ncu as tool
from warploom_lab.bench import profile
from warploom_lab.bench.counters import OPCODES, choose_metrics, compare_wavefronts, parse_profiles
from warploom_lab.bench.ncu import SAMPLED, find_ncu, ncu_version, refusal
from warploom_lab.bench.profile import AttentionLaunch, GemmLaunch, profile_launches, with_samples
from warploom_lab.bench.samples import Samples, Spot
from warploom_lab.inspect import inspect_sass

LDSM = "smsp__sass_l1tex_data_pipe_lsu_wavefronts_mem_shared_op_ldsm.sum"
STALL = "smsp__average_warps_issue_stalled_{}_per_issue_active.ratio"
TENSOR = "sm__pipe_tensor_op_hmma_cycles_active.avg.pct_of_peak_sustained_active"
CONFLICTS = "l1tex__data_bank_conflicts_pipe_lsu_mem_shared.sum"
WIDE = f"""==PROF== Connected to process 12 (/usr/bin/python3)
==PROF== Profiling "attention" - 0: 0%....50%....100% - 9 passes
"ID","Process ID","Kernel Name","Block Size","Grid Size","{CONFLICTS}","{OPCODES}","{TENSOR}",\
"{STALL.format("wait")}","{STALL.format("selected")}","{STALL.format("gmma")}","{LDSM}"
"","","","","","","inst","%","inst","inst","inst",""
"0","12","attention","(128, 1, 1)","(4, 1, 1)","118,272","24,576 (HMMA: 8,192; LDSM: 4,608; IMAD: 11,776)",\
"66.15","2.5","1.0","n/a","135,168"
"1","12","other","(1, 1, 1)","(1, 1, 1)","5","1 (HMMA: 1)","1","9","9","9","9\""""
LONG = f""""ID","Kernel Name","Section Name","Metric Name","Metric Unit","Metric Value"
"0","attention","Command line profiler metrics","{LDSM}","","16,896"
"0","attention","Command line profiler metrics","{TENSOR}","%","71.78"
"1","other","Command line profiler metrics","{TENSOR}","%","1\""""


def test_a_column_a_metric():
    found = parse_profiles(WIDE, choose_metrics(frozenset()))[0]
    assert found.kernel == "attention"
    assert found.tables["wavefronts"]["ldmatrix"] == 135168
    assert found.tables["bank conflicts"]["all shared"] == 118272
    assert found.tables["pipes, %"]["tensor"] == 66.15
    assert found.tables["stalls"] == {"wait": 2.5, "selected": 1.0}, "n/a is left out"
    assert list(found.stall_shares.items()) == [
        ("wait", pytest.approx(250 / 3.5)),
        ("selected", pytest.approx(100 / 3.5)),
    ]
    assert found.opcodes == {"HMMA": 8192, "LDSM": 4608, "IMAD": 11776}
    assert found.groups == {"tensor": 8192, "shared/global memory": 4608, "address & logic": 11776}
    assert json.loads(json.dumps(found.json()))["executed by opcode"]["HMMA"] == 8192
    emulated = {"ldmatrix": {"actual": 135168, "ideal": 16896}, "st.shared": {"actual": 4096, "ideal": 512}}
    assert compare_wavefronts(found, emulated) == {"ldmatrix": {"emulator": 135168, "ncu": 135168}}


def test_a_row_a_metric():
    found = parse_profiles(LONG, choose_metrics(frozenset()))[0]
    assert found.tables["wavefronts"]["ldmatrix"] == 16896
    assert found.tables["pipes, %"]["tensor"] == 71.78, "the first kernel's"


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


@pytest.mark.parametrize(
    ("output", "says"),
    [
        ("==ERROR== ERR_NVGPUCTRPERM - The user ...", "NVreg_RestrictProfilingToAdminUsers=0"),
        ("==WARNING== No kernels were profiled.", "saw no kernel"),
        ("==ERROR== Profiling failed because a driver resource was unavailable", "driver resource was unavailable"),
    ],
)
def test_refusals_say_what_to_do(output, says):
    assert says in refusal(output)


def test_no_ncu_no_profile(monkeypatch):
    monkeypatch.setattr(tool.shutil, "which", lambda name: None)
    monkeypatch.setattr(tool.Path, "glob", lambda self, pattern: iter(()))
    with pytest.raises(UnsupportedDeviceError, match="Nsight Compute"):
        find_ncu()


ONE = "\n".join(WIDE.splitlines()[:-1])
SOURCE = """"Kernel Name","attention"
"Address","Source","# Samples","stall_wait","stall_short_sb","stall_selected","stall_wait (Not Issued)"
"7f00","      LDSM.16.M88.4 R8, [R2] ","5","1","0","4","0"
"7f10","      HMMA.16816.F32.BF16 R20, R4, R8, R20 ","95","10","80","5","77\""""


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


def asked_of(ncu) -> list[str]:
    return ncu[1].read_text(encoding="utf-8").splitlines()


def test_a_run_asks_for_what_there_is(ncu):
    (found,) = profile_launches([AttentionLaunch("8", 256, settings=("swizzle=off",))])
    assert found.tables == {"wavefronts": {"ldmatrix": 135168.0}, "pipes, %": {"tensor": 66.15}}
    assert found.samples is not None
    assert found.samples.total == 100
    assert with_samples([found], "", []) == [found], "counters stay where ncu took no samples"
    arguments = asked_of(ncu)
    options = dict(pairwise(arguments))
    assert sorted(options["--metrics"].split(",")) == sorted([LDSM, TENSOR, OPCODES])
    assert options["--section"] == SAMPLED
    assert options["--clock-control"] == "none"
    assert "--kernel-name" not in options
    assert json.loads(arguments[-1]) == [{"rung": "8", "seq": 256, "batch": 1, "heads": 1, "settings": ["swizzle=off"]}]
    assert ncu_version() == "2025.3.1.0"


def test_a_run_of_gemm_launches_products(ncu):
    launch = GemmLaunch("02", 64, 72, 96, "f32", ("stages=2",))
    assert (launch.config.stages, launch.config.accumulate.name, launch.shapes[0]) == (2, "f32", (64, 96))
    assert profile_launches([launch])[0].tables["wavefronts"] == {"ldmatrix": 135168.0}
    *_, module, described = asked_of(ncu)
    assert module == "warploom_lab.bench.profile:GemmLaunch"
    assert json.loads(described) == [
        {"rung": "02", "m": 64, "n": 72, "k": 96, "accumulate": "f32", "settings": ["stages=2"]}
    ]


def test_of_another_libraries_launch_only_its_kernels_are_watched(ncu):
    reference = load("profile_h200")
    (found,) = reference.profile_reference([reference.FlashLaunch(4096, 4, 16)])
    assert found.tables["wavefronts"] == {"ldmatrix": 135168.0}
    arguments = asked_of(ncu)
    assert arguments[arguments.index("--kernel-name") + 1] == "regex:flash_fwd"
    assert arguments[-2] == "benchmarks.profile_h200:FlashLaunch"


def test_another_kernels_sass_is_counted_as_ours():
    loop = ["LDSM.16.M88.4 R8, [R3]", "HMMA.16816.F32.BF16 R12, R4, R8, R12", "MOV R250, R9", "FADD R1, R2, R3"]
    texts = [
        ("MOV R3, R2", 8),
        *((text, 256) for text in loop),
        ("HMMA.16816.F32.BF16 R20, R4, R8, RZ", 8),
        ("EXIT", 8),
        ("NOP", 0),
    ]
    listed = inspect_sass("\n".join(f"{text} ;" for text, _ in texts)).listing.instructions
    spots = [Spot(i, {"wait": 1}, executed) for i, (_, executed) in zip(listed, texts, strict=True)]
    found = load("profile_h200").sass(Samples(spots))
    assert (found["registers"], found["instructions"], found["counts"]["HMMA"]) == (251, 7, 2)
    assert found["loop_counts"] == {"LDSM": 1, "HMMA": 1, "MOV": 1, "FADD": 1}
    assert found["loop_groups"] == {"tensor": 1, "shared/global memory": 1, "register copies": 1, "float": 1}


def test_the_watched_process_launches_each_once(monkeypatch):
    ran = []

    def record(*arrays, config, **_):
        ran.append((*(x.shape for x in arrays), config.stages))

    monkeypatch.setattr(profile, "attention", record)
    monkeypatch.setattr(profile, "matmul", record)
    monkeypatch.setattr(profile, "require_driver", lambda: None)
    for kind, one in (
        ("AttentionLaunch", {"rung": "best", "seq": 64}),
        ("GemmLaunch", {"rung": "02", "m": 64, "n": 72, "k": 96}),
    ):
        described = json.dumps([one | {"settings": ["stages=2"]}, one | {"settings": ["stages=3"]}])
        profile.main(f"warploom_lab.bench.profile:{kind}", described)
    qkv, ab = 3 * [(1, 64, 1, 128)], [(64, 96), (96, 72)]
    assert ran == [(*qkv, 2), (*qkv, 3), (*ab, 2), (*ab, 3)]


def test_another_number_of_kernels_is_an_error(ncu):
    with pytest.raises(UnsupportedDeviceError, match="1 kernels where 2 were launched"):
        profile_launches([AttentionLaunch("8", 256), AttentionLaunch("9", 256)])


def test_the_command_prints_tables_or_the_refusal(invoke, ncu, tmp_path):
    done = invoke("profile", "attention", "--rung", "8", "--json", str(tmp_path / "a.json"))
    assert done.exit_code == 0, done.output
    for text in ("135,168", "66.15", "HMMA.16816.F32.BF16 R20"):
        assert text in done.stdout
    assert json.loads((tmp_path / "a.json").read_text(encoding="utf-8"))["kernel"] == "attention"
    assert "rung 02, 256×256×256" in invoke("profile", "gemm", "--rung", "02", "--size", "256").stdout
    ncu[0].write_text("==ERROR== ERR_NVGPUCTRPERM", encoding="utf-8")
    done = invoke("profile", "attention", "--rung", "8")
    assert done.exit_code == 2
    assert "administrators" in done.stderr


@pytest.mark.parametrize("family", ["attention", "gemm"])
def test_an_unknown_rung_is_named(invoke, ncu, family):
    done = invoke("profile", family, "--rung", "99")
    assert done.exit_code == 2
    assert "no rung '99'" in done.stderr
