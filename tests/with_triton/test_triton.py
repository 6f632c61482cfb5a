"""Triton's kernels, compiled without a GPU: results, findings at the lines of the Python source, mutants of PTX."""
# pyright: basic, reportMissingImports=false

from __future__ import annotations

import re
from typing import Any

import numpy as np
import pytest

pytest.importorskip("triton")

import triton

import warploom
from tests.ptx.text import kinds
from tests.with_triton import kernels
from tests.with_triton.cases import CASES, HOPPER, Case, descriptors, own_descriptors
from tests.with_triton.known import KNOWN
from warploom.checking import foreign as bridge
from warploom.core.errors import EmulationError, ProblemError
from warploom.cuda.printer import print_cuda

VERSION = tuple(int(part) for part in re.findall(r"\d+", triton.__version__)[:3])


def run(case: Case, **options: Any) -> Any:
    return warploom.check_triton(case.kernel, case.grid, case.arguments, **case.meta, **options)


def unknown(name: str, findings: Any) -> list[Any]:
    """The findings that are none of those known of this version of Triton in this case."""
    rows = [row for row in KNOWN if row.expected(name, VERSION)]
    every = (finding for cause in findings for finding in (cause, *cause.follows))
    return [finding for finding in every if not any(row.explains(finding) for row in rows)]


@pytest.mark.parametrize("name", CASES)
def test_kernels_are_right_and_free_of_findings(name: str) -> None:
    case = CASES[name](np.random.default_rng(1))
    assert run(case, target="sm_80").findings == ()
    assert case.error() <= 1


@pytest.mark.parametrize("seed", [None, 3])
@pytest.mark.parametrize("name", CASES | HOPPER)
def test_findings_on_hopper_are_those_known_of_this_version(name: str, seed: int | None) -> None:
    case = (CASES | HOPPER)[name](np.random.default_rng(1))
    findings = run(case, target="sm_90", seed=seed).findings
    assert case.error() <= 1
    assert unknown(name, findings) == []
    every = [finding for cause in findings for finding in (cause, *cause.follows)]
    missing = [row for row in KNOWN if row.expected(name, VERSION) and not any(map(row.explains, every))]
    assert missing == []
    assert all(f.grade == ("error" if f.kind == "proxy" else "review") for f in every)


def test_an_adversarial_order_changes_nothing() -> None:
    case = CASES["attention"](np.random.default_rng(1))
    assert run(case, seed=3).findings == ()
    assert case.error() <= 1


def line_of(text: str) -> int:
    """The line of the kernels' file that has this text."""
    with open(kernels.__file__, encoding="utf-8") as file:
        return next(n for n, line in enumerate(file, 1) if text in line)


def test_an_access_out_of_bounds_names_the_line_of_the_kernel() -> None:
    case = CASES["add"](np.random.default_rng(0))
    case.arguments[3] = 3072
    findings = run(case).findings
    assert kinds(findings) == {"bounds"}
    assert {f.where.line for f in findings} == {line_of("tl.store(out + at, tl.load(x")}
    assert {f.where.file for f in findings} == {kernels.__file__}
    assert all("x" in f.message or "y" in f.message or "out" in f.message for f in findings)


def test_a_store_by_several_programs_is_a_race() -> None:
    case = CASES["add"](np.random.default_rng(0))
    case.grid = (3,)
    case.meta["BLOCK"] = 1024
    case.arguments[2] = np.lib.stride_tricks.as_strided(np.zeros(1, np.float32), (3000,), (0,))
    assert "race" in kinds(run(case).findings) or "bounds" in kinds(run(case).findings)


def test_two_programs_that_add_without_the_lock_race() -> None:
    """The same kernel with the lock's word of another group: nobody waits for anybody."""
    case = CASES["locks"](np.random.default_rng(0))
    x, sums, held, columns = case.arguments
    found = warploom.check_triton(kernels.row_sums_without_locks, 12, [x, sums, held, columns], **case.meta)
    assert kinds(found.findings) == {"race"}
    assert {f.where.line for f in found.findings} == {line_of("tl.store(rest, tl.load(rest")}


