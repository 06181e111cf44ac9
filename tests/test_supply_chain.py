"""What images install is named in their SBOMs, and looked up among known vulnerabilities."""

from __future__ import annotations

import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from cyclonedx.schema import SchemaVersion
from cyclonedx.validation.json import JsonStrictValidator

from deploy import audit, sbom
from octavo.shared.ports import free_port
from tests.test_containers import LOCKS, ROOT, TARGETS, locked, said

HASH = "0" * 64
WRONG = {
    "id": "GHSA-xxxx-yyyy-zzzz",
    "aliases": ["CVE-2026-0001"],
    "summary": "reads what it must not",
    "affected": [
        {
            "package": {"name": "leaky", "ecosystem": "PyPI"},
            "ranges": [{"type": "ECOSYSTEM", "events": [{"introduced": "0"}, {"fixed": "1.5"}]}],
        }
    ],
}


# ---- SBOMs ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", LOCKS)
def test_sboms_are_as_they_would_be_written_now(name: str) -> None:
    written = (sbom.SBOMS / f"{name}.cdx.json").read_text(encoding="utf-8")
    assert written == sbom.sbom(name), "renew them: make sbom"


@pytest.mark.parametrize("name", LOCKS)
def test_sboms_keep_to_the_schema_of_cyclonedx_and_name_what_is_locked(name: str) -> None:
    text = (sbom.SBOMS / f"{name}.cdx.json").read_text(encoding="utf-8")
    assert JsonStrictValidator(SchemaVersion.V1_6).validate_str(text) is None
    told = json.loads(text)
    assert {each["name"]: each["version"] for each in told["components"]} == locked(name)
    lock = (sbom.LOCKS / f"{name}.txt").read_text(encoding="utf-8")
    hashes = [one["content"] for each in told["components"] for one in each["externalReferences"][0]["hashes"]]
    assert len(hashes) == lock.count("--hash=sha256:") and all(one in lock for one in hashes)
    assert told["metadata"]["component"]["name"] == f"octavo-{name}" and "timestamp" not in told["metadata"]


def test_a_change_of_a_lock_is_another_sbom(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sbom, "LOCKS", tmp_path)
    (tmp_path / "it.txt").write_text(f"a==1 --hash=sha256:{HASH}\n", encoding="utf-8")
    before = json.loads(sbom.sbom("it"))
    (tmp_path / "it.txt").write_text(f"a==2 --hash=sha256:{HASH}\n", encoding="utf-8")
    after = json.loads(sbom.sbom("it"))
    assert before["serialNumber"] != after["serialNumber"] and after["components"][0]["purl"] == "pkg:pypi/a@2"
    (tmp_path / "it.txt").write_text("a>=2\n", encoding="utf-8")
    with pytest.raises(ValueError, match="a>=2"):
        sbom.sbom("it")


@pytest.mark.parametrize("target", TARGETS)
def test_images_have_their_sbom_and_labels_that_say_where(target: str) -> None:
    (copied,) = (rest for rest in said(target, "COPY") if rest.startswith("deploy/sboms"))
    assert copied == "deploy/sboms deploy/sboms"
    name = "$LOCK" if target == "worker" else target
    last = [rest for rest in said(target, "RUN") if "sbom.cdx.json" in rest]
    assert len(last) == 1 and f'deploy/sboms/{name}.cdx.json" /usr/share/doc/octavo/sbom.cdx.json' in last[0]
    labels = " ".join(said("base", "LABEL") + said(target, "LABEL"))
    for label in ("title", "description", "licenses", "revision"):
        assert f"org.opencontainers.image.{label}=" in labels
    assert 'sbom="/usr/share/doc/octavo/sbom.cdx.json"' in labels and f'title="octavo-{target}"' in labels


# ---- known vulnerabilities ------------------------------------------------------------------------------------------


@contextmanager
def osv(**vulnerable: str) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """OSV's API as far as it is asked: its address, and who was asked for; `vulnerable`: package to version."""
    asked: list[tuple[str, str]] = []

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            question = json.loads(self.rfile.read(int(self.headers["content-length"])))
            name, version = question["package"]["name"], question["version"]
            asked.append((name, version))
            body = json.dumps({"vulns": [WRONG]} if vulnerable.get(name) == version else {}).encode()
            self.send_response(200)
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, *arguments: object) -> None:
            return

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=[0.01])
        thread.start()
        yield f"http://127.0.0.1:{server.server_port}/v1/query", asked
        server.shutdown()
        thread.join()


@pytest.fixture
def locks(tmp_path: Path) -> Path:
    (tmp_path / "gateway.txt").write_text(f"fine==2.0 --hash=sha256:{HASH}\n", encoding="utf-8")
    (tmp_path / "worker.txt").write_text(
        f"fine==2.0 \\\n    --hash=sha256:{HASH}\nleaky==1.0+cpu --hash=sha256:{HASH}\n", encoding="utf-8"
    )
    return tmp_path


def test_a_known_vulnerability_fails_and_says_which_image_has_it(
    locks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with osv(leaky="1.0") as (url, asked):
        assert audit.main(["--locks", str(locks), "--osv-url", url]) == 1
    finding, summary = capsys.readouterr().out.splitlines()
    assert finding == "leaky 1.0, in worker: CVE-2026-0001 = GHSA-xxxx-yyyy-zzzz, fixed in 1.5"
    assert summary == "1 known vulnerabilities in 2 packages of 2 locks"
    assert sorted(asked[1:]) == [("fine", "2.0"), ("leaky", "1.0")], "after a question that shows whether it answers"


def test_nothing_known_passes(locks: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with osv(leaky="0.9") as (url, _):
        assert audit.main(["--locks", str(locks), "--osv-url", url]) == 0
    assert capsys.readouterr().out == "0 known vulnerabilities in 2 packages of 2 locks\n"


def test_data_out_of_reach_is_said_in_one_line_and_fails_only_on_demand(
    locks: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    url = f"http://127.0.0.1:{free_port()}/v1/query"
    codes = [audit.main(["--locks", str(locks), "--osv-url", url, *flags]) for flags in ([], ["--must-reach"])]
    assert codes == [0, 1]
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 2 and all(line.startswith(f"nothing was audited: {url} cannot be reached (") for line in lines)


def test_all_locks_are_audited_by_ci_and_nothing_is_accepted_without_a_reason() -> None:
    assert {name for names in audit.images_of_packages(sbom.LOCKS).values() for name in names} == set(LOCKS)
    assert "make audit" in (ROOT / ".ci" / "run").read_text(encoding="utf-8")
    assert all(len(reason) > 20 for reason in audit.ACCEPTED.values())
