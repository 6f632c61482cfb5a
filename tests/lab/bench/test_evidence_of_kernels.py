"""Results say which kernels ran, and pages refuse those whose kernels are others today."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from tests.project import load
from warploom.core.dtypes import bf16, f16
from warploom.core.targets import target
from warploom.kernels.attention.choice import choose
from warploom.kernels.attention.problem import ArrayStrides, AttentionProblem, Even
from warploom.kernels.matmul.problem import contiguous_problem
from warploom.kernels.source import KernelSource, traced
from warploom.lang.functions import gelu
from warploom.ops.backends import built
from warploom.ops.matmul import plan_matmul
from warploom_lab.bench import evidence
from warploom_lab.kernels.matmul.ladder import FULL_LADDER
from warploom_lab.kernels.reduce.ladder import LADDER

EVIDENCE, STALE = evidence, load("stale")
PROBLEM = AttentionProblem(1, 2, 2, Even(256, 256), 64, bf16, window=(None, 0))


def sources() -> list[KernelSource]:
    """One of attention for each architecture, one of each kind of product, one of the reductions."""
    found = [choose(PROBLEM, target(arch))[0] for arch in ("sm_80", "sm_90a")]
    calls = [config.calls(PROBLEM, ArrayStrides.contiguous(PROBLEM), 132)[0] for config in found]
    for key in ("02", "h3"):
        config = FULL_LADDER.rung(key).config
        calls += config.calls(contiguous_problem(256, 256, 256, f16, config.accumulate), 132)
    x = np.zeros((32, 32), np.float16)
    calls += plan_matmul(x, x, epilogue=gelu).calls
    reduce = KernelSource.of("warploom_lab.kernels.reduce.tile:matmul_row_max", "rows", config=LADDER.rungs[0].config)
    return [*(call.source for call in calls), reduce]


@pytest.mark.parametrize("source", sources(), ids=lambda source: source.name)
def test_a_recipe_gives_the_kernel_again(source: KernelSource) -> None:
    found = json.loads(json.dumps(EVIDENCE.recipe(source)))
    assert EVIDENCE.decoded(found) == source
    assert EVIDENCE.decoded(found).program.digest == source.program.digest


def test_what_no_other_process_knows_has_no_recipe() -> None:
    assert EVIDENCE.recipe(KernelSource.of("m:f", "f", epilogue=lambda x: x)) is None
    assert EVIDENCE.recipe(KernelSource.of("m:f", "f", epilogue=sources)) is None


def test_a_result_names_its_commit_and_every_kernel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    traced.cache_clear()  # other tests' kernels
    built.cache_clear()
    source = replace(sources()[0], name="a_kernel_of_this_test")
    digest = source.program.digest
    EVIDENCE.write(tmp_path / "x.json", {"rows": []})
    environment = json.loads((tmp_path / "x.json").read_text())["environment"]
    assert environment["packages"], "a result without an environment gets one"
    assert {k["digest"]: k["name"] for k in environment["kernels"]}[digest] == "a_kernel_of_this_test"
    assert environment["commit"] == EVIDENCE.commit()
    config = str(dict(source.arguments)["config"])
    for configs, there in (({config}, True), ({"another"}, False)):
        assert (digest in {k["digest"] for k in EVIDENCE.kernels_that_ran(configs)}) is there
    monkeypatch.setenv("WARPLOOM_COMMIT", "abc")
    assert EVIDENCE.commit() == "abc"


@pytest.fixture
def result(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    monkeypatch.setattr(STALE, "RESULTS", tmp_path)
    source = sources()[0]
    kernel = {"name": source.name, "digest": source.program.digest, "recipe": EVIDENCE.recipe(source)}
    return {"environment": {"commit": "abc", "date": "2031-05-06T00", "kernels": [kernel]}}


def listed(**entry: str) -> None:
    (STALE.RESULTS / STALE.OLDER).write_text(json.dumps({"x.json": entry}))


def test_evidence_of_todays_kernels_is_shown(result: dict[str, Any]) -> None:
    assert STALE.checked("x.json", result) is result
    assert STALE.told("x.json") == ""


@pytest.mark.parametrize("spoiled", ["digest", "function", "argument", "recipe", "kernels", "commit"])
def test_other_evidence_is_no_page_unless_it_is_listed(result: dict[str, Any], spoiled: str) -> None:
    environment = result["environment"]
    (kernel,) = environment["kernels"]
    if spoiled == "digest":
        kernel["digest"] = kernel["digest"][::-1]
    elif spoiled == "function":
        kernel["recipe"]["fields"]["function"] = "warploom.kernels.attention.nowhere:kernel"
    elif spoiled == "argument":
        kernel["recipe"]["fields"]["name"] = "another"
    elif spoiled == "recipe":
        kernel["recipe"] = None
    else:
        del environment[spoiled]
    with pytest.raises(STALE.StaleEvidenceError, match="Measure it again, or list it"):
        STALE.checked("x.json", result)
    listed(date="2031-05-06", commit="abc", kernels="older")
    assert STALE.checked("x.json", result) is result
    assert STALE.told("x.json") == "measured on an older kernel, 2031-05-06, commit abc"


def test_the_list_may_not_be_wrong(result: dict[str, Any]) -> None:
    listed(date="2031-05-06", commit="abc", kernels="older")
    with pytest.raises(STALE.StaleEvidenceError, match="take it off"):
        STALE.checked("x.json", result)
    listed(date="2031-05-05", commit="abc", kernels="older")
    with pytest.raises(STALE.StaleEvidenceError, match="2031-05-05"):
        STALE.checked("x.json", result)


def test_a_choice_that_would_be_another_today_is_found() -> None:
    problem = AttentionProblem(8, 16, 16, Even(1024, 1024), 128, bf16, window=(None, None))
    config = str(choose(problem, target("sm_90a"))[0])
    cell = {"cell": "c", "batch": 8, "heads": 16, "seq": 1024, "head_dim": 128, "causal": False, "config": config}
    gpu = {"target": "sm_90a", "multiprocessors": 132}
    assert not list(STALE.other_attention({"environment": {"gpu": gpu}, "cells": [cell]}))
    (said,) = STALE.other_attention({"environment": {"gpu": gpu}, "cells": [cell | {"config": "another"}]})
    assert said.startswith("c ran another and would run ")


def test_every_listed_file_is_there() -> None:
    assert all((STALE.RESULTS / file).is_file() for file in STALE.older())
    assert {entry["kernels"] for entry in STALE.older().values()} <= set(STALE.KERNELS)
