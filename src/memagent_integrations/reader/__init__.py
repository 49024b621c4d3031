"""Read documents with a model: the facade."""

from memagent_integrations.reader.reader import Reader

__all__ = ["Reader"]
