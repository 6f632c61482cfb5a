"""The text of a Program, which its digest is made of."""

# pyright: reportInvalidTypeForm=false

from __future__ import annotations

from warploom.lang import Global, Kernel, kernel, u32


@kernel(threads=32)
def branches(k: Kernel, out: Global[u32]) -> None:
    with k.loop(2) as i:
        with k.when(k.thread == i):
            out.store(i, 0)
        with k.otherwise():
            with k.when(i == 1):
                out.store(k.thread, 1)
            out.store(i, 2)


def test_blocks_stand_below_what_they_belong_to() -> None:
    lines = branches.trace().text.splitlines()
    loop = next(i for i, line in enumerate(lines) if line.lstrip().startswith("loop"))
    shape = [
        (len(line) - len(line.lstrip()), word)
        for line in lines[loop:]
        for word in ("loop", "when", "otherwise", "st.global")
        if word in line
    ]
    assert shape == [
        (0 + shape[0][0], "loop"),
        (2 + shape[0][0], "when"),
        (4 + shape[0][0], "st.global"),
        (2 + shape[0][0], "otherwise"),
        (4 + shape[0][0], "when"),
        (6 + shape[0][0], "st.global"),
        (4 + shape[0][0], "st.global"),
    ]
