"""Draw the memory as it grows: an SVG from a trace that `memagent read --trace` saved.

    python scripts/memory_picture.py trace.json docs/images/memory.svg [--steps 0,1,5] [--words 60]

Words that the step inserted stand out. Long memories are cut after --words words, with a note that says so.
"""

from __future__ import annotations

import argparse
import difflib
import io
from pathlib import Path

from rich.console import Console, Group
from rich.padding import Padding
from rich.text import Text

from memagent_integrations import Reading, Step

# rich's own template loads a font from the network; this one does not.
SVG = """<svg viewBox="0 0 {width} {height}" xmlns="http://www.w3.org/2000/svg">
<style>.{unique_id}-matrix {{
  font-family: ui-monospace, Menlo, Consolas, monospace; font-size: {char_height}px; line-height: {line_height}px;
}}
{styles}</style>
<defs>
<clipPath id="{unique_id}-clip-terminal">
<rect x="0" y="0" width="{terminal_width}" height="{terminal_height}"/>
</clipPath>
{lines}
</defs>
<rect width="{width}" height="{height}" rx="8" fill="#1b1f27"/>
<g transform="translate(9, 9)" clip-path="url(#{unique_id}-clip-terminal)">
{backgrounds}
<g class="{unique_id}-matrix">{matrix}</g>
</g>
</svg>
"""


def block(title: str, text: Text) -> Padding:
    """Return a titled block of the picture."""
    return Padding(Group(Text(title, style="#8fa3c8"), text), (0, 1, 1, 1))


def memory(step: Step, chunks: int, words: int) -> Padding:
    """Return the block of one step: its memory, at most `words` words of it, with insertions highlighted."""
    assert step.span is not None
    before, after = step.memory_before.split(), step.memory.split()
    text = Text()
    for kind, _, _, start, end in difflib.SequenceMatcher(None, before, after, autojunk=False).get_opcodes():
        shown = after[start : min(end, words)]
        style = "bold #f5c26b" if kind in ("insert", "replace") else "#aab2c0"
        text.append(" ".join(shown) + (" " if shown else ""), style=style)
    if len(after) > words:
        text.append(f"... and {len(after) - words} words more", style="italic #7d8697")
    outcome = f"memory {step.outcome}{', cut' if step.cut else ''}"
    return block(f"after chunk {step.index + 1} of {chunks} ({step.span.tokens:,} tokens): {outcome}", text)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("trace", type=Path)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--steps", default="0,1,2,3", help="which steps to show (%(default)s)")
    parser.add_argument("--words", type=int, default=60, help="words of each memory to show (%(default)s)")
    options = parser.parse_args()
    reading = Reading.from_json(options.trace.read_bytes())
    chunks = len(reading.steps) - 1
    shown = [reading.steps[int(number)] for number in options.steps.split(",")]
    console = Console(record=True, width=100, file=io.StringIO(), color_system="truecolor")
    console.print(block("question", Text(reading.question, style="bold #e6e9ef")))
    console.print(*(memory(step, chunks, options.words) for step in shown), sep="")
    console.print(block("answer", Text(reading.answer or str(reading.error), style="bold #9fd3a0")))
    options.picture.write_text(console.export_svg(code_format=SVG, unique_id="memory"), encoding="utf-8")


if __name__ == "__main__":
    main()
