"""Teach a model what to remember: multi-conversation DAPO on one machine, exact and restartable."""
