"""Turn the logs of NVRTC and ptxas into one error that shows the source lines concerned."""

from __future__ import annotations

import re

from warploom.core.errors import CompileError
from warploom.cuda.ptx import compile_to_ptx

_CONTEXT = 2  # source lines shown before and after each line named
_MOST_PLACES = 8
_NVRTC_ERROR = re.compile(r"^(?P<file>[^\n(]+)\((?P<line>\d+)\): (?:catastrophic )?error\b", re.MULTILINE)
_PTXAS_ERROR = re.compile(r"ptx input, line (?P<line>\d+); error\s*:")
# ptxas's advisories that it gave up wgmma's asynchrony: the kernel would be right but several times slower.
_SERIALISED_WGMMA = re.compile(r"^.*\bC75\d\d\b.*$", re.MULTILINE)
_PTX_LOCATION = re.compile(r"^\s*\.loc\s+\d+\s+(\d+)")


def compile_error(message: str, source: str, name: str, arch: str) -> CompileError:
    """The CompileError for NVRTC's ``message`` about kernel ``name``: the log, then the lines it names."""
    log = message.split("compilation log:", 1)[-1].replace("\0", "").strip()
    lines = [int(found["line"]) for found in _NVRTC_ERROR.finditer(log) if found["file"].endswith(f"{name}.cu")]
    if not lines and _PTXAS_ERROR.search(log):
        lines = _source_lines_of_ptxas_errors(source, name, arch)
    parts = [f"kernel {name!r} does not compile for {arch}:", log]
    if lines:
        parts += ["in the generated CUDA:", excerpt(source, lines)]
    return CompileError("\n".join(parts), log=log, source=source)


def refuse_serialised_wgmma(log: str, source: str, name: str, arch: str) -> None:
    """Raise CompileError if ptxas says in ``log`` (advisories C7501 … C7519) that it serialises ``wgmma``."""
    found = _SERIALISED_WGMMA.findall(log)
    if found:
        advice = (
            "wait for the group before touching its accumulators, keep them in registers across the batch, and fence "
            "before the first wgmma"
        )
        raise CompileError(
            f"ptxas serialises the wgmma instructions of kernel {name!r} for {arch}:\n"
            + "\n".join(dict.fromkeys(line.strip() for line in found))
            + f"\n{advice}",
            log=log,
            source=source,
        )


def excerpt(source: str, lines: list[int]) -> str:
    """The numbered source lines around each of ``lines`` (1-based), the lines themselves marked with ``>``."""
    text = source.splitlines()
    marked = [line for line in dict.fromkeys(lines) if 1 <= line <= len(text)][:_MOST_PLACES]
    shown = sorted({n for line in marked for n in range(line - _CONTEXT, line + _CONTEXT + 1) if 1 <= n <= len(text)})
    out: list[str] = []
    for previous, number in zip([0, *shown], shown, strict=False):
        if previous and number > previous + 1:
            out.append("      …")
        out.append(f"{'>' if number in marked else ' '} {number:4d} | {text[number - 1]}")
    return "\n".join(out)


def _source_lines_of_ptxas_errors(source: str, name: str, arch: str) -> list[int]:
    """Source lines of the PTX that ptxas refuses: compile once more with line information and follow the ``.loc``."""
    ptx, log, _ = compile_to_ptx(source, f"{name}.cu", arch, ["--fmad=false"])
    lines: list[int] = []
    for error in _PTXAS_ERROR.finditer(log):
        for ptx_line in reversed(ptx.splitlines()[: int(error["line"])]):
            if location := _PTX_LOCATION.match(ptx_line):
                lines.append(int(location[1]))
                break
    return lines
