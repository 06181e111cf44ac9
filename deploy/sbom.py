"""Writes deploy/sboms/*.cdx.json: what each image adds to its base image, in CycloneDX, from the locks in deploy/locks.

`python -m deploy.sbom`, or `make sbom`, after the locks have changed. Written again it is the same to the byte: it has
no time, and its serial number follows from its content. What the base image has is not in it.
"""

from __future__ import annotations

import json
import re
import tomllib
import uuid
from pathlib import Path
from typing import NamedTuple

from cyclonedx.model import ExternalReference, ExternalReferenceType, HashAlgorithm, HashType, XsUri
from cyclonedx.model.bom import Bom
from cyclonedx.model.component import Component, ComponentType
from cyclonedx.model.license import LicenseExpression
from cyclonedx.output.json import JsonV1Dot6
from packageurl import PackageURL

ROOT = Path(__file__).parents[1]
LOCKS, SBOMS = ROOT / "deploy" / "locks", ROOT / "deploy" / "sboms"
SERIALS = uuid.UUID("6f1c2a5e-6a0f-5d0c-9a55-0c7a0b1d7e11")  # whose children the serial numbers are


class Locked(NamedTuple):
    """One package of a lock, with the SHA-256 of each file that may be installed of it."""

    name: str
    version: str
    hashes: tuple[str, ...]


def locked(path: Path) -> list[Locked]:
    """What a file of deploy/locks has. Raises ValueError for a line that is not `NAME==VERSION` with hashes."""
    text = re.sub(r"^#.*\n", "", path.read_text(encoding="utf-8"), flags=re.MULTILINE).replace("\\\n", "")
    found = []
    for entry in filter(None, text.splitlines()):
        match = re.fullmatch(r"([a-z0-9.-]+)==(\S+)((?: +--hash=sha256:[0-9a-f]{64})+)", entry)
        if match is None:
            raise ValueError(f"{path}: {entry}")
        found.append(Locked(match[1], match[2], tuple(sorted(re.findall(r"[0-9a-f]{64}", match[3])))))
    return found


def sbom(name: str) -> str:
    """Of the image that is installed by `deploy/locks/NAME.txt`, as JSON."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    image = Component(
        type=ComponentType.CONTAINER,
        name=f"octavo-{name}",
        bom_ref=f"octavo-{name}",
        version=project["version"],
        licenses=[LicenseExpression(project["license"])],
    )
    bom = Bom(components=[_component(each) for each in locked(LOCKS / f"{name}.txt")])
    bom.metadata.component = image
    bom.register_dependency(image, bom.components)
    written = json.loads(JsonV1Dot6(bom).output_as_string())
    del written["metadata"]["timestamp"], written["serialNumber"]
    serial = uuid.uuid5(SERIALS, json.dumps(written, sort_keys=True))
    return json.dumps(written | {"serialNumber": f"urn:uuid:{serial}"}, indent=1, sort_keys=True) + "\n"


def _component(package: Locked) -> Component:
    purl = PackageURL("pypi", None, package.name, package.version)
    files = ExternalReference(  # any one of which may have been installed
        type=ExternalReferenceType.DISTRIBUTION,
        url=XsUri(str(purl)),
        hashes=[HashType(alg=HashAlgorithm.SHA_256, content=each) for each in package.hashes],
    )
    return Component(
        type=ComponentType.LIBRARY,
        name=package.name,
        version=package.version,
        purl=purl,
        bom_ref=str(purl),
        external_references=[files],
    )


def main() -> None:
    """Writes all of them."""
    SBOMS.mkdir(exist_ok=True)
    for path in sorted(LOCKS.glob("*.txt")):
        written = SBOMS / f"{path.stem}.cdx.json"
        written.write_text(sbom(path.stem), encoding="utf-8")
        print(f"{written.relative_to(ROOT)}: {len(locked(path))} packages")


if __name__ == "__main__":
    main()
