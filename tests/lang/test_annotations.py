"""What a prompt and a type checker see of the language: words to complete, and annotations that are types."""

import shutil
import subprocess
import textwrap

import pytest

import warploom
from warploom.core import dtypes
from warploom.lang import Kernel, bf16, elements, kernel

SOURCE = """
    from warploom.lang import Global, Kernel, Strided, TensorMap, bf16, f32, kernel, u32
    from warploom.tile.pipeline import operand_tile

    @kernel(threads=128)
    def scaled(k: Kernel, x: Global[f32], y: Strided[bf16, 2], m: TensorMap, n: u32, factor: f32, *, cols: int) -> None:
        tile = operand_tile(k, bf16, 64, cols, name="T")
        total = k.register(f32, 0.0)
        with k.loop(n // 128 + 1, start=1) as i:
            total += k.convert(y.at(i, k.lane).load(), f32) * factor
        with k.when(k.thread < n):
            x.store(total.get(), k.thread)
        tile.load(0, 0)
"""


def checked(folder, source):
    file = folder / "kernels.py"
    file.write_text(textwrap.dedent(source))
    done = subprocess.run(["pyright", str(file)], capture_output=True, text=True, check=False)
    return done.returncode, done.stdout


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("pyright") is None, reason="needs pyright")
def test_a_type_checker_takes_annotations_and_finds_a_wrong_word(tmp_path):
    assert checked(tmp_path, SOURCE)[0] == 0, checked(tmp_path, SOURCE)[1]
    wrong, said = checked(tmp_path, SOURCE.replace("k.register(f32", "k.registre(f32").replace("x.store", "x.stor"))
    assert wrong
    assert all(word in said for word in ("registre", "stor"))


def test_types_are_the_objects_they_were():
    assert all(getattr(elements, name) is getattr(dtypes, name) for name in elements.__all__)


def test_words_are_completed_and_what_builds_a_program_is_not():
    seen = []

    @kernel(threads=32)
    def looks(k: Kernel) -> None:
        seen.extend(dir(k))

    looks.trace()
    words = {"load_fragment", "cp_async", "when", "register", "tma_load", "wgmma", "thread", "lane", "warps"}
    assert words <= set(seen)
    assert not {"emit", "issue", "operand", "append", "loop_block", "here", "unfinished", "regions"} & set(seen)
    assert "bytes" in dir(bf16)


def test_the_package_lists_its_api():
    assert set(dir(warploom)) == {*warploom.__all__, "__version__"}
