"""Attention's part of the tuner: its space, its kernels built in other processes, and the check of its results."""

import copy
import pickle
from dataclasses import replace
from functools import partial
from types import SimpleNamespace
from typing import ClassVar

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from warploom.core.dtypes import DTYPES, bf16, f16
from warploom.core.targets import target
from warploom.emulate import emulate
from warploom.interop.arrays import as_numpy
from warploom.kernels.attention.config import AttentionConfig
from warploom.kernels.attention.hopper_config import HopperConfig
from warploom.kernels.attention.ladder import BEST
from warploom.kernels.attention.problem import AttentionProblem
from warploom.kernels.attention.reference import attention_reference
from warploom.tune import attention as tuned_attention
from warploom.tune.attention import AttentionFamily, checked_problem, reference, relative_error
from warploom.tune.build import build_all
from warploom.tune.built import Built
from warploom.tune.space import distinct

FAMILY = AttentionFamily()
PROBLEM = AttentionProblem(4, 16, 16, 4096, 4096, 128, bf16)
SMALL = AttentionConfig(tile_m=64, tile_n=32, num_warps=4, head_dim=64, swizzle=True)


def candidates(problem, arch):
    goal = target(arch)
    configs = distinct(c for space in FAMILY.spaces(problem, goal) for c in space.combinations())
    return [c for c in configs if not FAMILY.misfits(problem, c, goal)]


@pytest.mark.parametrize("head_dim", [64, 96, 128, 256])
@pytest.mark.parametrize("arch", ["sm_80", "sm_86", "sm_90a", "sm_120a"])
def test_the_space_is_small_and_holds_kernels_only(arch, head_dim):
    problem = replace(PROBLEM, head_dim=head_dim, heads=2048 // head_dim, kv_heads=2048 // head_dim)
    found = candidates(problem, arch)
    assert 4 <= len(found) <= 180
    assert all(c.check(target(arch)) == [] and problem.misfits(c) == [] for c in found)
    assert {c.head_dim for c in found} == {head_dim}
    assert any(isinstance(c, HopperConfig) for c in found) == (arch == "sm_90a")
    assert FAMILY.misfits(problem, FAMILY.default(problem, target(arch)), target(arch)) == []
    for config in found:
        assert FAMILY.parse(str(config)) == config


def test_variants_touch_each_other_flag():
    space = FAMILY.spaces(PROBLEM, target("sm_80"))[0]
    changed = {
        name for variant in space.variants(BEST) for name in vars(BEST) if getattr(variant, name) != getattr(BEST, name)
    }
    assert {"load_q", "double_buffer", "peel", "block_index", "backward", "output_hint", "min_ctas"} <= changed
    assert not changed & {"dtype", "head_dim", "swizzle", "tile_m"}


def test_accumulators_that_fit_no_register_file_are_not_compiled():
    wide = replace(BEST, tile_m=256, num_warps=4)
    assert "fragments alone take" in FAMILY.misfits(PROBLEM, wide, target("sm_80"))[0]
    assert FAMILY.misfits(PROBLEM, BEST, target("sm_80")) == []
    two = replace(BEST, tile_m=128, num_warps=4, min_ctas=3)
    assert "of 170 registers" in FAMILY.misfits(PROBLEM, two, target("sm_80"))[0]


@settings(deadline=None, max_examples=60)
@given(data=st.data())
def test_results_are_checked_on_the_kernel_that_is_timed(data):
    arch = data.draw(st.sampled_from(["sm_80", "sm_90a"]))
    q_len = data.draw(st.integers(1, 20000))
    kv_len = data.draw(st.one_of(st.just(q_len), st.integers(1, 20000)))
    kv_heads = data.draw(st.sampled_from([1, 2, 8]))
    window = data.draw(st.sampled_from([(None, None), (None, 0), (64, 0)]))
    problem = AttentionProblem(3, 8, kv_heads, q_len, kv_len, 128, bf16, window)
    config = data.draw(st.sampled_from(candidates(problem, arch)))
    checked = checked_problem(problem, config)
    assert FAMILY.kernel_key(checked, config) == FAMILY.kernel_key(problem, config)
    assert checked.features(config) == problem.features(config)
    period = 512 + 2 * 192 * 176
    assert max(checked.q_len, checked.kv_len) <= period or q_len != kv_len


def test_a_type_is_the_same_object_in_another_process():
    for dtype in DTYPES.values():
        assert pickle.loads(pickle.dumps(dtype)) is dtype
        assert copy.deepcopy(dtype) is dtype
    assert pickle.loads(pickle.dumps(PROBLEM)) == PROBLEM


def test_kernels_are_built_in_processes_as_in_this_one(tmp_path, monkeypatch):
    pytest.importorskip("cuda.core")
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path))
    problem = AttentionProblem(1, 2, 2, 128, 128, 64, f16)
    config = replace(SMALL, dtype=f16)
    broken = replace(config, tile_n=8)
    told = []
    many = build_all(FAMILY, problem, [config, broken], "sm_80", lambda *p: told.append(p), workers=2)
    one = build_all(FAMILY, problem, [config], "sm_80", workers=1)[0]
    assert isinstance(many[0], Built)
    assert isinstance(one, Built)
    assert many[0].kernel.cubin == one.kernel.cubin
    assert (many[0].threads, many[0].shared_bytes, many[0].scalars) == (128, config.shared_bytes, one.scalars)
    assert many[0].faults(target("sm_80")) == []
    assert many[0].occupancy(target("sm_80")).ctas_per_sm >= 2
    assert isinstance(many[1], str)
    assert "tile_n 8" in many[1]
    assert told == [(1, 2), (2, 2)]


