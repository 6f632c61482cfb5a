"""All miniatures."""

from __future__ import annotations

from dataclasses import replace

from tests.real_bugs.ampere import BARRIERS, GRIDS
from tests.real_bugs.base import Miniature
from tests.real_bugs.hopper import HOPPER

MINIATURES: list[Miniature] = [*BARRIERS, *GRIDS, *(replace(miniature, target="sm_90a") for miniature in HOPPER)]
