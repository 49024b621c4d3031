"""Readings that survive a crash: every step of every run is in a SQLite file."""

from memagent_integrations.journal.journal import Journal, NamedMemory, Run, State, settings_of

__all__ = ["Journal", "NamedMemory", "Run", "State", "settings_of"]
