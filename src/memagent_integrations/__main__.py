"""Run the command line as `python -m memagent_integrations`, for launchers that take a module."""

from memagent_integrations.cli import app

if __name__ == "__main__":
    app(prog_name="memagent")
