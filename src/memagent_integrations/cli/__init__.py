"""The command line: `memagent`."""

from memagent_integrations.cli.main import app

__all__ = ["app"]
