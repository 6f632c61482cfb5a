"""Types, target limits, errors and settings: what every other package stands on."""

import time

IMPORTED_NS = time.time_ns()
"""When this process began to import the package, which starts here: every package imports this one first."""
