"""A tiny embedded model, and processes that ask for it at once."""

from __future__ import annotations

import hashlib
import random
import subprocess
import sys
from typing import Any

from memagent_integrations.backends import embedded

CONTENT = random.Random(7).randbytes(600_000)
MODEL = embedded.Embedded(
    name="tiny",
    requirement="llm-tiny==0.3.1",
    member="llm_tiny/tiny.gguf",
    size=len(CONTENT),
    sha256=hashlib.sha256(CONTENT).hexdigest(),
    window=2048,
    sampling={},
    license="Apache-2.0",
)


def in_processes(expression: str, model: embedded.Embedded) -> tuple[list[str], str]:
    """Return what this expression has for a value in three processes at once, and all that they log."""
    script = f"""
import sys
from memagent_integrations.backends import embedded, prepared
embedded.EMBEDDED = {{"tiny": embedded.Embedded(**eval(sys.argv[1]))}}
print({expression})
"""
    record = repr({name: getattr(model, name) for name in model.__dataclass_fields__ if name != "budgets"})
    pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
    running = [subprocess.Popen([sys.executable, "-c", script, record], **pipes) for _ in range(3)]
    written = [process.communicate(timeout=120) for process in running]
    return [output.strip() for output, _ in written], "".join(log for _, log in written)
