"""Options of attention's scores in kernels: which number each score gets, and in which order options change it."""

# pyright: reportInvalidTypeForm=false
from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from warploom.core.errors import ProblemError
from warploom.emulate import emulate
from warploom.kernels.attention.device.scores import HeadArrays
from warploom.kernels.attention.scores import HEAD_ARRAYS, NUMBERS, OPTIONS, ScoreOption, ScoreOptions
from warploom.lang import Global, Kernel, Traced, f32, kernel

(NAME,) = HEAD_ARRAYS


class Factor(ScoreOption):
    """A factor of the scores of each head."""

    array, changes = True, True

    def score(self, k: Kernel, score: Traced, number: Traced | None) -> Traced:
        assert number is not None
        return score * number

    def slope(self, k: Kernel, exponent: Traced, number: Traced | None) -> Traced:
        assert number is not None
        return number


class Shift(ScoreOption):
    """A number that is added to all scores."""

    changes = True

    def score(self, k: Kernel, score: Traced, number: Traced | None) -> Traced:
        assert number is None
        return score + self.value

    def slope(self, k: Kernel, exponent: Traced, number: Traced | None) -> Traced:
        return k.value(self.value, f32)


@dataclass(frozen=True, kw_only=True)
class Changed(ScoreOptions):
    """Options with a factor of heads, and then a shift by 3."""

    @property
    def changes(self) -> dict[str, ScoreOption]:
        return {NAME: Factor(True), "shift": Shift(3.0)}


@kernel(threads=32, drop_unused=True)
def changed(k: Kernel, options: HeadArrays, scores: Global[f32], slopes: Global[f32], *, by_element: bool) -> None:
    at_work = options.scores(Changed(), None if by_element else k.cta_x)
    if by_element:
        at_work.turn_to(lambda element: k.cta_x + element)
    values = [k.convert(k.lane, f32), k.convert(k.lane, f32) + 100.0]
    for element, (score, slope) in enumerate(zip(at_work.scores(values), at_work.slopes(values), strict=True)):
        scores.store(score, k.cta_x * 64 + k.lane * 2 + element)
        slopes.store(slope, k.cta_x * 64 + k.lane * 2 + element)


@pytest.mark.parametrize("by_element", [False, True])
def test_each_score_has_the_number_of_its_head(by_element: bool) -> None:
    numbers = np.array([2.0, -1.0, 5.0], np.float32)
    scores, slopes = np.zeros((2, 2, 32, 2), np.float32)
    arrays = {NAME: numbers, "scores": scores, "slopes": slopes}
    found = emulate(changed.trace(by_element=by_element), (2, 1, 1), arrays)
    assert not found.findings
    values = np.arange(32)[:, None] + np.array([0.0, 100.0])
    own = np.array([[numbers[head + element * by_element] for element in range(2)] for head in range(2)])[:, None]
    assert np.array_equal(scores, values * own + 3.0)
    assert np.array_equal(slopes, np.broadcast_to(own * 3.0, slopes.shape))


def test_kernels_without_changes_have_none() -> None:
    @kernel(threads=32, drop_unused=True)
    def plain(k: Kernel, options: HeadArrays, out: Global[f32]) -> None:
        given: list[tuple[dict[str, Any], bool]] = [({NAME: True}, False), ({"softcap": 2.0}, True)]
        for asked, changes in ((ScoreOptions(**x), changes) for x, changes in given):
            assert (options.scores(asked, 0).change is not None) == changes
        out.store(1.0, k.lane)

    assert [x.name for x in plain.trace().parameters] == ["out"]


def test_every_option_is_a_field() -> None:
    assert OPTIONS.keys() == {*HEAD_ARRAYS, *NUMBERS} == ScoreOptions().asked.keys() - {"lse"}
    assert ScoreOptions().options == {}
    asked: dict[str, Any] = {"softcap": 5.0, NAME: True}
    assert list(ScoreOptions(**asked).options) == list(asked)
    with pytest.raises(ProblemError, match="softcap must be positive"):
        ScoreOptions(softcap=-1.0).check()
