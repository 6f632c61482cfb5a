"""A log in which ptxas says that it serialises ``wgmma`` is an error, whatever the reason it gives."""

from __future__ import annotations

import pytest

from warploom.core.errors import CompileError
from warploom.cuda.diagnostics import refuse_serialised_wgmma

ORDINARY = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'kernel' for 'sm_90a'
ptxas info    : Used 168 registers, used 1 barriers, 75 bytes cmem[0]"""
ADVICE = (
    "ptxas info    : (C7{code}) Potential Performance Loss: wgmma.mma_async instructions are serialized due to {why}"
)


@pytest.mark.parametrize(
    ("code", "why"),
    [
        (508, "the presence of Extern calls in the function 'kernel'"),
        (510, "wgmma pipeline crossing function boundary at a function call in the function 'kernel'"),
        (514, "insufficient register resources for the wgmma pipeline in the function 'kernel'"),
        (515, "ill formed pipeline stage in the function 'kernel'"),
        (519, "non wgmma instructions defining accumulator registers of a wgmma between start and end of the pipeline"),
    ],
)
def test_every_advisory_is_an_error(code: int, why: str) -> None:
    line = ADVICE.format(code=code, why=why)
    with pytest.raises(CompileError) as raised:
        refuse_serialised_wgmma(f"{ORDINARY}\n{line}\n{line}\n", "the source", "kernel", "sm_90a")
    text = str(raised.value)
    assert "serialises the wgmma instructions of kernel 'kernel' for sm_90a" in text
    assert text.count(f"(C7{code})") == 1
    assert why in text
    assert "wait for the group before touching its accumulators" in text
    assert raised.value.log.startswith(ORDINARY)
    assert raised.value.source == "the source"


def test_other_lines_are_none() -> None:
    refuse_serialised_wgmma(ORDINARY, "", "kernel", "sm_90a")
    refuse_serialised_wgmma(f"{ORDINARY}\nptxas info    : (C7601) something else about 7512 bytes", "", "k", "sm_90a")
