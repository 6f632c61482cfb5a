"""Tuned configurations: kept in files, found again, taken by calls, and whole whatever happens to the files."""

import json
import os
import stat
import sys
import warnings
from dataclasses import asdict, replace

import pytest

from tests.kernels.attention_cases import changed
from tests.processes import holds_in_forked_child
from warploom.core.dtypes import bf16, f16, f32
from warploom.core.targets import target
from warploom.kernels.attention import choice as attention_choice
from warploom.kernels.attention.forward_sm80 import ForwardSm80
from warploom.kernels.attention.problem import AttentionProblem, Even
from warploom.kernels.matmul import choice as matmul_choice
from warploom.kernels.matmul.choice import BEST32
from warploom.kernels.matmul.problem import contiguous_problem
from warploom.kernels.matmul.sm90 import MatmulSm90
from warploom.ops import tuned
from warploom.ops.tuned import Tuned, find, keep, kept

GPU = "NVIDIA Test 9000"
SM90, SM80 = target("sm_90a"), target("sm_80")
ATTENTION = AttentionProblem(4, 16, 16, Even(4096, 4096), 128, bf16)
SMALL = ForwardSm80(tile_m=128, num_warps=4, tile_n=32, stages=3)
PRODUCT = contiguous_problem(4096, 4096, 4096, f16)
CLASS = "one"


