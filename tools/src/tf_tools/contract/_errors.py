"""Errors of the contract check."""

from __future__ import annotations


class ContractError(Exception):
    """The check cannot be made: a wheel, a surface or a source file is not what it should be."""
