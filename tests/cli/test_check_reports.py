"""What ``warploom check`` writes for CI services, and the baseline of findings that are accepted."""

from __future__ import annotations

import json
import os
from typing import Any, get_args
from urllib.parse import unquote
from xml.etree import ElementTree

import numpy as np
import pytest
from tests.ptx.text import kernel

from warploom.checking.formats import RULES
from warploom.emulate.findings.findings import Kind

SWAP = """mov.u32 %r0, %tid.x; shl.b32 %r1, %r0, 2; mov.u32 %r2, TILE; add.u32 %r3, %r2, %r1;
mul.wide.u32 %d20, %r0, 4; add.s64 %d21, %d0, %d20; add.s64 %d22, %d1, %d20;
ld.global.f32 %f1, [%d21];
st.shared.f32 [%r3], %f1;
BARRIER
xor.b32 %r4, %r1, 4; add.u32 %r5, %r2, %r4; ld.shared.f32 %f2, [%r5];
st.global.f32 [%d22], %f2;"""


class Project:
    """A repository with one kernel that swaps neighbours by way of shared memory."""

    def __init__(self, folder: Any, invoke: Any) -> None:
        self.folder, self.invoke = folder, invoke
        (folder / ".git").mkdir()
        (folder / "a b").mkdir()
        self.source = folder / "a b" / "swap.ptx"
        np.save(folder / "a b" / "y.npy", np.arange(64, dtype=np.float32).reshape(32, 2)[:, ::-1].reshape(-1))
        self.write()

    def write(self, barrier: str = "", tile: str = "tile", above: str = "", block: int = 64) -> None:
        body = SWAP.replace("BARRIER", barrier).replace("TILE", tile)
        self.source.write_text(above + kernel(body, ["u64", "u64"], f".shared .align 4 .b8 {tile}[256];"))
        x = {"dtype": "f32", "shape": [64], "fill": "arange"}
        out = {"dtype": "f32", "shape": [64], "fill": "nan", "name": "out", "expect": "y.npy"}
        launch = {"grid": 1, "block": block, "arguments": [x, out]}
        self.source.with_suffix(".launch.json").write_text(json.dumps(launch))

    def check(self, *options: str, code: int) -> Any:
        result = self.invoke("check", "a b/", *options)
        assert result.exit_code == code, result.output
        return result

    def sarif(self, code: int = 1) -> Any:
        self.check("--sarif", "reports/found.sarif", code=code)
        log = json.loads((self.folder / "reports" / "found.sarif").read_text())
        assert not list(sarif_violations(log))
        return log["runs"][0]


