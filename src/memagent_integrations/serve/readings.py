"""Continue runs of a journal in this process, each in a thread of its own."""

from __future__ import annotations

import threading
from collections.abc import Callable
from pathlib import Path
from shlex import quote

from memagent_integrations.errors import MemAgentError, RunPaused, UsageError
from memagent_integrations.journal import Journal, Run
from memagent_integrations.reader import Reader

Resume = Callable[[Journal, str], Reader]
"""Makes the reader that continues a run."""


class BackgroundReadings:
    """Starts readings and keeps the errors of those that failed.

    The threads are daemons: when the process ends they end too, and the journal has their steps.
    """

    def __init__(self, journal: Journal, resume: Resume) -> None:
        self._journal, self._resume = journal, resume
        self._lock = threading.Lock()
        self._threads: dict[str, threading.Thread] = {}
        self._failures: dict[str, str] = {}

    def start(self, name: str) -> None:
        """Continue a run.

        Raises:
            UsageError: it is finished, it is being read, or the journal does not know which files it reads.
        """
        run = self._journal.run(name)
        if run.finished:
            raise UsageError(f"the run {name} is finished; go on from one of its steps, as a new branch")
        if not (run.files and run.own):
            problem = "it is not known which files the run {} reads"
            if run.files:
                problem = "the run {} was not read by you on this machine, so that its files have to be given again"
            raise UsageError(f"{problem.format(name)}; go on with: memagent runs resume {quote(name)} FILE...")
        with self._lock:
            if run.active or self.reads(name):
                raise UsageError(f"the run {name} is being read")
            self._failures.pop(name, None)
            self._threads[name] = threading.Thread(target=self._read, args=(run,), name=f"reading {name}", daemon=True)
            self._threads[name].start()

    def reads(self, name: str) -> bool:
        """Return whether this process reads the run, or is loading its model."""
        return name in self._threads and self._threads[name].is_alive()

    def failure(self, name: str) -> str | None:
        """Return the error that ended the last reading of a run in this process, if it failed."""
        return self._failures.get(name)

    def _read(self, run: Run) -> None:
        try:
            with self._resume(self._journal, run.name) as reader:
                reader.read(run.question, [Path(file) for file in run.files], run=run.name)
        except RunPaused:
            return
        except MemAgentError as error:
            self._failures[run.name] = str(error)
        except Exception as error:  # anything that the model's library raises; the page shows it
            self._failures[run.name] = f"{type(error).__name__}: {error}"
            raise
