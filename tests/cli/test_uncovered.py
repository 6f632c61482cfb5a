"""What ``warploom check`` says that an example leaves unexercised, beside twins that exercise it."""

import json
import textwrap

import pytest

KERNELS = """
    import numpy as np
    from warploom.lang import Global, Kernel, Launch, f32, kernel, u32

    @kernel(threads=32)
    def doubled(k: Kernel, x: Global[f32], y: Global[f32], n: u32, rounds: u32) -> None:
        base = k.cta_x * 32
        with k.when(base + k.lane < n):
            y.store(x.load(base + k.lane) * 2.0, base + k.lane)
        with k.loop(rounds):
            k.syncwarp()
        with k.when(n > 40):
            k.syncwarp()

    @doubled.example
    def launch(rng: np.random.Generator) -> Launch:
        n = SIZE
        x = DATA.astype(np.float32)
        return Launch(GRID, [x, np.full(n, np.nan, np.float32), n, ROUNDS], {"y": (x * 2, 0)})
"""
USED = {"SIZE": "60", "DATA": "rng.standard_normal(n)", "GRID": "2", "ROUNDS": "3"}
CASES = {
    "nothing": ({}, {}),
    "a mask": ({"SIZE": "64"}, {"mask": "base + k.lane < n"}),
    "a loop": ({"ROUNDS": "1"}, {"loop": "k.loop(rounds)"}),
    "a loop that never runs": ({"ROUNDS": "0"}, {"loop": "k.loop(rounds)"}),
    "the grid": ({"SIZE": "20", "GRID": "1"}, {"grid": "k.cta_x", "branch": "n > 40"}),
    "data": ({"DATA": "np.ones(n)"}, {"data": "@kernel("}),
}


def found(invoke, tmp_path, source, name="kernels.py"):
    file = tmp_path / name
    file.write_text(textwrap.dedent(source))
    result = invoke("check", str(file), "--json")
    assert result.exit_code == 0, result.output
    (one,) = json.loads(result.stdout)["kernels"]
    lines = file.read_text().splitlines()
    shown = invoke("check", str(file)).stdout
    for missed in one["uncovered"]:
        assert missed["file"] == str(file)
        assert f"not exercised: {missed['where']}: " in " ".join(shown.split())
    missed = [(x["kind"], lines[int(x["where"].partition(":")[2]) - 1]) for x in one["uncovered"]]
    return missed, " ".join(shown.split())


@pytest.mark.parametrize("case", CASES)
def test_what_an_example_leaves_out_is_named_with_its_line(invoke, tmp_path, case):
    changes, expected = CASES[case]
    source = KERNELS
    for name, value in (USED | changes).items():
        source = source.replace(name, value)
    missed, shown = found(invoke, tmp_path, source)
    missed = [x for x in missed if x[0] != "mask" or "n > 40" not in x[1]]  # which is of all threads alike
    assert sorted(kind for kind, _ in missed) == sorted(expected)
    assert all(expected[kind] in line for kind, line in missed)
    assert "no findings" in shown


RING = """
    import ml_dtypes
    import numpy as np
    from warploom.lang import Global, Kernel, Launch, TensorMap, bf16, f32, kernel, u32
    from warploom.layout.tensor_map import TensorMapSpec
    from warploom.tile.pipeline import Boxes, Pipeline, operand_tile, ready

    @kernel(threads=64, requires="sm_90a")
    def last(k: Kernel, a: TensorMap, out: Global[u32], steps: u32) -> None:
        tile = operand_tile(k, bf16, 16, 64, name="A", stages=3)
        ring = Pipeline(k, (tile, Boxes(a)), readers=1)
        ready(k, ring)
        with k.warps(0, 1), k.when(k.thread == 0):
            put = ring.producer()
            with k.loop(steps) as i:
                put.put((i * 16,))
        with k.warps(1, 2):
            get = ring.consumer(ahead=True)
            with k.loop(steps) as i:
                held = get.wait()
                EARLY
                out.store(held.load(k.lane & 15, 0, dtype=u32), i * 32 + k.lane)
                LATE
                get.advance()

    @last.example
    def launch(rng: np.random.Generator) -> Launch:
        a = rng.standard_normal((STEPS * 16, 64)).astype(ml_dtypes.bfloat16)
        spec = TensorMapSpec(bf16, (64, STEPS * 16), (128,), (64, 16), 128)
        return Launch(1, [(a, spec), np.zeros(STEPS * 32, np.uint32), STEPS])
"""


def ring(steps, early=False):
    release = ("get.release()", "pass") if early else ("pass", "k.syncwarp(); get.release()")
    return RING.replace("EARLY", release[0]).replace("LATE", release[1]).replace("STEPS", str(steps))


@pytest.mark.parametrize(("steps", "missed"), [(3, True), (4, True), (6, False), (8, False)])
def test_stages_that_are_filled_once_are_named(invoke, tmp_path, steps, missed):
    kinds, shown = found(invoke, tmp_path, ring(steps))
    assert ("stages" in dict(kinds)) == missed
    assert ("the 3 stages of A" in shown) == missed
    assert ("take at least 6 steps" in shown) == missed


def test_a_stage_given_back_too_early_is_found_with_the_steps_that_are_asked_for(invoke, tmp_path):
    file = tmp_path / "kernels.py"
    file.write_text(textwrap.dedent(ring(6, early=True)))
    result = invoke("check", str(file))
    assert result.exit_code == 1
    assert "get.release()" in result.stdout
