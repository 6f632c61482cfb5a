"""cuda.core is imported once, though many threads compile first."""

import importlib.util
import subprocess
import sys

import pytest

SCRIPT = """
import time
from concurrent.futures import ThreadPoolExecutor
from warploom.cuda.device import cuda_core
def options(number):
    time.sleep(number / 400)
    return cuda_core().ProgramOptions
with ThreadPoolExecutor(200) as pool:
    print(len(set(pool.map(options, range(200)))))
"""
"""Threads that come one after the other, all along the import, which takes a quarter of a second."""


@pytest.mark.skipif(importlib.util.find_spec("cuda") is None, reason="needs cuda.core")
def test_threads_that_compile_first_see_all_of_it():
    done = subprocess.run([sys.executable, "-c", SCRIPT], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "1\n", done.stderr
