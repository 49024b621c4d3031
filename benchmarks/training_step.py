"""Measure what a batch of training costs: a recipe through the command line, in a process of its own.

    python benchmarks/training_step.py recipes/first_step.toml [--output docs/results/training_step.json]

It reports the metrics of each batch, and the peak memory of the process (resident; with the model and everything before
the first batch).
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import subprocess
import sys
import tempfile
from pathlib import Path

from memagent_integrations.training.metrics import read

SHOWN = (
    "rollout_seconds",
    "learn_seconds",
    "tokens_per_second",
    "shared",
    "steps_a_rollout",
    "memory_tokens",
    "answer_tokens",
    "reward",
    "gap",
    "kl",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--adapter", type=Path, help="that of a warm start")
    parser.add_argument("--output", type=Path, help="a JSON file")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        run = Path(folder) / "run"
        adapter = ["--adapter", args.adapter] if args.adapter else []
        subprocess.run(
            [sys.executable, "-m", "memagent_integrations", "train", "run", args.recipe, "--output", run, *adapter],
            check=True,
        )
        lines = [line for line in read(run / "metrics.jsonl") if line["step"]]
    peak = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss / 1024
    figures = {
        "command": [Path(sys.argv[0]).name, *sys.argv[1:]],
        "processors": os.cpu_count(),
        "threads": os.environ.get("OMP_NUM_THREADS", "all"),
        "peak memory, MiB": round(peak),
        "batches": [{name: float(f"{line[name]:.4g}") for name in SHOWN if name in line} for line in lines],
    }
    print(json.dumps(figures, indent=1))
    if args.output:
        args.output.write_text(json.dumps(figures, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
