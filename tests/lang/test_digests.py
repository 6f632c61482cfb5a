"""Digests of Programs: equal for equal kernels, in every process, and of nothing else."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests.lang.support import traced_with
from warploom.lang import Global, Kernel, bf16, f32, kernel, u16, u32


def test_equal_kernels_have_equal_digests_and_lines_do_not_count():
    def body(k, out, x, n):
        out.store(n * 3, k.lane)

    def moved(k, out, x, n):
        # a comment moves the line
        out.store(n * 3, k.lane)

    def other(k, out, x, n):
        out.store(n * 5, k.lane)

    digests = [traced_with(b).trace().digest for b in (body, moved, other)]
    assert digests[0] == digests[1] != digests[2]


_DIGEST = """
import sys
sys.path[:0] = sys.argv[1:]
from warploom_lab.kernels.attention.ladder import LADDER
from tests.kernels.attention_cases import Case
print(*[Case.of_blocks(LADDER.rungs[i].config, 2).program.digest for i in (1, -1)])
"""


def test_digests_are_stable_across_processes():
    root = Path(__file__).parent.parent.parent
    found: set[str] = set()
    for seed in ("0", "12345"):
        paths = [str(root), *(p for p in sys.path if p)]
        done = subprocess.run(
            [sys.executable, "-c", _DIGEST, *paths],
            env={"PYTHONHASHSEED": seed, "PATH": ""},
            capture_output=True,
            text=True,
            check=True,
        )
        found.add(done.stdout)
    assert len(found) == 1
    assert len(found.pop().split()) == 2


@pytest.mark.parametrize("change", [{"scale": 2.0}, {"rows": 32}, {"shared": bf16}, {"cache": "cg"}, {"stages": 3}])
def test_everything_that_changes_the_kernel_changes_the_digest(change):
    @kernel(threads=32)
    def sample(k: Kernel, x: Global[u16], *, scale=1.0, rows=16, shared=u16, cache="", stages=2) -> None:
        tile = k.shared(shared, (rows, 64), name="tile", stages=stages)
        words = x.load(k.lane * 4, 2, dtype=u32, cache=cache)
        value = k.bitcast(words[0], f32) * scale
        k.store("shared", tile.address(0, k.lane * 2), u32, [k.bitcast(value, u32)], "", "weak")

    base, changed = sample.trace(), sample.trace(**change)
    if change == {"shared": bf16}:  # two names of 16 bits: the same kernel
        assert base.digest == changed.digest
    else:
        assert base.digest != changed.digest
