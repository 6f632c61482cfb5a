"""Matmul's part of the tuner: its space, the check of its results, and matmul() taking the winners."""

import pickle
from dataclasses import replace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from tests.tune.fakes import fake_gpu
from tests.tune.test_attention_family import CpuTorch, KernelStandIn
from warploom.cli.main import app
from warploom.core.dtypes import bf16, f16, f32
from warploom.core.errors import ProblemError
from warploom.core.targets import target
from warploom.emulate import emulate
from warploom.kernels.gemm.choice import choose
from warploom.kernels.gemm.config import GemmConfig
from warploom.kernels.gemm.hopper_config import HopperGemmConfig
from warploom.kernels.gemm.ladder import BEST32
from warploom.kernels.gemm.problem import Matrix, contiguous_problem
from warploom.ops import matmul as ops
from warploom.tune import gemm as tuned_gemm
from warploom.tune.build import build_all
from warploom.tune.built import Built
from warploom.tune.gemm import MOST_CANDIDATES, MOST_HOPPER_CANDIDATES, GemmFamily, checked_problem, fragment_registers
from warploom.winners.classes import gemm_class
from warploom.winners.store import Found, Winner, WinnerStore, package_version

FAMILY = GemmFamily()
GOAL = target("sm_90a")
WITHOUT_WGMMA = target("sm_80")
PROBLEM = contiguous_problem(4096, 4096, 4096, f16)
GPU = "NVIDIA Test 9000"
SMALL = GemmConfig(
    tile_m=64, tile_n=32, tile_k=32, warp_m=32, warp_n=16, ldmatrix=True, swizzle=True, stages=2, pipelined=True
)


def combinations(problem, arch):
    return list(FAMILY.spaces(problem, target(arch))[-1].combinations())


def wgmma_combinations(problem):
    return list(FAMILY.spaces(problem, GOAL)[0].combinations())


@pytest.mark.parametrize("sizes", [(4096, 4096, 4096), (16, 6144, 4096), (100, 77, 33)])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120a"])
def test_the_space_is_small_and_holds_kernels_only(arch, sizes):
    m, n, k = sizes
    problem = contiguous_problem(m, n, k, bf16, b_rows=False)
    found = combinations(problem, arch)
    assert len(found) == len(set(found)) == MOST_CANDIDATES
    default = FAMILY.default(problem, target(arch))
    assert default in [c for space in FAMILY.spaces(problem, target(arch)) for c in space.combinations()]
    assert FAMILY.misfits(problem, default, target(arch)) == []
    assert {(c.dtype, c.accumulate) for c in found} == {(bf16, f32)}
    for config in found:
        assert config.check(target(arch), b_k_contiguous=True) == problem.misfits(config) == []
        assert FAMILY.parse(str(config)) == config


def test_fewer_candidates_are_the_models_first():
    few, all_of_them = (f.spaces(PROBLEM, target("sm_90a")) for f in (GemmFamily("gemm", 5), GemmFamily()))
    for short, whole in zip(few, all_of_them, strict=True):
        assert list(short.combinations()) == list(whole.combinations())[:5]


def test_long_sums_of_few_elements_are_tried_split():
    assert len({c.split_k for c in combinations(contiguous_problem(64, 64, 65536, f16), "sm_90a")}) > 2


def test_wgmma_is_searched_where_the_tma_takes_the_arrays_and_rows_fill_its_tiles():
    found = wgmma_combinations(PROBLEM)
    assert len(found) == len(set(found)) == MOST_HOPPER_CANDIDATES
    assert FAMILY.default(PROBLEM, GOAL) in found
    assert {c.pingpong for c in found} == {False, True}
    for config in found:
        assert config.check(GOAL) == PROBLEM.misfits(config) == []
        assert FAMILY.parse(str(config)) == config
    changed = {
        name
        for v in FAMILY.spaces(PROBLEM, GOAL)[0].variants(found[0])
        for name in vars(v)
        if getattr(v, name) != getattr(found[0], name)
    }
    assert changed == {"stages", "block_stride", "in_flight", "persistent", "cluster"}
    assert len(FAMILY.spaces(PROBLEM, target("sm_80"))) == 1
    assert len(FAMILY.spaces(contiguous_problem(16, 4096, 4096, f16), GOAL)) == 1
    first, _ = FAMILY.spaces(contiguous_problem(4096, 4096, 4096, f16, f16), GOAL)
    assert all(c.mma_sync and c.accumulate is f16 for c in first.combinations())  # wgmma's sums are f32
    assert wgmma_combinations(contiguous_problem(4096, 4095, 4096, f16)) == []


