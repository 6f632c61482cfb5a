"""Outcomes of checks in the formats of CI services: SARIF, JUnit XML, annotations of GitHub."""

from __future__ import annotations

import hashlib
import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, Literal
from urllib.parse import quote
from xml.etree import ElementTree

from warploom.checking.baseline import Identity, identity_of, relative, repository_root
from warploom.checking.suite import CheckOutcome
from warploom.core.errors import WarploomError
from warploom.emulate import Finding
from warploom.ir.statements import SourceLine

Level = Literal["error", "warning", "note"]

RULES = {
    "race": "Two accesses to one byte, at least one of them a write, that nothing orders",
    "in_flight": "An access to what a copy or a wgmma is still working on",
    "uninitialised": "Something that was never written, or has not arrived, decides something",
    "bounds": "An access outside of its array or tile",
    "misaligned": "An address that is no multiple of the access's size",
    "divergence": "An instruction that needs all lanes of a warp runs with fewer",
    "member_mask": "A mask of lanes that does not fit the lanes that are there",
    "deadlock": "Warps that wait for ever",
    "barrier": "A barrier with wrong counts, numbers or arrivals",
    "mbarrier": "An mbarrier with wrong arrivals, bytes or phases, or used before its initialisation is visible",
    "proxy": "Accesses through different proxies without the fence between them",
    "leak": "The kernel ends while a copy or a wgmma is under way",
    "cluster": "An access to a CTA of the cluster that may not have begun or may have exited",
    "layout": "A tensor map that lays out its box in another way than the tile it is for",
    "undefined": "An operation whose result PTX leaves undefined",
    "overflow": "An integer that wraps where that cannot be meant",
    "assert": "An assert of the kernel that fails, or a trap",
    "wrong_result": "An array that is not what the launch expects",
    "unexercised": "A line that the launch runs too little of to be checked",
}
"""Every rule, with what it is about: kinds of findings, and what else a check reports."""


@dataclass(frozen=True)
class Issue:
    """One thing to report: ``line`` of ``path`` (as the repository names it), ``related`` other lines with a remark.

    ``identity`` does not depend on where lines stand.
    """

    rule: str
    level: Level
    kernel: str
    message: str
    path: str
    line: int
    identity: str
    related: tuple[tuple[str, int, str], ...] = ()


def issues_of(outcome: CheckOutcome) -> Iterator[Issue]:
    """Yield the findings and wrong results of a checked kernel; a kernel that was not checked has none."""
    checked, file = outcome.checked, outcome.file
    if checked is None:
        return
    for finding in checked.emulation.findings:
        path, line = _place(finding.where, file)
        yield Issue(
            finding.kind,
            "error" if checked.strict or finding.grade == "error" else "warning",
            outcome.kernel,
            f"{outcome.kernel}: {finding.message} ({finding.place})",
            path,
            line,
            _hashed(identity_of(finding, file, checked.name)),
            tuple(dict.fromkeys(_related(finding))),
        )
    for result in checked.results:
        if not result.ok:
            text = f"{outcome.kernel}: {result.name} is wrong: {result.wrong} of {result.count} elements"
            known = Identity("wrong_result", relative(file), checked.name, result.name)
            yield Issue(known.rule, "error", outcome.kernel, text, relative(file), outcome.line, _hashed(known))
    for missed in checked.uncovered:
        path, line = _place(missed.where, file)
        known = Identity("unexercised", relative(file), checked.name, f"{missed.kind} {missed.message}")
        yield Issue(known.rule, "note", outcome.kernel, f"{outcome.kernel}: {missed}", path, line, _hashed(known))


def _place(where: SourceLine, file: str) -> tuple[str, int]:
    return (relative(where.file), max(1, where.line)) if where.file else (relative(file), 1)


def _related(finding: Finding) -> Iterator[tuple[str, int, str]]:
    if finding.other is not None and finding.other.file:
        yield *_place(finding.other, ""), "the access that it conflicts with"
    for caller in finding.where.callers:
        yield *_place(caller, ""), "called from here"


def _hashed(identity: Identity) -> str:
    return hashlib.sha256("\0".join(astuple(identity)).encode()).hexdigest()[:32]


# -- SARIF
def sarif(issues: Sequence[Issue], errors: Iterable[tuple[str, str]] = (), exit_code: int = 0) -> dict[str, Any]:
    """A log in SARIF 2.1.0; ``errors`` are what could not be checked, and why."""
    rules, seen = list(RULES), Counter[str]()
    results = list[dict[str, Any]]()
    for issue in issues:
        seen[issue.identity] += 1
        related = [_location(*place) for place in issue.related]
        results.append(
            {
                "ruleId": issue.rule,
                "ruleIndex": rules.index(issue.rule),
                "level": issue.level,
                "message": {"text": issue.message},
                "locations": [_location(issue.path, issue.line)],
                "partialFingerprints": {"warploom/v1": f"{issue.identity}:{seen[issue.identity]}"},
            }
            | ({"relatedLocations": related} if related else {})
        )
    driver: dict[str, Any] = {
        "name": "warploom",
        "rules": [{"id": name, "shortDescription": {"text": text}} for name, text in RULES.items()],
    }
    with suppress(PackageNotFoundError):  # a checkout that is not installed
        driver["semanticVersion"] = version("warploom")
    notifications = [
        {"level": "error", "message": {"text": text}, "locations": [_location(path, 1)]} for path, text in errors
    ]
    run = {
        "tool": {"driver": driver},
        "originalUriBaseIds": {"%SRCROOT%": {"uri": repository_root(Path.cwd()).as_uri() + "/"}},
        "invocations": [
            {
                "executionSuccessful": not notifications,
                "exitCode": exit_code,
                "toolExecutionNotifications": notifications,
            }
        ],
        "results": results,
    }
    return {"$schema": "https://json.schemastore.org/sarif-2.1.0.json", "version": "2.1.0", "runs": [run]}


