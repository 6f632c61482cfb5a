"""What ``check_triton`` finds on sm_90 in the code that each version of Triton adds to the kernels of the tests.

The kernels themselves are right. A finding that no row explains fails the tests, and so does a row without its finding.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import Enum

from warploom.emulate import Finding

Version = tuple[int, ...]
TRIED = ("3.4.0", "3.5.1", "3.6.0", "3.7.0", "3.7.1", "3.8.0", "3.9.0")
"""The versions that continuous integration runs these tests with."""


class Grade(Enum):
    """What a finding means for the kernel on a GPU."""

    WRONG = "the same omission was seen to give wrong results on a GPU"
    UNPROMISED = "GPUs run it as it was meant, and PTX does not promise that they do"


@dataclass(frozen=True)
class Known:
    """A finding that Triton from version ``since`` on and before ``until`` (of ``None``: all) gives in these cases."""

    kind: str
    says: str  # a regular expression for the message: the instructions that meet, and as few words as tell it apart
    cases: tuple[str, ...]
    grade: Grade = Grade.UNPROMISED
    since: Version | None = None
    until: Version | None = None

    def expected(self, case: str, version: Version) -> bool:
        """Whether this version's code for the case must give it."""
        return (
            case in self.cases
            and (self.since is None or version >= self.since)
            and (self.until is None or version < self.until)
        )

    def explains(self, finding: Finding) -> bool:
        """Whether the finding is this one."""
        return finding.kind == self.kind and re.search(self.says, finding.message) is not None


UNFENCED = r"cp\.async\.bulk\.tensor\S* completes on .* initialisation the async proxy may not see"
KNOWN = (
    # wgmma reads through the async proxy what cp.async wrote through the generic one, without fence.proxy.async.
    Known("proxy", r"^wgmma.* cp\.async", ("matmul", "attention"), Grade.WRONG, until=(3, 7, 1)),
    # No fence.mbarrier_init: the TMA may complete on an mbarrier whose initialisation it does not see.
    Known("mbarrier", UNFENCED, ("descriptors",)),
    Known("mbarrier", UNFENCED, ("own_descriptors",), until=(3, 5)),
    Known("mbarrier", UNFENCED, ("specialised",), since=(3, 8)),
    # The lane that elect.sync elects initialises, lane 0 arrives: right where lane 0 is elected.
    Known(
        "mbarrier",
        r"^mbarrier\.arrive\.expect_tx.* nothing orders its initialisation",
        ("descriptors", "own_descriptors"),
        since=(3, 7),
        until=(3, 8),
    ),
    # A descriptor in shared memory is copied by lanes that no __syncwarp orders after the lane that made it.
    Known("race", r"^ld\.shared.* tensormap\.replace", ("own_descriptors", "specialised"), until=(3, 9)),
    # Its shared memory is the TMA's next, without fence.proxy.async.
    Known("proxy", r"^cp\.async\.bulk\.tensor.* st\.shared", ("own_descriptors",), until=(3, 5)),
    # Shared memory is used again, for an mbarrier and for data, without mbarrier.inval.
    Known("mbarrier", r"is an mbarrier already", ("specialised",), until=(3, 8)),
    Known("mbarrier", r"^cp\.async\.bulk\.tensor.* where an mbarrier is", ("specialised",), until=(3, 8)),
)