def _inputs(torch, problem):
    generator = torch.Generator().manual_seed(0)

    def one(length, heads):
        return torch.randn((problem.batch, length, heads, problem.head_dim), generator=generator).bfloat16()

    keys = problem.kv_len, problem.kv_heads
    return one(problem.q_len, problem.heads), one(*keys), one(*keys)


def test_the_reference_is_attention():
    torch = pytest.importorskip("torch")
    problem = AttentionProblem(1, 2, 2, 24, 40, 16, bf16)
    q, k, v = _inputs(torch, problem)
    heads_first = [x[0].transpose(0, 1).double().numpy() for x in (q, k, v)]
    other = attention_reference(*heads_first, dtype=bf16)
    expected, magnitude = reference(torch, q, k, v, problem)
    torch.testing.assert_close(expected[0].transpose(0, 1), torch.from_numpy(other.output))
    torch.testing.assert_close(magnitude[0].transpose(0, 1), torch.from_numpy(other.magnitude))


@pytest.mark.filterwarnings("ignore::warploom.core.errors.EmulationWarning")
@pytest.mark.parametrize(
    "changes", [{}, {"window": (None, 0)}, {"window": (20, 3)}, {"softcap": 2.0, "scale": 0.3}, {"q_len": 80}]
)
def test_right_results_pass_and_wrong_ones_do_not(changes):
    """What the kernel computes on the emulator is right; one wrong row, a NaN or another mask is not."""
    torch = pytest.importorskip("torch")
    import warploom

    problem = replace(AttentionProblem(1, 4, 2, 40, 64, 64, bf16), **changes)
    q, k, v = _inputs(torch, problem)
    p = problem
    out = warploom.attention(q, k, v, window=p.window, softcap=p.softcap, scale=p.scale, config=SMALL)
    expected = reference(torch, q, k, v, problem)

    def error(found):
        return relative_error(torch, found, *expected, "bf16")

    assert error(out) <= 1
    late = out.clone()
    late[0, -1] = out[0, -2]
    assert error(late) > 10
    late[0, 3, 1, 5] = float("nan")
    assert error(late) == float("inf")
    other = warploom.attention(q, k, v, window=(5, 5), softcap=p.softcap, scale=p.scale, config=SMALL)
    assert error(other) > 10


@pytest.mark.gpu
def test_tuning_on_a_gpu(tmp_path):
    from warploom.tune.gpu import gpu_for_tuning
    from warploom.tune.tuner import Effort, Tuner
    from warploom.winners.store import WinnerStore

    class Narrow(AttentionFamily):
        def spaces(self, problem, goal):
            return tuple(replace(s, together=("tile_n",)) for s in super().spaces(problem, goal))

    gpu = gpu_for_tuning()
    # A class of this function cannot be pickled: one process.
    build = partial(build_all, workers=1)
    tuner = Tuner(Narrow(), gpu, WinnerStore(tmp_path), effort=Effort(variant_passes=0), build=build)
    outcome = tuner.tune(AttentionProblem(2, 4, 4, 1024, 1024, 128, bf16, (None, 0)))
    assert outcome.winner is not None
    assert outcome.winner.gpu == gpu.name
    assert outcome.winner.speedup >= 0.97
    assert not any("wrong" in reason for reason in outcome.dropped)


