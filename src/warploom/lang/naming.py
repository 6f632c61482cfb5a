"""Names of values from the author's own assignments.

A traced function cannot see the names it assigns to, so they are read from its source: a value computed on the line of
``row = …`` is called ``row``. Unnamed values keep numbers.
"""

from __future__ import annotations

import ast
import linecache
from functools import lru_cache


@lru_cache(maxsize=256)
def _assignments(file: str) -> dict[int, tuple[int, str]]:
    """Line → (last line of the statement, assigned name) for every simple assignment in a source file."""
    source = "".join(linecache.getlines(file))
    try:
        tree = ast.parse(source)
    except SyntaxError:
        return {}
    found: dict[int, tuple[int, str]] = {}
    for node in ast.walk(tree):
        target: ast.expr | None = None
        if isinstance(node, ast.Assign) and len(node.targets) == 1:
            target = node.targets[0]
        elif isinstance(node, ast.AnnAssign | ast.AugAssign) and node.value is not None:
            target = node.target
        if isinstance(target, ast.Name) and isinstance(node, ast.stmt):
            for line in range(node.lineno, (node.end_lineno or node.lineno) + 1):
                name = target.id if found.get(line, (0, target.id))[1] == target.id else ""  # two on one line: neither
                found[line] = node.end_lineno or node.lineno, name
    return found


def name_at(file: str, line: int) -> str:
    """The name assigned by the statement on ``line`` of ``file``, or '' if it is no simple assignment."""
    return _assignments(file).get(line, (0, ""))[1]
