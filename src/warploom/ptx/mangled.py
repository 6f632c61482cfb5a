"""Mangled names of C++ kernels (Itanium's ABI): what they are called, and what their pointers point to."""

from __future__ import annotations

import re

from warploom.core.dtypes import DType, bf16, f16, f32, f64, s16, s32, s64, u16, u32, u64

_BUILTINS = {
    "f": f32,
    "d": f64,
    "s": s16,
    "t": u16,
    "i": s32,
    "j": u32,
    "l": s64,
    "m": u64,
    "x": s64,
    "y": u64,
    "6__half": f16,
    "13__nv_bfloat16": bf16,
}
"""Codes of the Itanium C++ ABI for numbers. Bytes are missing: they stand for memory of any type."""
_TEMPLATE_ARGUMENTS = re.compile(r"I(?:[a-z]|L[a-z]n?\d+E|6__half|13__nv_bfloat16)*E")
_TEMPLATE_ARGUMENT = re.compile(r"L\w+?E|6__half|13__nv_bfloat16|[a-z]")
_LENGTH = re.compile(r"\d+")
_PREFIX = re.compile(r"P|[rVK]+")
_REFERENCE = re.compile(r"S(\d?)_")
_TEMPLATE_PARAMETER = re.compile(r"T(\d?)_")


def readable_name(mangled: str) -> str:
    """A kernel's name without what mangling adds: ``mine::scan`` of ``_ZN4mine4scanIfEEvPKf``; others as they are."""
    names, _ = _names_of(mangled)
    return "::".join(name.lstrip("0123456789") for name in names) or mangled


def _names_of(mangled: str) -> tuple[list[str], int]:
    """The namespaces and the name of a mangled function, each after its length, and where they end."""
    names, at = list[str](), 2 + mangled.startswith("_ZN")
    while mangled.startswith("_Z") and (length := _LENGTH.match(mangled, at)):
        at = length.end() + int(length[0])
        names.append(mangled[length.start() : at])
    return names, at


def pointed_types(mangled: str) -> list[DType | None]:
    """The number type that each parameter of a mangled kernel points to; None for one that is no pointer to numbers.

    The list ends at the first parameter that cannot be read, and is empty for a kernel that is ``extern "C"``.
    """
    nested, (names, at) = mangled.startswith("_ZN"), _names_of(mangled)
    if not names:
        return []
    arguments = _TEMPLATE_ARGUMENTS.match(mangled, at)
    template = _TEMPLATE_ARGUMENT.findall(arguments[0][1:-1]) if arguments else []
    if arguments:
        at = arguments.end()
    else:
        names = names[:-1]  # S_ refers to namespaces and templates, not to the function
    rest = ("E" if nested else "") + ("v" if arguments else "")  # a template's result is there, too
    if not mangled.startswith(rest, at):
        return []
    known = names + [argument for argument in template if argument[0].isdigit()]
    found: list[DType | None] = []
    at += len(rest)
    while at < len(mangled):
        one, at = _read_type(mangled, at, known)
        if not one:
            break
        target = re.sub(r"^P[rVK]*", "", one) if one[0] == "P" else ""
        if parameter := _TEMPLATE_PARAMETER.fullmatch(target):
            number = _number(parameter[1])
            target = template[number] if number < len(template) else ""
        found.append(_BUILTINS.get(target))
    return found


def _read_type(text: str, at: int, known: list[str]) -> tuple[str, int]:
    """The type at a place with its references resolved, '' where it cannot be read, and where it ends.

    ``known`` are the names and types that ``S_``, ``S0_``, ... refer to, and gets those of this type.
    """
    if reference := _REFERENCE.match(text, at):
        number = _number(reference[1])
        return (known[number] if number < len(known) else ""), reference.end()
    if prefix := _PREFIX.match(text, at):
        inner, at = _read_type(text, prefix.end(), known)
        one = prefix[0] + inner if inner else ""
    elif parameter := _TEMPLATE_PARAMETER.match(text, at):
        one, at = parameter[0], parameter.end()
    elif length := _LENGTH.match(text, at):
        at = length.end() + int(length[0])
        one = text[length.start() : at]
    else:  # a letter for a builtin type, which is not referred to; u and capitals begin what is not read
        one = text[at : at + 1]
        return (one if one.islower() and one != "u" else ""), at + 1
    if one and one not in known:
        known.append(one)
    return one, at


def _number(digit: str) -> int:
    """The position that a reference means: ``S_`` is the first, ``S0_`` the second."""
    return int(digit) + 1 if digit else 0