def test_variants_touch_each_other_flag():
    space = FAMILY.spaces(PROBLEM, GOAL)[-1]
    changed = {
        name for v in space.variants(BEST32) for name in vars(BEST32) if getattr(v, name) != getattr(BEST32, name)
    }
    assert changed == {"stages", "pipelined", "block_stride", "wide_b", "min_ctas"}


def test_fragments_that_fit_no_register_file_are_not_compiled():
    wide = replace(BEST32, tile_m=256, warp_m=128)
    assert fragment_registers(wide) > 255
    assert "fragments alone" in FAMILY.misfits(PROBLEM, wide, GOAL)[0]
    assert FAMILY.misfits(PROBLEM, BEST32, GOAL) == []
    assert "fragments alone" in FAMILY.misfits(PROBLEM, replace(BEST32, min_ctas=2), GOAL)[0]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_results_are_checked_on_the_kernel_that_is_timed(data):
    m, n, k = (data.draw(st.one_of(st.integers(1, 300), st.integers(1, 20000))) for _ in range(3))
    problem = contiguous_problem(
        m, n, k, f16, data.draw(st.sampled_from([f16, f32])), out_dtype=data.draw(st.sampled_from([f16, f32])),
        b_rows=data.draw(st.booleans()), batch=data.draw(st.sampled_from([1, 5])),
    )  # fmt: skip
    config = data.draw(
        st.sampled_from(combinations(problem, "sm_90a") + data.draw(st.sampled_from([[], wgmma_combinations(problem)])))
    )
    checked = checked_problem(problem, config)
    assert FAMILY.kernel_key(checked, config) == FAMILY.kernel_key(problem, config)
    assert checked.misfits(config) == []
    assert checked.flops <= 2 * 2 * 768 * 768 * 17 * 128


def test_a_split_k_is_another_kernel_than_another_split(tmp_path, monkeypatch):
    """Else the tuner would drop one of the two as the same machine code."""
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    problem = contiguous_problem(64, 32, 512, f16)
    assert pickle.loads(pickle.dumps(problem)) == problem
    configs = [replace(SMALL, split_k=s) for s in (2, 4)]
    two, four = build_all(FAMILY, problem, configs, "sm_80", workers=1)
    assert isinstance(two, Built)
    assert isinstance(four, Built)
    assert two.kernel.cubin != four.kernel.cubin
    assert two.faults(target("sm_80")) == []


class EmulatedCall:
    """A GpuCall that runs the Program on the emulator, on the arrays at the addresses it is given."""

    launches: ClassVar[list[tuple[int, ...]]] = []
    broken = False

    def __init__(self, kernel, grid, scalars, device, *, mapped=()):
        assert mapped == ()  # mma.sync
        self.program, self.grid, self.scalars = kernel, grid, scalars

    def launch_again(self, pointers, kind):
        import ctypes

        import numpy as np

        EmulatedCall.launches.append(pointers)
        if self.broken:
            return True
        values = {"m": 0, "n": 0, "depth": 0} | dict(
            zip(self.program.scalars, (s.value for s in self.scalars), strict=True)
        )
        m, n, k = values["m"], values["n"], values["depth"]
        sizes = dict(zip(("a", "b", "out"), (m * k, k * n, m * n), strict=True))
        arrays = {
            name: np.ctypeslib.as_array((ctypes.c_uint16 * size).from_address(pointer))
            for (name, size), pointer in zip(sizes.items(), pointers, strict=True)
        }
        everything = arrays | values
        emulate(self.program.program, self.grid, {p.name: everything[p.name] for p in self.program.parameters})
        return True


