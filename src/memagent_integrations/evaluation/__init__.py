"""Measure readers on published benchmarks, against honest baselines, on any model and at any length."""
