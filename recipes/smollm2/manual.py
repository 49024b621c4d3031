"""Write twenty questions about the demonstration's document, a part of Python's manual, as a task of `memagent eval`.

    python recipes/smollm2/manual.py manual.jsonl
    memagent eval run -t jsonl:manual.jsonl -r memagent --model smollm2 -o results.jsonl

The questions were written before any model was asked. Each is answered at one place of the text.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from runpy import run_path

QUESTIONS = {
    "Which built-in function can be used instead of import pdb; pdb.set_trace() since version 3.7?": "breakpoint",
    "Which module dumps Python tracebacks on a fault, after a timeout, or on a user signal?": "faulthandler",
    "Which function enters post-mortem debugging of the traceback found in sys.last_traceback?": "pdb.pm",
    "For which signal does Pdb set a handler by default?": "SIGINT",
    "Which file in the user's home directory is executed as if it had been typed at the debugger prompt?": ".pdbrc",
    "With which encoding is the file .pdbrc read?": "utf-8",
    "Which debugger command prints a stack trace?": "w(here)",
    "Which debugger command sets a temporary breakpoint?": "tbreak",
    "How many lines around the current line does the command list show?": "11",
    "Which module does the debugger command pp use to print a value?": "pprint",
    "Which debugger command starts an interactive interpreter?": "interact",
    "Which module splits the arguments of the debugger command restart?": "shlex",
    "Which argument of the class Pdb keeps it from touching the SIGINT handler?": "nosigint",
    "Which PEP is about the with statement?": "343",
    "Which PEP is the specification of structural pattern matching?": "634",
    "Which PEP is about type hints?": "484",
    "Which PEP is about coroutines with async and await syntax?": "492",
    "Of which exception is UnboundLocalError a subclass?": "NameError",
    "Which exception is raised when a name is not found at all?": "NameError",
    "Which error is raised for duplicate literal values in a mapping pattern?": "SyntaxError",
}
DEMO = Path(__file__).parents[2] / "scripts" / "demo"


def main() -> None:
    text = run_path(str(DEMO))["text"]()
    with Path(sys.argv[1]).open("w", encoding="utf-8") as file:
        for question, answer in QUESTIONS.items():
            if answer not in text:
                sys.exit(f"this Python's manual does not have the answer to {question!r}")
            row = {"question": question, "answers": [answer], "metric": "sub_em", "context": text}
            file.write(json.dumps(row) + "\n")


if __name__ == "__main__":
    main()
