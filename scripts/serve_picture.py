"""Draw `memagent serve` at work: a PNG of the page while the embedded model reads a text that Python itself ships.

    python scripts/serve_picture.py docs/images/serve.png [--chunks 5]

Needs Chromium, its driver, and selenium.
"""

from __future__ import annotations

import argparse
import tempfile
import threading
from contextlib import chdir
from pathlib import Path
from pydoc_data.topics import topics

from browsing import browser
from selenium.webdriver.support.ui import WebDriverWait

from memagent_integrations import Journal, Reader
from memagent_integrations.serve import Server

QUESTION = "How does the import system find a module?"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("picture", type=Path)
    parser.add_argument("--chunks", type=int, default=5, help="number of chunks on the page (%(default)s)")
    options = parser.parse_args()
    picture = options.picture.resolve()
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        document = Path("import.txt")
        document.write_text(topics["import"] + topics["compound"], encoding="utf-8")
        journal = Journal(Path(folder) / "runs.db")
        reader = Reader("smollm2", chunk_tokens=1000, memory_tokens=160, output_tokens=160, journal=journal)
        threading.Thread(target=reader.read, args=(QUESTION, document), kwargs={"run": "import"}, daemon=True).start()
        server = Server(journal, Reader.from_run)
        threading.Thread(target=server.run, daemon=True).start()
        shoot(server.url, options.chunks, picture)
        journal.pause("import")
        server.stop()


def shoot(url: str, chunks: int, picture: Path) -> None:
    """Save a screenshot of the page once it shows this many chunks."""
    with browser(1200, 800) as page:
        page.get(url)
        WebDriverWait(page, 600).until(lambda _: len(page.find_elements("css selector", "#steps li")) >= chunks)
        page.save_screenshot(str(picture))


if __name__ == "__main__":
    main()
