"""Look up known vulnerabilities of an environment's packages with pip-audit, in PyPI's database of advisories."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import test_env

PIP_AUDIT = "pip-audit>=2.9,<3"
OWN = {"memagent-integrations"}  # installed from its folder


def check(python: Path, directory: Path) -> None:
    """Print what is known about the packages beside an interpreter; `directory` is the environment of pip-audit.

    Ends the script if there is a vulnerability, or if nothing could be looked up, for which pip-audit itself exits
    with 0: it counts a package that the service does not know as skipped.
    """
    if not test_env.is_made(directory):
        test_env.run(*test_env.create(directory), PIP_AUDIT)
        test_env.stamp(directory)
    where = "import sysconfig; print(sysconfig.get_path('purelib'))"
    packages = test_env.run(python, "-c", where, capture=True).strip()
    command = [test_env.python_of(directory), "-m", "pip_audit", "--path", packages]
    done = subprocess.run(
        [*map(str, command), "--format=json", "--progress-spinner=off"], capture_output=True, text=True, check=False
    )
    try:
        found = json.loads(done.stdout)["dependencies"]
    except (ValueError, LookupError):
        last = (done.stderr.strip().splitlines() or ["no output"])[-1]
        sys.exit(f"the vulnerabilities could not be looked up, pypi.org has to be reachable: {last}")
    skipped = sorted(each["name"] for each in found if "skip_reason" in each and each["name"] not in OWN)
    looked_up = [each for each in found if "skip_reason" not in each]
    if not looked_up:
        sys.exit(
            f"none of {len(skipped)} packages could be looked up: pypi.org's database of advisories is not reachable"
        )
    vulnerable = [(each, known) for each in looked_up for known in each["vulns"]]
    for each, known in vulnerable:
        fixed = ", ".join(known["fix_versions"]) or "nowhere"
        print(f"{each['name']} {each['version']}: {known['id']} ({', '.join(known['aliases'])}), mended in: {fixed}")
    print(f"{len(looked_up)} packages looked up, {len(vulnerable)} vulnerabilities; not looked up: {skipped or 'none'}")
    if vulnerable:
        sys.exit(1)
