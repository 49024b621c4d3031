"""Does it work, on this model, at this length? The published benchmarks, honest baselines, one command."""
