"""Calls of the system in CUDA C++: what is printed, assertions that fail, ``__trap``; and ``bar.red``."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import warploom
from tests.ptx.text import check, kernel
from warploom.core.errors import PtxError
from warploom.cuda.compile import compile_source
from warploom.cuda.names import entry_name
from warploom.cuda.printer import print_cuda

pytest.importorskip("cuda.bindings.nvrtc")


def checked(body: str, x: Any, threads: int = 32) -> Any:
    source = f'extern "C" __global__ void k(int *x) {{ int t = threadIdx.x; {body} }}'
    return warploom.check_cuda(source, "k", 1, threads, [x])


@pytest.mark.parametrize(
    ("directives", "given", "wanted"),
    [
        ("nothing", "", "nothing"),
        ("%d and %5.2f%% of %s", ', x[t], x[t] * 0.5f, \\"all\\"', "-7 and -3.50% of all"),
        ("%u %llu %#x|%-4d|%c", ", 7u, 1ull << 40, 255, 3, 65", "7 1099511627776 0xff|3   |A"),
        ("%*d %.*f", ", 4, 2, 1, 2.25", "   2 2.2"),
    ],
)
def test_printf_prints_what_c_would(directives: str, given: str, wanted: str) -> None:
    call = f'if (t == 5) printf("{directives}\\n"{given});'.replace('\\"', '"')
    found = checked(call, np.full(32, -7, np.int32)).raise_if_found()
    assert found.printed == f"{wanted}\n"


def test_every_thread_prints_a_line() -> None:
    found = checked('if (t & 1) printf("%d\\n", x[t]);', np.arange(32, dtype=np.int32)).raise_if_found()
    assert found.printed.split() == [str(n) for n in range(1, 32, 2)]


def test_a_format_without_its_argument_is_found() -> None:
    found = checked('printf("%d %d\\n", 3);', np.zeros(32, np.int32))
    assert {f.kind for f in found.findings} == {"uninitialised"}


def test_an_assertion_that_fails_is_a_finding_with_its_text() -> None:
    x = np.arange(32, dtype=np.int32)
    checked("assert(x[t] < 32); x[t] = 1;", x).raise_if_found()
    (found,) = checked("assert(x[t] < 30); x[t] = 1;", np.arange(32, dtype=np.int32)).findings
    assert (found.kind, found.count, found.lane) == ("assert", 2, 30)
    assert "x[t] < 30" in found.message


def test_trap_ends_its_threads() -> None:
    x = np.arange(32, dtype=np.int32)
    (found,) = checked("if (x[t] == 3) __trap(); x[t] = -1;", x).findings
    assert (found.kind, found.count) == ("assert", 1)
    assert (x == np.where(np.arange(32) == 3, 3, -1)).all()


def test_a_program_that_prints_is_printed_and_compiles() -> None:
    found = checked('assert(x[t] < 9); printf("%d\\n", x[t]); if (x[t] == 3) __trap();', np.zeros(32, np.int32))
    compile_source(print_cuda(found.program), entry_name(found.program.name), arch="sm_90a")


@pytest.mark.parametrize("seed", [None, 1])
def test_barriers_put_predicates_together(seed: int | None) -> None:
    x = np.arange(128, dtype=np.int32)
    body = (
        "x[t] = __syncthreads_count(t % 3 == 0) + 1000 * __syncthreads_or(t == 77) + 2000 * __syncthreads_and(t < 128)"
    )
    source = (
        f'extern "C" __global__ void k(int *x) {{ int t = threadIdx.x; {body} + 4000 * __syncthreads_and(t < 99); }}'
    )
    found = warploom.check_cuda(source, "k", 1, 128, [x], seed=seed).raise_if_found()
    assert (x == 43 + 1000 + 2000).all()
    compile_source(print_cuda(found.program), entry_name(found.program.name), arch="sm_90a")


@pytest.mark.parametrize(
    ("deep", "ends", "says"), [(30, "ret;", ""), (40, "ret;", "more than 32 deep"), (5, "call f3;", "call themselves")]
)
def test_functions_may_call_others_but_not_themselves(deep: int, ends: str, says: str) -> None:
    """A chain of functions, of which the last returns or calls one of them again."""
    declared = "".join(f".func f{n}; " for n in range(deep))
    chain = "".join(f".func f{n} {{ {f'call f{n + 1}; ret;' if n + 1 < deep else ends} }}\n" for n in range(deep))
    text = kernel("call f0; st.global.u32 [%d0], 7;", before=f"{declared}\n{chain}")
    out = np.zeros(1, np.uint32)
    if not says:
        assert check(text, [out]).findings == ()
        assert out == 7
        return
    with pytest.raises(PtxError, match=says):
        check(text, [out])
