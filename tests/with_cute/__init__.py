"""Tests on CuTe DSL's kernels; without the package they are skipped."""

import os
import tempfile

# What the package reads when it is imported: the architecture to compile for, PTX to be kept and where, and its lines.
os.environ.update(
    CUTE_DSL_ARCH="sm_90a",
    CUTE_DSL_KEEP_PTX="1",
    CUTE_DSL_LINEINFO="1",
    CUTE_DSL_NO_CACHE="1",
    CUTE_DSL_DUMP_DIR=tempfile.gettempdir(),
)