def test_arguments_by_name_and_a_grid_that_is_called() -> None:
    case = CASES["add"](np.random.default_rng(0))
    named: dict[str, Any] = dict(zip(("x", "y", "out", "n"), case.arguments, strict=True))
    warploom.check_triton(
        case.kernel, lambda meta: (meta["n"] // meta["BLOCK"] + 1,), named, BLOCK=512
    ).raise_if_found()
    assert case.error() <= 1


def test_the_fixture_raises_what_is_found(warploom_check: Any) -> None:
    case = CASES["add"](np.random.default_rng(0))
    assert warploom_check.triton(case.kernel, case.grid, case.arguments, **case.meta).findings == ()
    with pytest.raises(EmulationError, match=r"kernels\.py:\d+ \(PTX line"):
        warploom_check.triton(case.kernel, case.grid, [*case.arguments[:3], 3001], **case.meta)


def test_tensors_of_torch() -> None:
    torch = pytest.importorskip("torch")
    x = torch.arange(100, dtype=torch.bfloat16)
    out = torch.zeros(100, dtype=torch.bfloat16)
    warploom.check_triton(kernels.add, 1, [x, x, out, 100], BLOCK=128).raise_if_found()
    assert torch.equal(out, x + x)


def test_a_block_that_several_warps_load_and_one_overwrites_is_for_review() -> None:
    x = np.arange(50, dtype=np.float32)
    findings = warploom.check_triton(kernels.halve, 1, [x, 50], BLOCK=64, num_warps=4).findings
    assert (x == np.arange(50) / 2).all()
    assert {(f.kind, f.grade) for f in findings} == {("race", "review")}


def test_a_number_that_all_warps_load_and_one_overwrites_is_an_error() -> None:
    x, out = np.ones(512, np.float32), np.zeros(512, np.float32)
    findings = warploom.check_triton(kernels.halve_and_spread_the_first, 1, [x, out], BLOCK=512).findings
    assert {(f.kind, f.grade) for f in findings} == {("race", "error")}


def test_numbers_and_arrays_by_keyword_as_at_a_launch() -> None:
    case = CASES["add"](np.random.default_rng(0))
    x, y, out, n = case.arguments
    warploom.check_triton(case.kernel, case.grid, [x, y], out=out, n=n, **case.meta).raise_if_found()
    assert case.error() <= 1


def test_a_tensor_without_dimensions_is_a_pointer() -> None:
    torch = pytest.importorskip("torch")
    one, total = torch.tensor(3.0), torch.tensor(float("nan"))
    warploom.check_triton(kernels.add, 1, [one, one, total, 1], BLOCK=32).raise_if_found()
    assert total == 6


def test_a_kernel_in_a_wrapper_of_a_package() -> None:
    class Entry(triton.KernelInterface):
        """As packages wrap kernels, to keep what they have compiled."""

        def __init__(self, fn: Any) -> None:
            self.fn, self.arg_names = fn, fn.arg_names

    case = CASES["add"](np.random.default_rng(0))
    warploom.check_triton(Entry(case.kernel), case.grid, case.arguments, **case.meta).raise_if_found()
    assert case.error() <= 1


@pytest.mark.parametrize(
    ("arguments", "options", "message"),
    [
        ([1], {}, "missing arguments"),
        ({"z": 1}, {}, "unknown arguments"),
        ([1, 2, 3, 4, 5, 6], {}, "takes 5"),
        ([np.zeros(4, np.float32)] * 3 + [4], {"target": "turing"}, "sm_80"),
        ([np.zeros(4, np.float32), "text", np.zeros(4, np.float32), 4], {}, "y"),
    ],
)
def test_arguments_that_do_not_fit(arguments: Any, options: Any, message: str) -> None:
    with pytest.raises((ProblemError, TypeError), match=message):
        warploom.check_triton(kernels.add, 1, arguments, BLOCK=128, **options)


def test_what_is_no_kernel() -> None:
    with pytest.raises(ProblemError, match=r"@triton\.jit"):
        warploom.check_triton(np.add, 1, [])


def test_the_first_configuration_of_an_autotuned_kernel() -> None:
    tuned = triton.autotune([triton.Config({"BLOCK": 256}, num_warps=2), triton.Config({"BLOCK": 512})], ["n"])
    case = CASES["add"](np.random.default_rng(0))
    found = warploom.check_triton(tuned(kernels.add), case.grid, case.arguments)
    assert case.error() <= 1
    assert found.program.threads == 64


def test_the_program_prints_as_cuda_with_the_lines_of_the_kernel() -> None:
    pytest.importorskip("cuda.core")
    from warploom.cuda.compile import compile_source

    found = run(CASES["matmul"](np.random.default_rng(0)))
    text = print_cuda(found.program)
    assert "a_tile = tl.load(a_at" in text
    assert compile_source(text, found.program.name, arch="sm_80", cache=False).cubin


def test_tensor_descriptors_are_refused_below_hopper() -> None:
    with pytest.raises(ProblemError, match="set target"):
        run(descriptors(np.random.default_rng(0)), target="sm_80")


def test_tensor_maps_of_the_kernel_print_as_cuda() -> None:
    pytest.importorskip("cuda.core")
    from warploom.cuda.compile import compile_source

    text = print_cuda(run(own_descriptors(np.random.default_rng(0)), target="sm_90").program)
    assert compile_source(text, "matmul_with_own_descriptors", arch="sm_90a", cache=False).cubin


def test_fences_of_tensor_maps_are_needed(monkeypatch: pytest.MonkeyPatch) -> None:
    case = own_descriptors(np.random.default_rng(0))
    checked = bridge.check_ptx
    for fence in ("tensormap.cp_fenceproxy", "fence.proxy.tensormap"):
        without = re.compile(rf"@%p\d+ {fence}[^;]*;")

        def check(text: str, *args: Any, without: re.Pattern[str] = without, **options: Any) -> Any:
            assert without.search(text)
            return checked(without.sub("", text, count=1), *args, **options)

        monkeypatch.setattr(bridge, "check_ptx", check)
        assert kinds(unknown("own_descriptors", run(case, target="sm_90").findings)) & {"proxy", "layout"}


SYNCHRONISATION = re.compile(r"^\s*(bar\.sync|cp\.async\.wait_group|cp\.async\.commit_group|bar\.warp\.sync)")


@pytest.mark.parametrize("name", ["softmax", "matmul", pytest.param("attention", marks=pytest.mark.mutation)])
def test_deleting_synchronisation_from_the_ptx_is_found(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Every barrier, wait and commit in turn. What is not found was not needed: no adversarial order shows it."""
    case = CASES[name](np.random.default_rng(1))
    texts: list[str] = []
    checked = bridge.check_ptx
    monkeypatch.setattr(bridge, "check_ptx", lambda text, *args, **kw: texts.append(text) or checked(text, *args, **kw))
    run(case)
    lines = texts[0].splitlines()
    found: list[str] = []
    places = [i for i, line in enumerate(lines) if SYNCHRONISATION.match(line)]
    for i in places:
        mutant = "\n".join([*lines[:i], "", *lines[i + 1 :]])
        monkeypatch.setattr(bridge, "check_ptx", lambda _, *args, m=mutant, **kw: checked(m, *args, **kw))
        if run(case).findings:
            found.append(lines[i].split()[0])
            continue
        assert run(case, seed=3).findings == ()
        assert case.error() <= 1
    assert {"bar.sync", "cp.async.wait_group"} <= set(found)
    assert len(found) > len(places) // 2


def test_launches_in_a_row_wait_for_each_other() -> None:
    for pdl, wait in ((False, False), (True, True), (True, False)):
        x = np.arange(64, dtype=np.float32)
        y, z = x.copy(), x.copy()
        with warploom.sequence() as s:
            s.launch(kernels.doubled, (1,), [x, y], WAIT=False, target="sm_90")
            s.launch(kernels.doubled, (1,), [y, z], WAIT=wait, target="sm_90", launch_pdl=pdl)
        assert np.array_equal(z, 4 * x)
        assert kinds(s.findings) == ({"race"} if pdl and not wait else set())
