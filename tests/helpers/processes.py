"""Processes of their own that begin at once: forked from one that has imported what they need, and computed nothing."""

from __future__ import annotations

import multiprocessing

PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(
    [
        "matplotlib.figure",
        "memagent_integrations.evaluation.harness",
        "memagent_integrations.backends.openai",
        "memagent_integrations.training.served",
        "memagent_integrations.training.trainer",
        "transformers.models.llama.modeling_llama",
    ]
)