def test_a_workload_checks_and_runs_what_was_built(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(tuned_gemm, "torch_module", lambda: CpuTorch(torch))
    monkeypatch.setattr(tuned_gemm, "GpuCall", EmulatedCall)
    monkeypatch.setattr(EmulatedCall, "launches", [])
    monkeypatch.setattr("warploom.cuda.launch.load", lambda kernel, device: kernel)
    problem = contiguous_problem(72, 40, 104, f16, b_rows=False)
    program = FAMILY.program(problem, SMALL)
    kernel = KernelStandIn(program)
    built = Built(kernel, program.threads, program.shared_bytes, kernel.scalars)  # pyright: ignore[reportArgumentType]
    workload = FAMILY.workload(problem, 0)
    assert workload.sets >= 2
    assert workload.answers()
    assert workload.fault(SMALL, built) is None
    EmulatedCall.launches.clear()
    run = workload.prepare(SMALL, built)
    run(0)
    run(1)
    assert len({a for a, _, _ in EmulatedCall.launches}) == 2, "input sets rotate"
    assert len({out for _, _, out in EmulatedCall.launches}) == 1
    monkeypatch.setattr(EmulatedCall, "broken", True)
    assert "wrong results (error inf" in str(workload.fault(SMALL, built))


def test_a_transposed_a_is_not_tuned():
    problem = replace(PROBLEM, a=Matrix(False, 4096))
    with pytest.raises(ProblemError, match="row-major A"):
        FAMILY.workload(problem, 0)


# -- winners
@pytest.fixture
def store(tmp_path, monkeypatch):
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    monkeypatch.setattr(ops, "gpu_name", lambda device: GPU)
    return WinnerStore(tmp_path / "tuned")


def keep(store, config, problem=PROBLEM):
    store.add(Winner(GPU, package_version(), gemm_class(problem), config, 1e-3, 9e-4, 2e-3, 9, 1.1, 30, "2026-01-01"))


def test_matmul_takes_the_winner_of_its_class(store):
    assert ops.tuned(PROBLEM, GOAL, 0) is None
    winner = replace(BEST32, tile_m=256, tile_n=128, tile_k=64, stages=3)
    keep(store, str(winner))
    found = ops.tuned(PROBLEM, GOAL, 0)
    assert found is not None
    assert found[0] == winner
    assert found[1].startswith(f"tuned on {GPU} for gemm f16 layout=nn")
    found = ops.tuned(contiguous_problem(4000, 4096, 4096, bf16), WITHOUT_WGMMA, 0)
    assert found is not None
    assert found[0] == replace(winner, dtype=bf16)


def test_winners_of_both_generators_are_kept(store):
    winner = replace(choose(PROBLEM, GOAL)[0], stages=4)
    assert isinstance(winner, HopperGemmConfig)
    keep(store, str(winner))
    found = ops.tuned(contiguous_problem(4000, 4096, 4096, bf16), GOAL, 0)
    assert found is not None
    assert found[0] == replace(winner, dtype=bf16)
    assert ops.tuned(PROBLEM, WITHOUT_WGMMA, 0) is None


@pytest.mark.parametrize(
    "changes",
    [{"b_rows": False}, {"accumulate": f16}, {"out_dtype": f32}, {"n": 4097}, {"m": 16}, {"m": 1024, "n": 1024}],
)
def test_other_products_do_not(store, changes):
    keep(store, str(BEST32))
    asked = {"m": 4096, "n": 4096, "k": 4096, "dtype": f16} | changes
    assert ops.tuned(contiguous_problem(**asked), GOAL, 0) is None


def test_a_winner_of_a_near_class_must_please_the_cost_model(store):
    near = contiguous_problem(8192, 4096, 4096, f16)
    keep(store, str(replace(choose(near, WITHOUT_WGMMA)[0], block_stride=16)))  # the model does not tell the two apart
    assert ops.tuned(near, WITHOUT_WGMMA, 0) is not None
    assert ops.tuned(near, GOAL, 0) is None  # where wgmma is expected to be faster
    keep(store, str(replace(BEST32, tile_m=64, tile_n=64, warp_m=32, warp_n=32)))
    assert ops.tuned(PROBLEM, WITHOUT_WGMMA, 0) is not None
    assert ops.tuned(near, WITHOUT_WGMMA, 0) is None


def test_what_came_with_the_package_must_please_the_cost_model_even_for_its_class(store, monkeypatch):
    poor = replace(choose(PROBLEM, GOAL)[0], tile_m=64, tile_n=64, consumers=1, pingpong=False)
    keep(store, str(poor))
    found = ops.tuned(PROBLEM, GOAL, 0)
    assert found is not None
    assert found[0] == poor, "found on this machine"
    monkeypatch.setattr(ops, "find_winner", lambda *_, **__: Found(store.winners(GPU, package_version())[0], 0.0, True))
    assert ops.tuned(PROBLEM, GOAL, 0) is None


@pytest.mark.parametrize("text", ["BM=24", "nonsense", str(replace(BEST32, tile_m=256, tile_n=256, stages=6))])
def test_a_winner_of_no_use_leaves_the_default(store, text):
    keep(store, text)
    assert ops.tuned(PROBLEM, GOAL, 0) is None


def test_the_default_says_that_it_is_untuned():
    assert "untuned" in choose(PROBLEM, GOAL)[1]


# -- the command
def test_the_command_tunes_the_problem_it_names(tmp_path, monkeypatch):
    from tests.tune.fakes import FakeFamily, SimulatedClock
    from warploom.tune.tuner import Tuner

    asked = []
    family = FakeFamily(SimulatedClock())
    of_problem = family.problem_class
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    for name in ("problem_class", "default", "spaces", "misfits", "kernel_key", "workload"):
        method = getattr(family, name)
        monkeypatch.setattr(family, name, lambda problem, *rest, method=method: method(problem.m, *rest))
    monkeypatch.setattr(tuned_gemm, "GemmFamily", lambda: family)
    monkeypatch.setattr("warploom.tune.gpu.gpu_for_tuning", lambda index: fake_gpu(family.clock))

    def tuner(*arguments, **options):
        made = Tuner(*arguments, **options, build=family.build)
        monkeypatch.setattr(made, "tune_all", lambda p, again: asked.extend(p) or Tuner.tune_all(made, p, again=again))
        return made

    monkeypatch.setattr("warploom.tune.tuner.Tuner", tuner)
    result = CliRunner().invoke(app, ["tune", "gemm", "4096", "512", "64", "--b", "nk", "--dtype", "bf16", "--json"])
    assert result.exit_code == 0, result.output
    assert asked == [contiguous_problem(4096, 512, 64, bf16, b_rows=False)]
    assert of_problem(4096).json()["sizes"] == {"n": 12}


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("16", "16"), "Missing argument"),
        (("16", "16", "0"), "1"),
        (("16", "16", "16", "--b", "tn"), "kn or nk"),
        (("16", "16", "16", "--dtype", "int4"), "int4"),
        (("16", "16", "16", "--dtype", "bf16", "--accumulate", "f16"), "f32 (or f16 for f16)"),
    ],
)
def test_wrong_words_are_explained(words, message):
    result = CliRunner().invoke(app, ["tune", "gemm", *words], env={"COLUMNS": "200"})
    assert result.exit_code == 2
    assert message in result.output


@pytest.mark.gpu
def test_tuning_on_a_gpu(tmp_path):
    from warploom.tune.gpu import gpu_for_tuning
    from warploom.tune.tuner import Effort, Tuner

    tuner = Tuner(FAMILY, gpu_for_tuning(), WinnerStore(tmp_path), budget=60, effort=Effort(variant_passes=0))
    outcome = tuner.tune(contiguous_problem(256, 512, 4096, f16, b_rows=False))
    assert outcome.winner is not None
    assert outcome.winner.speedup >= 0.97
    assert not any("wrong" in reason for reason in outcome.dropped)
