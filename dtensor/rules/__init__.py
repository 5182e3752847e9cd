"""Sharding rules: one table of index notation, and functions for what does not fit."""

from dtensor.rules.table import RULES, register_rule

__all__ = ["RULES", "register_rule"]
