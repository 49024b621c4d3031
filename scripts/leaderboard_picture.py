"""Draw the page that `memagent eval report --html` makes: a PNG of its beginning, or of what an address in it shows.

    python scripts/leaderboard_picture.py docs/results/evaluation/embedded.jsonl docs/images/leaderboard.png

Needs Chromium, its driver, and selenium.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from browsing import browser
from selenium.webdriver.support.ui import WebDriverWait

from memagent_integrations.evaluation import report
from memagent_integrations.evaluation.leaderboard import Leaderboard
from memagent_integrations.evaluation.results import Results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("results", type=Path, help="what memagent eval run wrote")
    parser.add_argument("picture", type=Path)
    parser.add_argument("--address", default="", help="as #g3 (samples of a score) or #g3/17 (one of them)")
    parser.add_argument("--width", type=int, default=1440)
    parser.add_argument("--height", type=int, default=900)
    parser.add_argument("--dark", action="store_true")
    args = parser.parse_args()
    board = Leaderboard()
    results = Results(args.results, on_result=board.add)
    with tempfile.TemporaryDirectory() as folder, browser(args.width, args.height, dark=args.dark) as page:
        file = Path(folder) / "page.html"
        rows = report.rows(results, results.settings)
        file.write_text(board.page(list(results), rows, results.settings), encoding="utf-8")
        page.get(f"{file.as_uri()}{args.address}")
        shown = "#reading" if "/" in args.address else "#samples" if args.address else "#board"
        WebDriverWait(page, 60).until(lambda _: page.find_element("css selector", shown).is_displayed())
        page.save_screenshot(str(args.picture))


if __name__ == "__main__":
    main()
