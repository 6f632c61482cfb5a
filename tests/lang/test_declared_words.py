"""Words that are one instruction: a line of a table, and a method without a body."""

from __future__ import annotations

import pytest

from tests.ptx.text import kernel
from warploom.core.errors import TraceError, VerifyError
from warploom.cuda.printer import print_cuda
from warploom.ir.statements import Op
from warploom.ir.verify import verify
from warploom.isa.instruction import named
from warploom.lang import Kernel, f32, u32
from warploom.lang.builder import word
from warploom.lang.values import Number, Traced
from warploom.ptx.parser import parse
from warploom.ptx.program import to_program


class MoreWords(Kernel):
    """Words of one's own: the largest of three is an instruction of sm_100, one line of the table."""

    @word("max.f32")
    def largest(self, a: Number, b: Number, c: Number = 0.0) -> Traced:
        """The largest of three."""
        ...

    @word("prmt.b32", ptx=False)
    def picked(self, a: Number, b: Number, selector: int) -> Traced:
        """Four bytes."""
        ...

    @word("mul.hi.u32")
    def multiply_high(self, a: Number, b: Number) -> Traced:
        """The upper half of a product."""
        ...


def test_a_word_takes_its_body_from_the_form() -> None:
    k = MoreWords()
    found = k.largest(k.value(1.0, f32), 2.0)
    assert found.definition is not None
    assert found.definition.instruction is named("max.f32", operands=3)
    assert found.dtype is f32
    assert [x.constant for x in found.sources] == [1.0, 2.0, 0.0]
    assert k.multiply_high(b=k.value(2, u32), a=3).dtype is u32
    assert MoreWords.largest.__doc__ == "The largest of three."


def test_operands_of_another_type_are_refused() -> None:
    k = MoreWords()
    with pytest.raises(TraceError, match="expected f32"):
        k.largest(k.value(1, u32), 2.0)
    with pytest.raises(TypeError, match="missing 1 required positional argument: 'b'"):
        k.multiply_high(1)  # type: ignore[call-arg]


def test_a_method_with_other_parameters_is_refused_as_it_is_declared() -> None:
    with pytest.raises(TypeError, match="4 operands"):

        @word("max.f32")
        def largest(self: Kernel, a: Number, b: Number, c: Number, d: Number) -> Traced:  # pyright: ignore[reportUnusedFunction]
            ...


def test_an_instruction_of_a_later_architecture_is_read_and_printed() -> None:
    line = "max.f32 %f1, 0f3F800000, 0f40000000, 0f40400000; st.global.f32 [%d0], %f1;"
    module = parse(kernel(line, target="sm_100"))
    program = to_program(module, module.entries[0], block=(32, 1, 1))
    verify(program)
    made = named("max.f32", operands=3)
    assert made in [op.instruction for op in program.ops()]
    assert made.since == "sm_100"
    assert "max.f32 %0, %1, %2, %3;" in print_cuda(program)
    older = parse(kernel(line, target="sm_90a"))
    with pytest.raises(VerifyError, match="sm_100"):
        verify(to_program(older, older.entries[0], block=(32, 1, 1)))


def test_parameters_are_words_immediates_and_operands_of_the_instruction() -> None:
    k = MoreWords()
    low = k.picked(k.value(1, u32), 2, selector=0x5410)
    assert low.definition is not None
    assert low.definition.instruction is named("prmt.b32", numbers=(("selector", 0x5410),), ptx=False)
    assert [x.constant for x in low.sources] == [1, 2]
    k.fence("sys")
    k.elect()
    fence, elected = [op.instruction for op in k.finished_body() if isinstance(op, Op)][-2:]
    assert fence is named("fence.acq_rel.sys")
    assert elected is named("elect.sync", numbers=(("mask", 0xFFFFFFFF),))
    k.wait_bulk(1, reads_only=True)
    (*_, waited) = (op.instruction for op in k.finished_body() if isinstance(op, Op))
    assert waited is named("cp.async.bulk.wait_group.read", numbers=(("pending", 1),))
    with pytest.raises(TraceError, match="fence_async takes space as 'shared', 'global', 'all', not 'local'"):
        k.fence_async("local")  # type: ignore[arg-type]
    with pytest.raises(VerifyError, match="gpux is not supported"):
        k.fence("gpux")  # type: ignore[arg-type]
    with pytest.raises(VerifyError, match="0 or more of the newest groups"):
        k.wait_group(-1)
    with pytest.raises(TraceError, match=r"wait_group takes pending as an integer known while tracing, not "):
        k.wait_group(k.lane)  # type: ignore[arg-type]
