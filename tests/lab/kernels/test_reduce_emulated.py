"""The reduction kernels on the emulator: right to float32, without findings, with the traffic the ladder tells of."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from tests.kernels.mutate import deletions
from tests.project import load
from warploom.core.dtypes import bf16, f16
from warploom.core.errors import ConfigError, WarploomError
from warploom.emulate import emulate
from warploom_lab.kernels.reduce.config import ReduceConfig
from warploom_lab.kernels.reduce.ladder import LADDER, SETTINGS
from warploom_lab.kernels.reduce.reference import row_max_reference, row_max_tolerance
from warploom_lab.kernels.reduce.tile import matmul_row_max

RUNGS = {rung.key: rung.config for rung in LADDER.rungs}
FUSED = load("fused_softmax", "examples")
CTAS = 3


def run(config: ReduceConfig, program=None, seed=None, values=None):
    """(result, inputs, emulation) of random tiles."""
    program = program or matmul_row_max.trace(config=config)
    tiles = CTAS * config.num_warps
    rng = np.random.default_rng(7)
    a, b = values or (rng.standard_normal((tiles, 16, 16)).astype(config.dtype.numpy) for _ in range(2))
    out = np.full((tiles, 16), np.nan, np.float32)
    given = {
        "a": a.view(np.uint16),
        "b": b.view(np.uint16),
        "out": out,
        "cycles": np.zeros(tiles, np.uint64),
        "zero": 0,
    }
    done = emulate(program, CTAS, {p.name: given[p.name] for p in program.parameters}, seed=seed)
    return out, (a, b), done


def is_right(out, inputs) -> bool:
    return bool((np.abs(out - row_max_reference(*inputs)) <= row_max_tolerance(*inputs)).all())


@pytest.mark.parametrize("dtype", [bf16, f16])
@pytest.mark.parametrize(("repeats", "warps"), [(1, 1), (4, 1), (6, 3)])
@pytest.mark.parametrize("key", RUNGS)
def test_every_rung_is_right_in_every_setting(key, repeats, warps, dtype):
    config = replace(RUNGS[key], repeats=repeats, num_warps=warps, dtype=dtype)
    for seed in (None, 3):
        out, inputs, done = run(config, seed=seed)
        assert done.findings == ()
        assert is_right(out, inputs)


@pytest.mark.parametrize("position", [(0, 0), (7, 9), (8, 0), (15, 15), (3, 8)])
@pytest.mark.parametrize("key", RUNGS)
def test_the_largest_element_is_found_wherever_it_is(key, position):
    row, col = position
    a, b = np.zeros((2, CTAS, 16, 16), bf16.numpy)
    a[:, row, 0] = 1.0
    b[:, :, 0] = -2.0
    b[:, col, 0] = 3.0
    out, _, _ = run(RUNGS[key], values=(a, b))
    assert out[0, row] == 3.0
    assert (np.delete(out[0], row) == 0.0).all()


def test_bank_conflicts_are_the_papers_and_none_in_the_fair_kernel():
    serial, wide, fair = (run(RUNGS[key])[2].traffic.shared for key in ("1", "1w", "2"))
    assert (serial["ld.shared"].actual, serial["ld.shared"].ideal) == (CTAS * 128, CTAS * 16)
    assert wide["ld.shared"].actual == CTAS * 32
    assert {name: w.conflicts for name, w in fair.items()} == {"ld.shared": 0, "st.shared": 0}
    assert run(RUNGS["4"])[2].traffic.shared == {}


@pytest.mark.parametrize("key", RUNGS)
def test_shared_memory_barriers_and_shuffles_are_those_of_the_papers_table(key):
    config = RUNGS[key]
    program = matmul_row_max.trace(config=config)
    kinds = [op.instruction.mnemonic for op in program.ops()]
    in_registers = config.method == "registers"
    assert program.shared_bytes == (0 if in_registers else 1024)
    assert kinds.count("bar.sync") == (1 if config.method == "serial" else 0)
    shuffles = sum(op.instruction.exchange is not None for op in program.ops())
    assert shuffles == {"serial": 0, "parallel": 1, "registers": 2 if config.spread else 4}[config.method]


@pytest.mark.parametrize("repeats", [1, 4])
@pytest.mark.parametrize("key", ["1", "1w", "2"])
def test_each_barrier_is_needed(key, repeats):
    config = replace(RUNGS[key], repeats=repeats, num_warps=2)
    mutants = deletions(matmul_row_max.trace(config=config))
    assert mutants
    for mutant in mutants:
        try:
            out, inputs, done = run(config, mutant.program)
        except WarploomError:
            continue
        assert done.findings or not is_right(out, inputs), mutant.what


@pytest.mark.parametrize(
    ("wrong", "text"),
    [
        (ReduceConfig(repeats=3), "repeats is 1 or even"),
        (ReduceConfig(num_warps=0), "num_warps"),
        (ReduceConfig("registers", wide=True), "wide is for serial"),
        (ReduceConfig("magic"), "method is"),  # type: ignore[arg-type]
    ],
)
def test_what_is_no_kernel_is_refused(wrong, text):
    with pytest.raises(ConfigError, match=text):
        matmul_row_max.trace(config=wrong)


def test_settings_are_the_three_of_the_experiment():
    assert [s.name for s in SETTINGS] == ["launch", "loop", "grid"]
    assert all(not s.of(config).check() for s in SETTINGS for config in RUNGS.values())


# -- Algorithm 4


@pytest.mark.parametrize("blocks", [1, 2, 5])
@pytest.mark.parametrize("quad_masks", [False, True])
@pytest.mark.parametrize("in_every_tile", [False, True])
@pytest.mark.parametrize("dtype", [bf16, f16])
def test_the_fused_softmax_keeps_its_statistics(in_every_tile, quad_masks, blocks, dtype):
    program = FUSED.softmax_tile.trace(in_every_tile=in_every_tile, quad_masks=quad_masks, dtype=dtype)
    rng = np.random.default_rng(blocks)
    q, keys, values = (
        (rng.standard_normal((n, 16)) * scale).astype(dtype.numpy)
        for n, scale in ((16, 3), (16 * blocks, 3), (16 * blocks, 1))
    )
    out, maxima, sums = np.full((16, 16), np.nan, np.float32), np.zeros(16, np.float32), np.zeros(16, np.float32)
    arrays = [x.view(np.uint16) for x in (q, keys, values)]
    done = emulate(program, 1, [*arrays, out, maxima, sums, blocks])
    assert done.findings == ()
    assert done.traffic.shared == {}
    expected = FUSED.Expected.of(q, keys, values)
    assert np.allclose(maxima, expected.maxima, rtol=1e-6, atol=1e-6)
    assert np.allclose(sums, expected.sums, rtol=1e-5)
    rounding = {"bf16": 2.0**-8, "f16": 2.0**-11}[dtype.name]
    allowed = 2 * rounding * np.abs(values.astype(np.float64)).max()  # P is rounded before P·V
    assert np.abs(out - expected.out).max() <= allowed


def test_the_softmax_moves_no_data_to_make_p_an_operand():
    program = FUSED.softmax_tile.trace()
    shuffles = [op for op in program.ops() if op.instruction.exchange is not None]
    assert len(shuffles) == 2 * 2 * 2  # max and sum, of two rows, over two lane bits