@pytest.fixture(autouse=True)
def folder(tmp_path, monkeypatch):
    monkeypatch.setenv("WARPLOOM_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(tuned, "gpu_name", lambda device: GPU)
    return tuned.folder()


def sample(config="best", size_class=CLASS, **changes):
    made = Tuned(GPU, size_class, config, 1e-3, 0.9e-3, 1.1e-3, 1.25, 40, "2026-01-01", tuned.current_sources())
    return replace(made, **changes)


def file_of(folder):
    (path,) = folder.glob("*.json")
    return path


# -- files
def test_what_is_kept_is_found_again_and_the_last_one_counts():
    keep(sample("old"))
    keep(sample("new"))
    keep(sample(size_class="two"))
    assert find(GPU, CLASS) == sample("new")
    assert [x.config for x in kept()] == ["new", "best"]
    assert find("NVIDIA Other", CLASS) is None
    assert find(GPU, "three") is None


def test_what_other_sources_found_is_listed_and_not_used():
    keep(sample(sources="of another day"))
    assert find(GPU, CLASS) is None
    assert [x.current for x in kept()] == [False]


def test_a_file_under_another_name_is_not_this_class(folder):
    keep(sample())
    path = file_of(folder)
    keep(sample(size_class="two"))
    (other,) = set(folder.glob("*.json")) - {path}
    os.replace(path, other)
    assert find(GPU, "two") is None


OTHER_KINDS = asdict(Tuned(GPU, CLASS, "best", 0, 0, 0, 0, 0, "", "")) | {"seconds": "fast"}


@pytest.mark.parametrize(
    "damage",
    [
        b"\x00\xff\xfe garbage",
        b'{"half": ',
        b"[1, 2]",
        b"{}",
        b'{"seconds": Infinity}',
        b'{"a":' + b"[" * 10**5,
        b"1" * 10_000,
        json.dumps(OTHER_KINDS).encode(),
    ],
    ids=lambda damage: repr(damage[:20]),
)
def test_a_damaged_file_costs_a_warning_and_no_result(folder, damage):
    keep(sample())
    keep(sample(size_class="two"))
    next(iter(folder.glob("*.json"))).write_bytes(damage)
    with pytest.warns(RuntimeWarning, match=r"it is damaged.*warploom tune show"):
        found = [find(GPU, CLASS), find(GPU, "two")]
    assert found.count(None) == 1
    with pytest.warns(RuntimeWarning, match="it is damaged"):
        assert len(kept()) == 1


def test_a_search_that_died_while_keeping_leaves_the_file_before(folder, monkeypatch):
    keep(sample("old"))

    def dies(*_, **__):
        raise KeyboardInterrupt

    monkeypatch.setattr("os.replace", dies)
    with pytest.raises(KeyboardInterrupt):
        keep(sample("new"))
    assert find(GPU, CLASS) == sample("old")
    assert kept() == [sample("old")]


def test_a_full_disk_leaves_nothing_behind(folder, monkeypatch):
    keep(sample("old"))

    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("os.replace", full)
    with pytest.raises(OSError, match="No space"):
        keep(sample("new"))
    assert len(list(folder.iterdir())) == 1
    assert find(GPU, CLASS) == sample("old")


@pytest.mark.skipif(sys.platform == "win32", reason="pipes, links and permission bits")
@pytest.mark.parametrize("kind", ["pipe", "link", "open to others", "folder open to others", "folder", "linked folder"])
def test_a_file_that_others_can_have_written_costs_a_warning_only(folder, kind):
    keep(sample())
    path, aside = file_of(folder), folder.parent / "aside"
    if kind == "open to others":
        path.chmod(0o666)
    elif kind == "folder open to others":
        folder.chmod(0o777)
    elif kind == "linked folder":
        folder.rename(aside)
        folder.symlink_to(aside)
    else:
        path.rename(aside)
        if kind == "pipe":
            os.mkfifo(path)
        elif kind == "folder":
            path.mkdir()
        else:
            path.symlink_to(aside)

    def reads_nothing() -> bool:
        with pytest.warns(RuntimeWarning, match="no tuned configuration that can be used"):
            return find(GPU, CLASS) is None

    assert holds_in_forked_child(reads_nothing)


@pytest.mark.skipif(sys.platform == "win32", reason="permission bits")
def test_the_folder_and_its_files_are_the_users_alone(folder):
    before = os.umask(0)
    try:
        keep(sample())
    finally:
        os.umask(before)
    made = [folder.parent, *folder.parent.rglob("*")]
    assert {stat.S_IMODE(path.stat().st_mode) & 0o077 for path in made} == {0}


# -- calls
def taken(problem, goal=SM90):
    parse = attention_choice.KINDS if isinstance(problem, AttentionProblem) else matmul_choice.KINDS
    return tuned.tuned(problem, goal, 0, parse)


def keep_for(problem, config):
    keep(sample(str(config), problem.size_class))


@pytest.mark.parametrize(
    ("problem", "config"), [(ATTENTION, SMALL), (PRODUCT, BEST32), (PRODUCT, MatmulSm90(stages=3))], ids=repr
)
def test_a_tuned_configuration_goes_before_the_default(problem, config):
    assert taken(problem) is None
    keep_for(problem, config)
    found = taken(problem)
    assert found is not None
    assert found[0] == config
    assert found[1].startswith(f"tuned on {GPU} for {problem.size_class}: 1 ms")
    assert tuned.tuned(problem, SM90, None, matmul_choice.KINDS) is None, "no GPU, nothing tuned"


def test_a_later_search_of_this_process_counts():
    keep_for(ATTENTION, SMALL)
    assert taken(ATTENTION) is not None
    later = replace(SMALL, tile_n=64)
    keep_for(ATTENTION, later)
    found = taken(ATTENTION)
    assert found is not None
    assert found[0] == later


def test_lengths_share_a_class_up_to_a_factor():
    assert ATTENTION.of_lengths(4000, 4000).size_class == ATTENTION.size_class
    for change in ({"q_len": 2048, "kv_len": 2048}, {"head_dim": 64}, {"dtype": f16}, {"window": (None, 0)}):
        assert changed(ATTENTION, **change).size_class != ATTENTION.size_class
    long = ATTENTION.of_lengths(2**14, 2**14, batch=1)
    assert long.of_lengths(2**17, 2**17).size_class == long.size_class, "beyond, nothing changes"


@pytest.mark.parametrize(
    "changes",
    [{"b_rows": False}, {"accumulate": f16}, {"out_dtype": f32}, {"n": 4097}, {"m": 16}, {"m": 1024, "n": 1024}],
    ids=repr,
)
def test_other_products_are_other_classes(changes):
    asked = {"m": 4096, "n": 4096, "k": 4096, "dtype": f16} | changes
    assert contiguous_problem(**asked).size_class != PRODUCT.size_class


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (ATTENTION, "nonsense"),
        (ATTENTION, "(BF16, 128, 64, 64, 4): async+no_such_flag"),
        (ATTENTION, str(replace(SMALL, tile_n=8))),
        (ATTENTION, str(replace(SMALL, head_dim=64))),
        (PRODUCT, "BM=24"),
        (PRODUCT, "nonsense"),
        (PRODUCT, str(replace(BEST32, tile_m=256, tile_n=256, stages=6))),
    ],
)
def test_what_is_of_no_use_leaves_the_default(problem, text):
    keep_for(problem, text)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert taken(problem) is None


def test_a_tuned_configuration_must_fit_the_target():
    keep_for(ATTENTION, ForwardSm80(tile_m=256, tile_n=128))
    assert taken(ATTENTION) is not None
    assert taken(ATTENTION, target("sm_86")) is None
    keep_for(PRODUCT, MatmulSm90())
    assert taken(PRODUCT) is not None
    assert taken(PRODUCT, SM80) is None


def test_the_default_says_that_it_is_untuned():
    assert "untuned" in attention_choice.choose(ATTENTION, SM90)[1]
    assert "untuned" in matmul_choice.choose(PRODUCT, SM90)[1]
