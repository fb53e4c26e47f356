"""What `ddtree doctor` finds out: one check a line, with what to do where it is not well."""

from __future__ import annotations

import enum
from dataclasses import dataclass


class Status(enum.StrEnum):
    """How a check came out. Only a problem keeps a server from serving DDTREE."""

    OK = "ok"
    WARNING = "warning"
    PROBLEM = "problem"
    UNTRIED = "untried"  # behind a problem that is listed itself


@dataclass(frozen=True)
class Check:
    """One line of the report; `advice` says what to do and is empty where nothing is."""

    name: str
    status: Status
    found: str
    advice: str = ""


def ok(name: str, found: str) -> Check:
    return Check(name, Status.OK, found)


def warning(name: str, found: str, advice: str) -> Check:
    return Check(name, Status.WARNING, found, advice)


def untried(name: str, why: str) -> Check:
    return Check(name, Status.UNTRIED, why)


def problem(name: str, found: str, advice: str) -> Check:
    return Check(name, Status.PROBLEM, found, advice)
