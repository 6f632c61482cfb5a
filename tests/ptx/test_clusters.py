"""Clusters in CUDA C++: the whole kernels, and each of their synchronisations taken away."""

from __future__ import annotations

import pytest

from tests.ptx.cluster_cases import MEMORY, MULTICAST
from tests.ptx.text import kinds

pytest.importorskip("cuda.bindings.nvrtc", reason="needs NVRTC")
from warploom.cuda.ptx import header_options

HEADERS = pytest.mark.skipif(len(header_options()) < 2, reason="needs the headers of CUDA and CCCL")
CASES = {"multicast": MULTICAST, "memory": MEMORY}


@pytest.mark.parametrize(
    ("name", "seed"),
    [
        ("multicast", None),
        ("multicast", 3),
        pytest.param("memory", None, marks=HEADERS),
    ],
)
def test_kernels_are_right_and_free_of_findings(name: str, seed: int | None) -> None:
    found, error = CASES[name].run(seed=seed)
    assert found.findings == ()
    assert error <= 1


MUTANTS = {
    "no fence of the mbarriers": ('asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");', ""),
    "no meeting at the start": ("barrier.cluster.arrive.relaxed.aligned; barrier.cluster.wait.acquire.aligned;", ""),
    "no meeting at the end": ("barrier.cluster.arrive.aligned; barrier.cluster.wait.aligned;", ""),
    "no wait for an empty stage": ("wait(&empty[s], (i >> 1 & 1) ^ 1);", ""),
    "no wait for a full stage": ("wait(&full[s], i >> 1 & 1);", ""),
    "lanes give a stage back that others still read": ("__syncwarp();", ""),
    "a stage is given back before it is read": ("if ((t & 31) < 2) {", "if ((t & 31) == 0) {"),
    "the producer expects its own bytes alone": ("[%0], 2048;", "[%0], 1024;"),
    "one CTA receives": ('"h"((short)3)', '"h"((short)1)'),
}


@pytest.mark.parametrize("name", MUTANTS)
def test_every_synchronisation_is_needed(name: str) -> None:
    old, new = MUTANTS[name]
    assert old in MULTICAST.source
    assert MULTICAST.run(MULTICAST.source.replace(old, new))[0].findings


@HEADERS
@pytest.mark.parametrize("which", [1, 2])
def test_both_meetings_around_remote_reads_are_needed(which: int) -> None:
    sync = "cluster.sync();"
    first, middle, last = MEMORY.source.split(sync)
    source = first + sync * (which != 1) + middle + sync * (which != 2) + last
    assert kinds(MEMORY.run(source)[0].findings) & {"race", "cluster", "uninitialised"}
