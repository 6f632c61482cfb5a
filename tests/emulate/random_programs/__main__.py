"""Random programs by the thousand: ``python -m tests.emulate.random_programs [values] [order] [--count N]``."""

from __future__ import annotations

import argparse
import sys
import time

from tests.emulate.random_programs import order, values

FAMILIES = {"values": values.difference, "order": order.difference}


def main() -> int:
    """Compare ``count`` programs of each family with its reference. Exit code 1 if there is a difference."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("families", nargs="*", metavar="family", help="values, order; both if none is named")
    parser.add_argument("--first", type=int, default=0, help="the number of the first program")
    parser.add_argument("--count", type=int, default=10_000, help="programs of each family")
    options = parser.parse_args()
    different = 0
    for family in options.families or FAMILIES:
        start = time.monotonic()
        for done, number in enumerate(range(options.first, options.first + options.count), 1):
            difference = FAMILIES[family](number)
            if difference:
                different += 1
                print(difference, flush=True)
            if done % 5000 == 0 or done == options.count:
                print(f"{family}: {done} programs, {time.monotonic() - start:.0f} s", flush=True)
    print(f"{different} differences")
    return 1 if different else 0


if __name__ == "__main__":
    sys.exit(main())
