"""Reinforcement learning teaches a reader what to keep."""