@pytest.fixture
def project(tmp_path, invoke, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return Project(tmp_path, invoke)


PROPERTIES: dict[str, dict[str, Any]] = {
    "log": {"$schema": str, "version": str, "runs": ["run"]},
    "run": {"tool": "tool", "originalUriBaseIds": dict, "invocations": ["invocation"], "results": ["result"]},
    "tool": {"driver": "driver"},
    "driver": {"name": str, "semanticVersion": str, "rules": ["rule"]},
    "rule": {"id": str, "shortDescription": "text"},
    "text": {"text": str},
    "invocation": {"executionSuccessful": bool, "exitCode": int, "toolExecutionNotifications": ["notification"]},
    "notification": {"level": str, "message": "text", "locations": ["location"]},
    "result": {
        "ruleId": str,
        "ruleIndex": int,
        "level": str,
        "message": "text",
        "locations": ["location"],
        "partialFingerprints": dict,
        "relatedLocations": ["location"],
    },
    "location": {"physicalLocation": "place", "message": "text"},
    "place": {"artifactLocation": "artifact", "region": "region"},
    "artifact": {"uri": str, "uriBaseId": str},
    "region": {"startLine": int},
}
"""Of each object of a SARIF 2.1.0 log that is written: the names that the schema knows, and their types."""
REQUIRED = {
    "log": ("version", "runs"),
    "run": ("tool",),
    "tool": ("driver",),
    "driver": ("name",),
    "rule": ("id",),
    "text": ("text",),
    "invocation": ("executionSuccessful",),
    "notification": ("message",),
    "result": ("message",),
}


def sarif_violations(found: Any, kind: str = "log"):
    """What the schema of SARIF 2.1.0 forbids, and what a viewer could not use."""
    yield from (f"{kind} has no {name}" for name in REQUIRED.get(kind, ()) if name not in found)
    for name, value in found.items():
        wanted = PROPERTIES[kind].get(name)
        if isinstance(wanted, list):
            unique = len({json.dumps(one, sort_keys=True) for one in value}) == len(value)
            if not unique and name in ("rules", "relatedLocations"):
                yield f"{kind}.{name} repeats itself"
            for one in value:
                yield from sarif_violations(one, wanted[0])
        elif isinstance(wanted, str):
            yield from sarif_violations(value, wanted)
        elif wanted is None or type(value) is not wanted:
            yield f"{kind}.{name}: {value!r}"
    if kind == "log" and found["version"] != "2.1.0":
        yield "another version"
    if "level" in found and found["level"] not in ("none", "note", "warning", "error"):
        yield f"level {found['level']}"
    if kind == "region" and found["startLine"] < 1:
        yield "lines begin at 1"
    if kind == "artifact" and (" " in found["uri"] or ("uriBaseId" not in found and "://" not in found["uri"])):
        yield f"no URI: {found['uri']}"
    if kind == "run":
        bases = found["originalUriBaseIds"]
        if any(not base["uri"].startswith("file:///") or not base["uri"].endswith("/") for base in bases.values()):
            yield "a base is a folder"
        rules = [rule["id"] for rule in found["tool"]["driver"]["rules"]]
        for result in found["results"]:
            if rules[result["ruleIndex"]] != result["ruleId"]:
                yield "a result has another rule than its index"
            if not all(isinstance(value, str) for value in result["partialFingerprints"].values()):
                yield "fingerprints are texts"


def test_every_kind_of_finding_is_a_rule():
    assert set(get_args(Kind)) <= set(RULES)


def test_sarif_has_rule_level_and_lines_relative_to_the_repository(project, monkeypatch):
    monkeypatch.chdir(project.folder / "a b")
    result = project.invoke("check", "swap.ptx", "--sarif", "../found.sarif")
    assert result.exit_code == 1
    log = json.loads((project.folder / "found.sarif").read_text())
    assert not list(sarif_violations(log))
    (found,) = log["runs"][0]["results"]
    assert (found["ruleId"], found["level"]) == ("race", "error")
    place = found["locations"][0]["physicalLocation"]
    assert unquote(place["artifactLocation"]["uri"]) == "a b/swap.ptx"
    lines = project.source.read_text().splitlines()
    assert "ld.shared.f32 %f2" in lines[place["region"]["startLine"] - 1]
    other = found["relatedLocations"][0]["physicalLocation"]["region"]["startLine"]
    assert "st.shared.f32" in lines[other - 1]


def test_fingerprints_survive_lines_that_move_and_not_lines_that_change(project):
    def fingerprint():
        (found,) = project.sarif()["results"]
        return found["partialFingerprints"], found["locations"][0]["physicalLocation"]["region"]["startLine"]

    before, line = fingerprint()
    project.write(above="// a remark\n// and another\n")
    assert fingerprint() == (before, line + 2)
    project.source.write_text(project.source.read_text().replace("%r4, 4;", "%r4, 4; "))
    assert fingerprint()[0] == before  # only spaces
    project.source.write_text(project.source.read_text().replace("xor.b32 %r4, %r1, 4", "xor.b32 %r4, 4, %r1"))
    assert fingerprint()[0] != before


def test_what_is_for_review_is_a_warning_and_strict_makes_it_an_error(project):
    project.write(tile="global_smem")
    (found,) = project.sarif(code=0)["results"]
    assert found["level"] == "warning"
    strict = project.check("--strict", "--sarif", "s.sarif", "--junit", "s.xml", "--json", code=1)
    assert not json.loads(strict.stdout.partition("written to")[0])["kernels"][0]["ok"]
    (found,) = json.loads((project.folder / "s.sarif").read_text())["runs"][0]["results"]
    assert found["level"] == "error"
    assert ElementTree.parse(project.folder / "s.xml").getroot().get("failures") == "1"


def test_a_file_that_cannot_be_checked_is_a_notification_and_an_error_in_junit(project):
    (project.folder / "a b" / "broken.py").write_text("import warploom\nkernel.example(\n")
    (project.folder / "a b" / "other.ptx").write_text(".entry")
    project.check("--sarif", "s.sarif", "--junit", "s.xml", code=2)
    log = json.loads((project.folder / "s.sarif").read_text())
    assert not list(sarif_violations(log))
    (invocation,) = log["runs"][0]["invocations"]
    assert (invocation["executionSuccessful"], invocation["exitCode"]) == (False, 2)
    (told,) = invocation["toolExecutionNotifications"]
    assert told["locations"][0]["physicalLocation"]["artifactLocation"]["uri"] == "a%20b/broken.py"
    root = ElementTree.parse(project.folder / "s.xml").getroot()
    assert [root.get(name) for name in ("tests", "failures", "errors", "skipped")] == ["3", "1", "1", "1"]
    cases = {case.get("classname"): [child.tag for child in case] for case in root.iter("testcase")}
    assert cases == {"a b/broken.py": ["error"], "a b/other.ptx": ["skipped"], "a b/swap.ptx": ["failure"]}


def test_junit_has_a_wrong_result_and_times(project):
    project.write("bar.sync 0;")
    np.save(project.folder / "a b" / "y.npy", np.zeros(64, np.float32))
    project.check("--junit", "s.xml", code=1)
    (case,) = ElementTree.parse(project.folder / "s.xml").getroot().iter("testcase")
    (failure,) = case.findall("failure")
    assert failure.get("type") == "wrong_result"
    assert "out is wrong" in str(failure.text)
    assert float(case.get("time", 0)) > 0


def test_annotations_for_github(project):
    (line,) = [x for x in project.check("--github", code=1).output.splitlines() if x.startswith("::")]
    assert line.startswith("::error file=a b/swap.ptx,line=")
    assert ",title=warploom%3A race::" in line


def test_a_baseline_accepts_what_is_known_and_nothing_else(project):
    project.check("--baseline", "accepted.json", "--write-baseline", code=0)
    (entry,) = json.loads((project.folder / "accepted.json").read_text())["accepted"]
    assert (entry["rule"], entry["file"]) == ("race", "a b/swap.ptx")
    project.write(above="// moved\n")
    known = project.check("--baseline", "accepted.json", "--json", code=0)
    (checked,) = json.loads(known.stdout)["kernels"]
    assert (checked["ok"], checked["findings"], len(checked["accepted"])) == (True, [], 1)
    project.write(block=96)
    text = project.check("--baseline", "accepted.json", code=1).stdout
    assert "bounds" in text
    project.check(code=1)


def test_what_no_longer_occurs_is_stale_until_the_baseline_is_written_anew(project):
    project.check("--baseline", "accepted.json", "--write-baseline", code=0)
    file = project.folder / "accepted.json"
    elsewhere = {"rule": "race", "file": "elsewhere.ptx", "kernel": "k", "source": "x", "reason": "because"}
    known = json.loads(file.read_text())
    (project.folder / "elsewhere.ptx").write_text("")
    file.write_text(json.dumps(known | {"accepted": [*known["accepted"], elsewhere]}))
    project.write("bar.sync 0;")
    said = project.check("--baseline", "accepted.json", code=0).stderr
    assert "no longer occurs: race in" in said
    assert "elsewhere" not in said  # it was not checked
    project.check("--baseline", "accepted.json", "--write-baseline", code=0)
    assert json.loads(file.read_text())["accepted"] == [elsewhere]
    os.remove(project.folder / "elsewhere.ptx")
    assert "elsewhere" in project.check("--baseline", "accepted.json", code=0).stderr


@pytest.mark.parametrize(
    "text",
    [
        "{}",
        "[]",
        '{"version": 2, "accepted": []}',
        '{"version": 1, "accepted": [{}]}',
        '{"version": 1, "accepted": [{"rule": 7, "file": null, "kernel": [], "source": {}}]}',
        "x",
    ],
)
def test_a_file_that_is_no_baseline_is_refused(project, text):
    (project.folder / "accepted.json").write_text(text)
    assert "--write-baseline" in project.check("--baseline", "accepted.json", code=2).stderr
    assert "there is no baseline" in project.check("--baseline", "none.json", code=2).stderr
    assert "--baseline FILE" in project.check("--write-baseline", code=2).stderr
