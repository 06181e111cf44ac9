"""Asks for known vulnerabilities of what the images install: pip-audit over deploy/locks, with the data of OSV.

`python -m deploy.audit`, or `make audit`. Ends with 1 and a line for each finding. Where the data cannot be reached it
says so in one line and ends with 0, as nothing was found out; with `--must-reach` with 1.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import urllib.error
import urllib.request
from collections import defaultdict
from pathlib import Path

from deploy.sbom import LOCKS, locked

OSV_URL = "https://api.osv.dev/v1/query"
TIMEOUT_S = 15
# Findings that do not concern the images, by their ids, each with the reason. A test holds that none is without one.
ACCEPTED: dict[str, str] = {}


def main(arguments: list[str] | None = None) -> int:
    """The exit code."""
    parser = argparse.ArgumentParser(prog="deploy.audit")
    parser.add_argument("--locks", type=Path, default=LOCKS, metavar="DIR", help="default: deploy/locks")
    parser.add_argument("--osv-url", default=OSV_URL, metavar="URL", help="default: %(default)s")
    parser.add_argument("--must-reach", action="store_true", help="fail where the data cannot be reached")
    given = parser.parse_args(arguments)
    images = images_of_packages(given.locks)
    if why := why_not_reached(given.osv_url):
        print(f"nothing was audited: {given.osv_url} cannot be reached ({why})", flush=True)
        return int(given.must_reach)
    findings = ask(sorted(images), given.osv_url)
    for package, version, what in findings:
        print(f"{package} {version}, in {' and '.join(images[package, version])}: {what}", flush=True)
    num_locks = len({name for names in images.values() for name in names})
    print(f"{len(findings)} known vulnerabilities in {len(images)} packages of {num_locks} locks")
    return int(bool(findings))


def images_of_packages(locks: Path) -> dict[tuple[str, str], list[str]]:
    """Name and version of each package to the locks that have it. A build's local part is left out: nobody knows it."""
    found: dict[tuple[str, str], list[str]] = defaultdict(list)
    for path in sorted(locks.glob("*.txt")):
        for package in locked(path):
            found[package.name, package.version.partition("+")[0]].append(path.stem)
    return found


def why_not_reached(url: str) -> str:
    """Empty where OSV's API answers at `url`."""
    question = json.dumps({"package": {"name": "pip", "ecosystem": "PyPI"}, "version": "0.0"}).encode()
    request = urllib.request.Request(url, question, {"content-type": "application/json"})
    try:
        with urllib.request.urlopen(request, timeout=TIMEOUT_S) as answer:
            json.load(answer)
    except urllib.error.URLError as error:  # statuses too
        return str(error.reason)
    except (OSError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return ""


def ask(packages: list[tuple[str, str]], url: str) -> list[tuple[str, str, str]]:
    """Package, version and what is wrong with it, for each finding. Raises CalledProcessError where pip-audit fails."""
    with tempfile.TemporaryDirectory() as folder:
        wanted, told = Path(folder) / "requirements.txt", Path(folder) / "told.json"
        wanted.write_text("".join(f"{name}=={version}\n" for name, version in packages), encoding="utf-8")
        command = [sys.executable, "-m", "pip_audit", "--requirement", str(wanted), "--no-deps", "--disable-pip"]
        command += ["--vulnerability-service", "osv", "--osv-url", url, "--progress-spinner", "off"]
        command += ["--format", "json", "--output", str(told), "--cache-dir", folder, "--timeout", str(TIMEOUT_S)]
        command += [word for each in ACCEPTED for word in ("--ignore-vuln", each)]
        ended = subprocess.run(command, capture_output=True, text=True)
        if not told.exists():  # it ends with 1 for findings, and for what it could not do
            print(ended.stderr, file=sys.stderr)
            raise subprocess.CalledProcessError(ended.returncode, command)
        found = json.loads(told.read_text(encoding="utf-8"))["dependencies"]
    skipped = [each for each in found if "skip_reason" in each]
    assert not skipped, skipped
    return [(each["name"], each["version"], _shown(one)) for each in found for one in each["vulns"]]


def _shown(finding: dict[str, object]) -> str:
    names = [finding["id"], *_listed(finding, "aliases")]
    fixed = ", ".join(_listed(finding, "fix_versions"))
    return f"{' = '.join(map(str, names))}, " + (f"fixed in {fixed}" if fixed else "not fixed yet")


def _listed(finding: dict[str, object], name: str) -> list[str]:
    value = finding.get(name)
    return [str(each) for each in value] if isinstance(value, list) else []


if __name__ == "__main__":
    sys.exit(main())
