"""Teach a model what to remember: multi-conversation DAPO, exact, on one machine."""