def _location(path: str, line: int, remark: str = "") -> dict[str, Any]:
    outside = Path(path).is_absolute()
    artifact = {"uri": Path(path).as_uri()} if outside else {"uri": quote(path), "uriBaseId": "%SRCROOT%"}
    place = {"physicalLocation": {"artifactLocation": artifact, "region": {"startLine": line}}}
    return place | ({"message": {"text": remark}} if remark else {})


def errors_of(outcomes: Iterable[CheckOutcome]) -> list[tuple[str, str]]:
    """Return the path and the reason of each kernel that could not be checked."""
    return [(_error_place(x, x.error)[0], str(x.error)) for x in outcomes if x.error is not None]


def _error_place(outcome: CheckOutcome, error: WarploomError) -> tuple[str, int]:
    return _place(error.where or SourceLine("", 0), outcome.file)


# -- JUnit
_NOT_IN_XML = re.compile("[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]")


def junit(outcomes: Sequence[CheckOutcome]) -> str:
    """A report in JUnit's XML: a test-suite for each file, a test for each kernel.

    Errors and wrong results are failures, what could not be checked is an error, what was skipped is skipped.
    """
    root = ElementTree.Element("testsuites", name="warploom")
    for file in dict.fromkeys(outcome.file for outcome in outcomes):
        suite = ElementTree.SubElement(root, "testsuite", name=file)
        for outcome in (x for x in outcomes if x.file == file):
            _test_case(suite, outcome)
        _count(suite)
    _count(root)
    ElementTree.indent(root)
    return '<?xml version="1.0" encoding="utf-8"?>\n' + ElementTree.tostring(root, encoding="unicode") + "\n"


def _test_case(suite: ElementTree.Element, outcome: CheckOutcome) -> None:
    name = outcome.kernel or outcome.file
    seconds = f"{outcome.seconds:.3f}"
    case = ElementTree.SubElement(suite, "testcase", classname=outcome.file, name=name, time=seconds)
    issues = list(issues_of(outcome))
    if outcome.error is not None:
        _child(case, "error", type(outcome.error).__name__, str(outcome.error))
    elif outcome.skipped:
        ElementTree.SubElement(case, "skipped", message=f"not checked, {outcome.skipped}")
    failures = [issue for issue in issues if issue.level == "error"]
    if failures:  # one element: readers of JUnit's XML expect no more
        text = "\n".join(f"{x.path}:{x.line}: {x.rule}: {x.message}" for x in failures)
        _child(case, "failure", failures[0].rule, text)
    others = [f"{x.level}: {x.rule}: {x.path}:{x.line}: {x.message}" for x in issues if x.level != "error"]
    if others:
        ElementTree.SubElement(case, "system-out").text = _NOT_IN_XML.sub("?", "\n".join(others))


def _child(case: ElementTree.Element, tag: str, kind: str, text: str) -> None:
    text = _NOT_IN_XML.sub("?", text)
    ElementTree.SubElement(case, tag, type=kind, message=text.splitlines()[0]).text = text


def _count(element: ElementTree.Element) -> None:
    """Number the tests below an element by what became of them, and add their times."""
    cases = list(element.iter("testcase"))
    element.set("tests", str(len(cases)))
    for attribute, tag in (("failures", "failure"), ("errors", "error"), ("skipped", "skipped")):
        element.set(attribute, str(sum(case.find(tag) is not None for case in cases)))
    element.set("time", f"{sum(float(case.get('time', 0)) for case in cases):.3f}")


# -- GitHub
def github_annotations(outcomes: Iterable[CheckOutcome]) -> Iterator[str]:
    """Commands that make GitHub show errors and warnings beside the lines of a change."""
    for outcome in outcomes:
        if outcome.error is not None:
            path, line = _error_place(outcome, outcome.error)
            yield _annotation("error", path, line, "warploom could not check", str(outcome.error))
        for issue in issues_of(outcome):
            if issue.level != "note":
                yield _annotation(issue.level, issue.path, issue.line, f"warploom: {issue.rule}", issue.message)


def _annotation(level: str, path: str, line: int, title: str, message: str) -> str:
    file, title = (_escaped(text).replace(":", "%3A").replace(",", "%2C") for text in (path, title))
    return f"::{level} file={file},line={line},title={title}::{_escaped(message)}"


def _escaped(text: str) -> str:
    return text.replace("%", "%25").replace("\r", "%0D").replace("\n", "%0A")
