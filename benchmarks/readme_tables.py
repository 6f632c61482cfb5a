"""Fill the tables of README.md from the committed results: ``python benchmarks/readme_tables.py [--check]``.

A table stands between ``<!-- table: FILE COLUMNS -->`` and ``<!-- end table -->``: FILE is a result below
``benchmarks/results``, COLUMNS are ``gpu``, ``static`` or ``peers``.
"""

from __future__ import annotations

import argparse
import json
import sys
from pathlib import Path

from warploom.bench.tables import MARKDOWN_TABLES, fill_markdown, table_names

ROOT = Path(__file__).resolve().parents[1]


def main() -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--check", action="store_true", help="change nothing; exit code 1 if a table is out of date")
    options = parser.parse_args()
    readme = ROOT / "README.md"
    text = readme.read_text(encoding="utf-8")
    tables: dict[str, str] = {}
    for name in table_names(text):
        file, _, columns = name.partition(" ")
        result = json.loads((ROOT / "benchmarks" / "results" / file).read_text(encoding="utf-8"))
        tables[name] = MARKDOWN_TABLES[columns](result["rows"])
    filled = fill_markdown(text, tables)
    if options.check:
        return int(filled != text)
    readme.write_text(filled, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
