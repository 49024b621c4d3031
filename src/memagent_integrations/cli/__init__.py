"""The command line: `memagent`."""

import sys

try:
    from memagent_integrations.cli.main import app
except KeyboardInterrupt:  # Ctrl-C while the packages are imported, which takes a second
    sys.stderr.write("memagent: interrupted\n")
    sys.exit(130)

__all__ = ["app"]
