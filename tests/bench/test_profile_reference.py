"""The reference kernel under our counters: what is asked of ncu, and its SASS counted as ours."""

from __future__ import annotations

import json
from typing import Any

import pytest
from tests.project import load

from warploom.bench import ncu, profile
from warploom.bench.samples import Samples, Spot
from warploom.inspect import inspect_sass

LOOP = ["LDSM.16.M88.4 R8, [R3]", "HMMA.16816.F32.BF16 R12, R4, R8, R12", "MOV R250, R9", "FADD R1, R2, R3"]


def samples() -> Samples:
    """A kernel whose loop runs 32 times."""
    texts = [("MOV R3, R2", 8), *((text, 256) for text in LOOP), ("HMMA.16816.F32.BF16 R20, R4, R8, RZ", 8),
             ("EXIT", 8), ("NOP", 0)]  # fmt: skip
    listed = inspect_sass("\n".join(f"{text} ;" for text, _ in texts)).listing.instructions
    return Samples([Spot(i, {"wait": 1}, executed) for i, (_, executed) in zip(listed, texts, strict=True)])


def test_its_sass_is_counted_as_ours() -> None:
    found = load("profile_reference").sass(samples())
    assert found["registers"] == 251
    assert found["instructions"] == 7
    assert found["counts"]["HMMA"] == 2
    assert found["loop_counts"] == {"LDSM": 1, "HMMA": 1, "MOV": 1, "FADD": 1}
    assert found["loop_groups"] == {"tensor": 1, "shared/global memory": 1, "register copies": 1, "float": 1}


def test_ncu_is_asked_for_its_kernels_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, Any] = {}

    def recorded(_: str, metrics: Any, driver: list[str], **options: Any) -> tuple[str, str]:
        asked.update(options, driver=driver)
        return '"ID","Kernel Name","smsp__inst_executed.sum"\n"0","flash_fwd_kernel","8"', ""

    monkeypatch.setattr(profile, "record", recorded)
    monkeypatch.setattr(profile, "find_ncu", lambda: "ncu")
    monkeypatch.setattr(profile, "available_metrics", lambda _: frozenset[str]())
    reference = load("profile_reference")
    (found,) = reference.profile_reference([reference.FlashLaunch(4096, 4, 16)])
    assert found.tables["instructions"] == {"all": 8.0}
    assert asked["kernels"] == "flash_fwd"
    assert asked["driver"][1:4] == ["-m", "warploom.bench.profile", "benchmarks.profile_reference:FlashLaunch"]
    assert json.loads(asked["driver"][4]) == [{"seq": 4096, "batch": 4, "heads": 16, "dtype": "bf16"}]


def test_names_of_kernels_reach_ncus_command(monkeypatch: pytest.MonkeyPatch) -> None:
    commands: list[list[str]] = []

    class Done:
        returncode, stdout, stderr = 1, "No kernels were profiled", ""

    monkeypatch.setattr(ncu, "run", lambda command, _: commands.append(command) or Done)
    for kernels in ("", "flash_fwd"):
        with pytest.raises(Exception, match="saw no kernel"):
            ncu.record("ncu", ["m"], ["driver"], samples=False, seconds=1, kernels=kernels)
    assert "--kernel-name" not in commands[0]
    assert commands[1][commands[1].index("--kernel-name") + 1] == "regex:flash_fwd"
