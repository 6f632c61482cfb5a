"""Tracing: errors that name the fix and the line, folding, sharing, addresses, names, parameters, digests."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from tests.lang.support import line_of, mnemonics, ops, run, traced_with, whens
from warploom.core.errors import TraceError, VerifyError
from warploom.ir.statements import Const, Roles
from warploom.lang import Global, Kernel, bf16, kernel, s32, u32, u64

HERE = Path(__file__).name


def fails(body, match: str) -> None:
    """Tracing raises, names the fix and this file."""
    with pytest.raises(TraceError, match=match) as caught:
        traced_with(body).trace()
    assert HERE in str(caught.value) or "parameter" in match, caught.value


# -- errors


def test_a_traced_value_has_no_truth():
    def body(k, out, x, n):
        if n > 3:
            out.store(n, k.lane)

    fails(body, r"k\.when\(condition\)")
    fails(lambda k, out, x, n: out.store(1 if n == 0 else 2, k.lane), r"k\.select")
    fails(lambda k, out, x, n: out.store(n and 3, k.lane), "`and`/`or` are `&`/`|`")


def test_a_traced_value_is_no_index_and_no_sequence():
    fails(lambda k, out, x, n: [1, 2, 3][n], r"k\.loop\(stop\)")
    fails(lambda k, out, x, n: list(range(n)), r"k\.loop\(stop\)")
    fails(lambda k, out, x, n: list(n), "one value, not a sequence")


def test_types_do_not_mix_silently():
    fails(lambda k, out, x, n: x.load() + n, r"k\.convert\(x, f32\)")
    fails(lambda k, out, x, n: n + k.convert(n, u64), "convert it with k.convert")
    fails(lambda k, out, x, n: n + 1.5, "1.5 is not an integer, but the other operand is u32")
    fails(lambda k, out, x, n: n / 2, "integers take `//`")
    fails(lambda k, out, x, n: k.convert(n, s32) // 2, "unsigned integers, not s32")
    fails(lambda k, out, x, n: k.bitcast(n, u64), "changes the width")
    fails(lambda k, out, x, n: k.shfl_xor(k.convert(n, u64), 1), "32-bit values")
    fails(lambda k, out, x, n: out.store(x.load(), k.lane), "expected u32")


def test_the_error_names_the_authors_line():
    def body(k, out, x, n):
        value = x.load(k.lane)
        out.store(value + n, k.lane)

    with pytest.raises(TraceError) as caught:
        traced_with(body).trace()
    assert f"{HERE}:{line_of(body, 'value + n')}" in str(caught.value)


def test_blocks_stand_where_they_may():
    def body(k, out, x, n):
        with k.when(n > 1):
            out.store(1, k.lane)
        out.store(2, k.lane)
        with k.otherwise():
            out.store(3, k.lane)

    fails(body, r"directly after a `with k\.when")
    fails(lambda k, out, x, n: k.warps(2, 2), "empty range of warps")


def test_parameters_need_types():
    @kernel(threads=32)
    def untyped(k: Kernel, out: Global[u32], n) -> None:
        out.store(n)

    with pytest.raises(TraceError, match="parameter 'n' of untyped needs a type"):
        untyped.trace()


def test_stages_are_counted():
    def body(k, out, x, n):
        k.shared(bf16, (16, 64), name="ring", stages=2).stage(2)

    with pytest.raises(TraceError, match="ring has 2 stages; there is no stage 2"):
        traced_with(body).trace()


def test_a_program_that_breaks_a_rule_is_not_returned():
    def body(k, out, x, n):
        with k.warps(0, 4):
            out.store(1, k.lane)

    with pytest.raises(VerifyError):
        traced_with(body).trace()


# -- folding


def folded(expression) -> str:
    """The instructions that a store of ``expression(k, n)`` needs besides itself."""
    program = traced_with(lambda k, out, x, n: out.store(expression(k, n))).trace()
    return " ".join(m for m in mnemonics(program) if not m.startswith("st."))


@pytest.mark.parametrize(
    ("expression", "left"),
    [
        (lambda k, n: k.value(3, u32) + 4, ""),
        (lambda k, n: k.value(3, u32) * 4 - (k.value(1, u32) << 2), ""),
        (lambda k, n: n + 0, ""),
        (lambda k, n: n * 1, ""),
        (lambda k, n: n * 0, ""),
        (lambda k, n: n & 0xFFFFFFFF, ""),
        (lambda k, n: n | 0, ""),
        (lambda k, n: n ^ 0, ""),
        (lambda k, n: n // 1, ""),
        (lambda k, n: n * 8, "shl.u32"),
        (lambda k, n: n // 8, "shr.u32"),
        (lambda k, n: n % 8, "and.u32"),
        (lambda k, n: n % 6, "rem.u32"),
        (lambda k, n: (n + 3) + 4, "add.u32"),
        (lambda k, n: 5 + (n + 3) - 8, ""),
        (lambda k, n: (n + 3) * 4, "shl.u32 add.u32"),
        (lambda k, n: k.select(True, n, 0), ""),
        (lambda k, n: k.select(k.value(3, u32) < 4, n, 0), ""),
    ],
)
def test_constants_fold(expression, left):
    assert folded(expression) == left


def test_floats_are_never_rearranged():
    def body(k, out, x, n):
        value = x.load(k.lane)
        x.store((value + 0.0) * 1.0 + 0.1 + 0.2, k.lane)

    assert [m for m in mnemonics(traced_with(body).trace()) if ".f32" in m] == [
        "add.f32",
        "mul.f32",
        "add.f32",
        "add.f32",
    ]


@pytest.mark.parametrize("n", [0, 1, 7, 2**31 - 1, 2**31, 2**32 - 1])
def test_folding_keeps_the_value(n):
    """The same expression with a constant folded in and with everything computed at run time."""

    @kernel(threads=32)
    def both(k: Kernel, out: Global[u32], n: u32, five: u32, eight: u32) -> None:
        out.store((5 + (n + 8)) * 8 - 5, 0)
        out.store((five + (n + eight)) * eight - five, 1)
        out.store((n - 5) // 8 + (n % 8), 2)
        out.store((n - five) // eight + (n % eight), 3)

    out = np.zeros(4, np.uint32)
    run(both, out, np.uint32(n), np.uint32(5), np.uint32(8))
    assert out[0] == out[1] == ((5 + n + 8) * 8 - 5) % 2**32
    assert out[2] == out[3] == ((n - 5) % 2**32 // 8 + n % 8) % 2**32


# -- addresses


def test_addresses_are_a_base_and_an_immediate():
    def body(k, out, x, n):
        tile = k.shared(bf16, (64, 64), name="tile")
        for row in (0, 16, 32):
            k.cp_async(tile.address(k.lane // 8 + row, (k.lane % 8) * 8), x + (k.lane * 4 + row * 64))
        k.commit_group()
        k.wait_group(0)
        k.syncwarp()
        for row in (0, 16, 32):
            out.store(k.ldmatrix(tile.address(k.lane % 16 + row, 0), 4)[0], k.lane + row)

    program = traced_with(body).trace()
    copies = [op for op in program.ops() if op.instruction.mnemonic.startswith("cp.async.cg")]
    loads = [op for op in program.ops() if op.instruction.mnemonic.startswith("ldmatrix")]
    stores = [op for op in program.ops() if op.instruction.mnemonic.startswith("st.")]
    assert [op.instruction.shared_offset for op in copies] == [0, 16 * 128, 32 * 128]  # type: ignore[union-attr]
    assert [op.instruction.global_offset for op in copies] == [0, 16 * 256, 32 * 256]  # type: ignore[union-attr]
    assert [op.instruction.offset for op in loads] == [0, 16 * 128, 32 * 128]  # type: ignore[union-attr]
    assert [op.instruction.offset for op in stores] == [0, 64, 128]  # type: ignore[union-attr]
    for group in (copies, loads, stores):
        assert len({op.operands[0] for op in group}) == 1, "one base register serves all"
    assert len({op.operands[1] for op in copies}) == 1


def test_negative_displacements_stay_negative():
    def body(k, out, x, n):
        out.store(k.bitcast((x + (n - 4)).load(0), u32), k.lane)

    assert len(ops(traced_with(body).trace(), "ld.global")) == 1
    out, x = np.zeros(32, np.uint32), np.arange(32, dtype=np.float32)
    run(traced_with(body), out, x, np.uint32(10))
    assert set(out.view(np.float32).tolist()) == {6.0}


# -- sharing


def test_pure_integers_are_shared_in_dominating_blocks():
    def body(k, out, x, n):
        out.store(n * 3, k.lane)
        with k.when(n > 1):
            out.store(n * 3 + 1, k.lane)
        with k.loop(n) as i:
            out.store(n * 3 + i, k.lane)

    assert mnemonics(traced_with(body).trace()).count("mul.u32") == 1
    assert mnemonics(traced_with(body, share=False).trace()).count("mul.u32") == 3


def test_siblings_do_not_share():
    """A value of one branch does not exist in the other, nor after them."""

    def body(k, out, x, n):
        with k.when(n > 1):
            out.store(n * 3, k.lane)
        with k.otherwise():
            out.store(n * 3 + 1, k.lane)
        with k.loop(n):
            out.store(n * 3, k.lane)
        out.store(n * 3, k.lane)

    program = traced_with(body).trace()
    assert mnemonics(program).count("mul.u32") == 4
    (when,) = whens(program)
    assert len(when.body) >= 2
    assert len(when.otherwise) >= 2


def test_floats_and_loads_are_not_shared():
    def body(k, out, x, n):
        a, b = x.load(k.lane), x.load(k.lane)
        x.store((a * 2.0) + (a * 2.0) + b, k.lane)

    names = mnemonics(traced_with(body).trace())
    assert names.count("mul.f32") == 2
    assert sum(m.startswith("ld.global") for m in names) == 2


# -- names, lines, parameters


def test_values_are_called_as_the_author_calls_them():
    def body(k, out, x, n):
        first_row = k.lane * 3
        carried = k.register(u32, 0, "carried")
        carried += first_row
        out.store(carried.get(), k.lane)

    text = traced_with(body).trace().text
    assert ".first_row" in text
    assert "$" in text
    assert ".carried" in text


def test_programs_know_the_authors_lines():
    def body(k, out, x, n):
        scaled = n * 5
        out.store(scaled, k.lane)

    program = traced_with(body).trace()
    (multiply,) = ops(program, "mul.u32")
    (store,) = ops(program, "st.global")
    assert (multiply.where.line, store.where.line) == (line_of(body, "n * 5"), line_of(body, "out.store"))
    assert multiply.where.file == __file__
    assert multiply.where.function == "body"
    assert str(store.where) == f"{HERE}:{line_of(body, 'out.store')}"


def test_unused_parameters_drop_on_request():
    def body(k, out, x, n):
        out.store(n, k.lane)

    assert [p.name for p in traced_with(body).trace().parameters] == ["out", "x", "n"]
    assert [p.name for p in traced_with(body, drop_unused=True).trace().parameters] == ["out", "n"]


def test_dead_values_drop():
    def body(k, out, x, n):
        unused = (n * 7 + 3) % 11
        also_unused = k.exp2(x.load(k.lane)) * 2.0
        assert unused is not None
        assert also_unused is not None
        out.store(n, k.lane)

    names = mnemonics(traced_with(body).trace())
    assert "mul.u32" not in names
    assert "ex2.approx.ftz.f32" not in names
    assert any(m.startswith("ld.global") for m in names), "an access is an effect, and stays"


# -- control flow


def test_roles_written_one_after_another_are_one_chain():
    @kernel(threads=128)
    def roles(k: Kernel, out: Global[u32]) -> None:
        with k.warps(0, 1):
            out.store(1, k.thread)
        with k.warps(1, 3):
            out.store(2, k.thread)
        with k.warps(3, 4):
            out.store(3, k.thread)

    chains = [s for s in roles.trace().statements() if isinstance(s, Roles)]
    assert [[(r.first, r.last) for r in c.branches] for c in chains] == [[(0, 1), (1, 3), (3, 4)]]
    out = np.zeros(128, np.uint32)
    run(roles, out)
    assert out.tolist() == [1] * 32 + [2] * 64 + [3] * 32


def test_roles_that_overlap_are_two_chains():
    @kernel(threads=64)
    def roles(k: Kernel, out: Global[u32]) -> None:
        with k.warps(0, 2):
            out.store(1, k.thread)
        with k.warps(1, 2):
            out.store(2, k.thread)

    chains = [s for s in roles.trace().statements() if isinstance(s, Roles)]
    assert len(chains) == 2
    out = np.zeros(64, np.uint32)
    run(roles, out)
    assert out.tolist() == [1] * 32 + [2] * 32


def test_when_and_otherwise():
    def body(k, out, x, n):
        with k.when(k.lane < n):
            out.store(1, k.lane)
        with k.otherwise():
            out.store(2, k.lane)

    out = np.zeros(32, np.uint32)
    run(traced_with(body), out, np.zeros(1, np.float32), np.uint32(5))
    assert out.tolist() == [1] * 5 + [2] * 27


def test_a_dynamic_loop_counts_as_pythons_range():
    @kernel(threads=32)
    def count(k: Kernel, out: Global[u32], start: u32, stop: u32, step: u32) -> None:
        total = k.register(u32, 0)
        with k.loop(stop, start=start, step=step) as i:
            total += i
        out.store(total.get(), k.lane)

    for bounds in ((0, 5, 1), (3, 20, 4), (7, 7, 1), (9, 2, 1)):
        out = np.zeros(32, np.uint32)
        run(count, out, *(np.uint32(b) for b in bounds))
        assert set(out.tolist()) == {sum(range(*bounds))}


def test_constants_are_immediates():
    def body(k, out, x, n):
        out.store(-1, k.lane)

    (store,) = ops(traced_with(body).trace(), "st.global")
    assert store.operands[1] == Const(u32, -1)
