"""Which registers of a :class:`~warploom.ir.statements.Flow` are read before they are written anew."""

from __future__ import annotations

from warploom.ir.statements import Branch, Flow, Register, Statement, blocks, operands_of, results_of


def live_registers(flow: Flow) -> list[frozenset[Register]]:
    """The registers live at the start of each block."""
    reads: list[set[Register]] = []
    kills: list[set[Register]] = []
    for body in flow.blocks:
        used, killed = set[Register](), set[Register]()
        _uses(body, used, killed, always=True)
        reads.append(used)
        kills.append(killed)
    live = [set(used) for used in reads]
    changed = True
    while changed:
        changed = False
        for number in reversed(range(len(flow.blocks))):
            branch = flow.blocks[number][-1]
            assert isinstance(branch, Branch)
            after = set[Register]().union(*(live[target] for target in branch.targets))
            more = (after - kills[number]) - live[number]
            if more:
                live[number] |= more
                changed = True
    return [frozenset(x) for x in live]


def _uses(body: tuple[Statement, ...], used: set[Register], killed: set[Register], *, always: bool) -> None:
    for s in body:
        used.update(x for x in operands_of(s) if isinstance(x, Register) and x not in killed)
        for inner in blocks(s):
            _uses(inner, used, set(killed), always=False)
        if always:
            killed.update(r for r in results_of(s) if isinstance(r, Register))