def test_without_a_gpu_the_tuner_says_so(monkeypatch):
    from warploom.core.errors import UnsupportedDeviceError

    def missing():
        raise UnsupportedDeviceError("the installed PyTorch sees no GPU")

    monkeypatch.setattr(tuned_attention, "torch_module", missing)
    with pytest.raises(UnsupportedDeviceError, match="sees no GPU"):
        FAMILY.workload(PROBLEM, 0)


class CpuTorch:
    """PyTorch whose GPU is the CPU: enough for a workload's inputs."""

    def __init__(self, torch):
        self._torch = torch
        self.cuda = SimpleNamespace(
            get_device_properties=lambda device: SimpleNamespace(L2_cache_size=20000), synchronize=lambda device: None
        )

    def __getattr__(self, name):
        return getattr(self._torch, name)

    def device(self, *_):
        return self._torch.device("cpu")

    def Generator(self, _):  # noqa: N802 - PyTorch's name
        return self._torch.Generator()


class EmulatedCall:
    """A GpuCall that runs the Program on the emulator, with the scalars and grid it was given."""

    made: ClassVar[list["EmulatedCall"]] = []
    broken = False

    def __init__(self, kernel, grid, scalars, device, mapped):
        assert mapped == ()  # mma.sync
        self.program, self.grid, self.scalars = kernel.program, grid, scalars
        self.launches = []
        EmulatedCall.made.append(self)

    def launch(self, views, kind):
        assert kind == "torch"
        self.launches.append(views)
        if self.broken:
            return
        names = [p.name for p in self.program.parameters if p.kind == "scalar"]
        arrays = dict(zip(("q", "key", "value", "out", "lse"), map(as_numpy, views), strict=False))
        values = arrays | dict(zip(names, (s.value for s in self.scalars), strict=True))
        emulate(self.program, self.grid, {p.name: values[p.name] for p in self.program.parameters})


def test_a_workload_checks_and_runs_what_was_built(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(tuned_attention, "torch_module", lambda: CpuTorch(torch))
    monkeypatch.setattr(tuned_attention, "GpuCall", EmulatedCall)
    monkeypatch.setattr(EmulatedCall, "made", [])
    monkeypatch.setattr("warploom.cuda.launch.load", lambda kernel, device: kernel)
    problem = AttentionProblem(2, 2, 1, 72, 72, 64, bf16, (None, 0), lse=True)
    program = FAMILY.program(problem, SMALL)
    kernel = KernelStandIn(program)
    built = Built(kernel, program.threads, program.shared_bytes, kernel.scalars)  # pyright: ignore[reportArgumentType]
    workload = FAMILY.workload(problem, 0)
    assert workload.sets == 2
    assert workload.answers()
    assert workload.fault(SMALL, built) is None
    assert EmulatedCall.made[-1].grid == (2, 2, 1), "one batch"
    run = workload.prepare(SMALL, built)
    run(0)
    run(1)
    inputs = [views[0].pointer for views in EmulatedCall.made[-1].launches]
    outputs = {views[3].pointer for views in EmulatedCall.made[-1].launches}
    assert len(set(inputs)) == 2, "input sets rotate"
    assert len(outputs) == 1
    assert EmulatedCall.made[-1].grid == (2, 2, 2)
    monkeypatch.setattr(EmulatedCall, "broken", True)
    assert "wrong results (error inf" in str(workload.fault(SMALL, built))


class KernelStandIn:
    """A loaded kernel whose configuration is its grid."""

    def __init__(self, program):
        self.parameters = program.parameters
        self.scalars = tuple(p.name for p in program.parameters if p.kind == "scalar")
        self.program = program

    def __getattr__(self, name):
        return getattr(self.program, name)

    def configure(self, grid, threads, *, shared_bytes):
        assert (threads, shared_bytes) == (self.program.threads, self.program.shared_bytes)
        return grid
