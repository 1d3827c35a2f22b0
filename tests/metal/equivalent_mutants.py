"""Mutants that compute the same as the kernel, by file and description, with the reason for each."""

from __future__ import annotations

EQUIVALENT: dict[tuple[str, str], str] = {}
