"""Run the command line as `python -m memagent_integrations`, for launchers that take a module."""

import os
import sys

if __name__ == "__main__":
    # Python has put the current folder first: an accelerate.py there would be taken for the package. pathlib too.
    here = os.getcwd()  # noqa: PTH109
    holds_us = __file__ == os.sep.join((here, "memagent_integrations", "__main__.py"))  # noqa: PTH118
    if not sys.flags.safe_path and sys.path[:1] == [here] and not holds_us:
        del sys.path[0]

    from memagent_integrations.cli import app

    app(prog_name="memagent")
