"""Attention's part of the tuner: its space, its kernels built in other processes, and the check of its results."""

import copy
import pickle
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.kernels.attention_cases import changed
from tests.tune.workloads import CpuTorch, EmulatedAttention
from warploom.core.dtypes import DTYPES, bf16, f16
from warploom.core.errors import ConfigError, ProblemError
from warploom.core.targets import target
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.problem import AttentionProblem, Even
from warploom.kernels.settings import read
from warploom.measure import attention as measured
from warploom.measure import workload as on_gpu
from warploom.measure.attention import checked_problem, torch_error
from warploom.tune.attention import ATTENTION
from warploom.tune.build import Built, build_all
from warploom.tune.operation import neighbours

PROBLEM = AttentionProblem(4, 16, 16, Even(4096, 4096), 128, bf16)
SMALL = ForwardSm80(tile_m=64, tile_n=32, num_warps=4, head_dim=64)


def candidates(problem, arch):
    found = dict.fromkeys(ATTENTION.space(problem, target(arch)))
    return [c for c in found if not ATTENTION.violations(c, problem, target(arch))]


@pytest.mark.parametrize("head_dim", [64, 96, 256])
@pytest.mark.parametrize("arch", ["sm_86", "sm_90a"])
def test_the_space_is_small_and_fits(arch, head_dim):
    problem = replace(PROBLEM, head_dim=head_dim, heads=2048 // head_dim, kv_heads=2048 // head_dim)
    found = candidates(problem, arch)
    assert 1 <= len(found) <= 250
    assert {c.head_dim for c in found} == {head_dim}
    assert any(c.requires == "sm_90a" for c in found) == (arch == "sm_90a")
    default, _ = ATTENTION.choose(problem, target(arch))
    assert ATTENTION.violations(default, problem, target(arch)) == []
    for config in found:
        assert read(str(config), ATTENTION.kinds) == config


def test_what_the_space_leaves_out_is_tried_one_at_a_time():
    default, _ = ATTENTION.choose(PROBLEM, target("sm_90a"))
    changed = {
        name
        for c in neighbours(default, ATTENTION.fixed)
        for name in vars(c)
        if getattr(c, name) != getattr(default, name)
    }
    assert {"q_in_registers", "sum_column", "skip_masked", "stages"} <= changed
    assert not changed & {"dtype", "head_dim"}


@settings(deadline=None, max_examples=40)
@given(data=st.data())
def test_results_are_checked_on_the_kernel_that_is_timed(data):
    arch = data.draw(st.sampled_from(["sm_80", "sm_90a"]))
    q_len = data.draw(st.integers(300, 20000))  # fewer on many keys are not tuned
    kv_len = data.draw(st.one_of(st.just(q_len), st.integers(1, 20000)))
    kv_heads = data.draw(st.sampled_from([1, 2, 8]))
    window = data.draw(st.sampled_from([(None, None), (None, 0), (64, 0)]))
    problem = AttentionProblem(3, 8, kv_heads, Even(q_len, kv_len), 128, bf16, window=window)
    config = data.draw(st.sampled_from(candidates(problem, arch)))
    checked = checked_problem(problem, config)
    assert ATTENTION.source(checked, config) == ATTENTION.source(problem, config)
    assert max(checked.q_len, checked.kv_len) <= 512 + 2 * 192 * 176 or q_len != kv_len


def test_few_queries_on_many_keys_are_refused():
    with pytest.raises(ProblemError, match="nothing to tune: 1 queries on 4096 keys"):
        ATTENTION.choose(AttentionProblem(3, 8, 2, Even(1, 4096), 128, bf16), target("sm_80"))
    with pytest.raises(ConfigError, match=r"attention_sm90.*attention_sm80"):
        read("attention_decode(head_dim=128)", ATTENTION.kinds)


def test_a_type_is_the_same_object_in_another_process():
    for dtype in DTYPES.values():
        assert pickle.loads(pickle.dumps(dtype)) is dtype
        assert copy.deepcopy(dtype) is dtype
    assert pickle.loads(pickle.dumps(PROBLEM)) == PROBLEM


@pytest.mark.parametrize("cores", [1, 2])
def test_kernels_are_built_in_processes_as_in_this_one(cores, monkeypatch):
    pytest.importorskip("cuda.core")
    monkeypatch.setattr("warploom.cuda.compile.available_cores", lambda: cores)
    problem = AttentionProblem(1, 2, 2, Even(128, 128), 64, f16)
    config = replace(SMALL, dtype=f16)
    told = []
    sources = [ATTENTION.source(problem, c) for c in (config, replace(config, tile_n=8))]
    built, broken = build_all(sources, "sm_80", lambda *p: told.append(p))
    assert isinstance(built, Built)
    assert (built.threads, built.shared_bytes, built.faults(target("sm_80"))) == (128, config.shared_bytes, [])
    assert isinstance(broken, str)
    assert told == [(1, 2), (2, 2)]


@pytest.mark.parametrize("changes", [{}, {"window": (20, 3)}, {"softcap": 2.0, "scale": 0.3}, {"q_len": 80}])
def test_right_results_pass_and_wrong_ones_do_not(changes):
    """What the kernel computes on the emulator is right; one wrong row, a NaN or another mask is not."""
    torch = pytest.importorskip("torch")
    import warploom

    problem = p = changed(AttentionProblem(1, 4, 2, Even(40, 64), 64, bf16), **changes)
    generator, of_keys = torch.Generator().manual_seed(0), (1, p.kv_len, p.kv_heads, p.head_dim)
    shapes = (1, p.q_len, p.heads, p.head_dim), of_keys, of_keys
    q, k, v = (torch.randn(shape, generator=generator).bfloat16() for shape in shapes)
    out = warploom.attention(q, k, v, window=p.window, softcap=p.softcap, scale=p.scale, config=SMALL)

    def error(found):
        return torch_error(found, q, k, v, bf16, problem).value

    assert error(out) <= 1
    late = out.clone()
    late[0, -1] = out[0, -2]
    assert error(late) > 10
    late[0, 3, 1, 5] = float("nan")
    assert error(late) == float("inf")
    other = warploom.attention(q, k, v, window=(5, 5), softcap=p.softcap, scale=p.scale, config=SMALL)
    assert error(other) > 10


def test_a_workload_checks_and_runs_the_configuration(monkeypatch):
    torch = pytest.importorskip("torch")
    monkeypatch.setattr(on_gpu, "torch_module", lambda: CpuTorch(torch))
    monkeypatch.setattr(measured, "GpuCall", EmulatedAttention)
    monkeypatch.setattr(EmulatedAttention, "made", [])
    workload = ATTENTION.workload(AttentionProblem(2, 2, 1, Even(72, 72), 64, bf16, window=(None, 0), lse=True), 0)
    assert workload.sets == 2
    assert workload.answers()
    assert workload.fault(SMALL) is None
    assert EmulatedAttention.made[-1].call.grid == (2, 2, 1), "one batch"
    run = workload.prepare(SMALL)
    run(0)
    run(1)
    made = EmulatedAttention.made[-1]
    assert len({q for q, *_ in made.launches}) == 2, "input sets rotate"
    assert len({of[3] for of in made.launches}) == 1
    assert made.call.grid == (2, 2, 2)
    monkeypatch.setattr(EmulatedAttention, "broken", True)
    assert "wrong results (error inf" in str(workload.fault(SMALL))


@pytest.mark.gpu
def test_tuning_on_a_gpu():
    from warploom.tune.tuner import Effort, Tuner, gpu_for_tuning

    def few(problem, target):
        return iter([c for c in ATTENTION.space(problem, target) if c.tile_m == 128][:8])

    gpu = gpu_for_tuning()
    tuner = Tuner(replace(ATTENTION, space=few), gpu, effort=Effort(passes=0))
    outcome = tuner.tune(AttentionProblem(2, 4, 4, Even(1024, 1024), 128, bf16, window=(None, 0)))
    assert outcome.found is not None
    assert outcome.found.gpu == gpu.name
    assert outcome.found.speedup >= 0.97
    assert not any("wrong" in reason for reason in outcome.dropped)
