"""Keys files: what is read of them, when they are read again, and the command that writes them."""

from __future__ import annotations

import json
import os
import timeit
from pathlib import Path
from threading import Thread
from typing import Any

import pytest
import yaml

from octavo.cli import main
from octavo.client import Client
from octavo.shared.access.callers import Callers, UnknownCaller
from octavo.shared.access.keys import ROLES, Keys, KeysFileError, hash_of, new_key, read_file
from octavo.shared.watched_files import LOOK_AGAIN_S


def write(path: Path, *entries: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump({"keys": list(entries)}))
    return path


def entry(name: str, **fields: Any) -> dict[str, Any]:
    return {"name": name, "sha256": hash_of(f"key of {name}"), **fields}


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def test_a_key_stands_for_its_tenant_and_roles(tmp_path: Path) -> None:
    keys = Keys(write(tmp_path / "k", entry("web"), entry("ops", tenant="us", roles=["control"], prefixes="all")))
    web = keys.find("key of web")
    ops = Callers(keys).of_metadata([("a", "b"), ("authorization", "bEaReR  key of ops ")])
    assert web and (web.tenant, web.roles, web.prefixes) == ("web", {"inference"}, "web")
    assert ops and (ops.tenant, ops.roles, ops.prefixes) == ("us", {"control"}, "all")


@pytest.mark.parametrize(
    "metadata",
    [
        None,
        [],
        [("authorization", "key of web")],
        [("authorization", "Bearer key of we")],
        [("authorization", "Bearer ")],
        [("authorization", f"Bearer {hash_of('key of web')}")],
        [("authorization", "Bearer key of web"), ("authorization", "Bearer key of web")],
        [("authorization", b"Bearer \xff")],
    ],
)
def test_what_is_no_known_key(metadata: Any, tmp_path: Path) -> None:
    with pytest.raises(UnknownCaller, match="no known key: metadata `authorization: Bearer KEY` is wanted"):
        Callers(Keys(write(tmp_path / "k", entry("web")))).of_metadata(metadata)


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("keys: [", "is no YAML"),
        ("keys: [{name: 2026-13-45}]", "is no YAML: month must be"),
        ("[" * 100_000, "more than 8 lists within each other"),
        ("- a", "a list of entries under `keys`"),
        ("", "a list of entries under `keys`"),
        ("{}", "a list of entries under `keys`"),
        ("keys:\ntenants: []", "a list of entries under `keys`"),
        ("tenants: []\nother: 1", "a list of entries under `keys`"),
        ("keys: []\nother: 1", "a list of entries under `keys`"),
        ("keys: [1]", "a list of entries under `keys`"),
        ("keys: [{name: a, sha256: secret}]", r"keys\[0\]: sha256 is to be 64 hexadecimal digits"),
        (yaml.safe_dump({"keys": [entry("a"), entry("a") | {"sha256": hash_of("b")}]}), "name 'a' is there twice"),
        (yaml.safe_dump({"keys": [entry("a"), entry("a") | {"name": "b"}]}), r"keys\[1\] has the key of 'a'"),
        (yaml.safe_dump({"keys": [entry("a", roles=["admin"])]}), r"roles is \['admin'\]"),
        (yaml.safe_dump({"keys": [entry("a", roles=[])]}), "roles is"),
        (yaml.safe_dump({"keys": [entry("a b")]}), "name is 'a b'"),
        (yaml.safe_dump({"keys": [entry("a", key="secret")]}), "has 'key'; known: name"),
    ],
)
def test_a_file_that_leaves_anything_open_is_refused(text: str, complaint: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(KeysFileError, match=complaint) as raised:
        read_file(path)
    assert "\n" not in str(raised.value) and "secret" not in str(raised.value)


def test_a_file_is_read_again_when_it_changes_and_the_old_keys_stay_while_it_cannot_be(tmp_path: Path) -> None:
    path, clock = write(tmp_path / "k", entry("a")), Clock()
    keys = Keys(path, clock)
    write(path, entry("b"), entry("c"))
    assert keys.find("key of a") and not keys.find("key of b")  # it was looked at a moment ago
    clock.now_s += LOOK_AGAIN_S
    assert keys.find("key of b") and not keys.find("key of a")
    for broken in ("keys: [", None):
        path.unlink()
        if broken is not None:
            path.write_text(broken)
        clock.now_s += LOOK_AGAIN_S
        assert keys.find("key of b")
    assert keys.num_failures == 2
    write(path, entry("a"))
    clock.now_s += LOOK_AGAIN_S
    assert keys.find("key of a") and not keys.find("key of b") and keys.num_failures == 2


def test_a_file_that_could_not_be_read_for_a_moment_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, clock = write(tmp_path / "k", entry("a")), Clock()
    keys = Keys(path, clock)
    write(path, entry("b"))
    with monkeypatch.context() as away:
        away.setattr(Path, "read_text", fails)
        for _ in range(3):
            clock.now_s += LOOK_AGAIN_S
            assert keys.find("key of a") and keys.num_failures == 1
    clock.now_s += LOOK_AGAIN_S
    assert keys.find("key of b") and not keys.find("key of a")
    before = path.stat()  # as after rsync, which keeps the time of a file; here its size is the same as well
    path.write_text(path.read_text().replace(hash_of("key of b"), hash_of("key of c")))
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))
    clock.now_s += LOOK_AGAIN_S
    assert keys.find("key of c") and not keys.find("key of b")


def fails(*arguments: object, **options: object) -> str:
    raise PermissionError(13, "Permission denied")


def test_the_command_makes_lists_and_removes_keys(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "keys.yaml"

    def run(*arguments: str) -> tuple[int, str, str]:
        code = main(["keys", arguments[0], str(path), *arguments[1:]])
        said = capsys.readouterr()
        return code, said.out.strip(), said.err.strip()

    code, key, _ = run("add", "web", "--tenant", "shop")
    assert code == 0 and len(key) > 40 and key not in path.read_text()
    assert os.stat(path).st_mode & 0o777 == 0o600
    ops = json.loads(run("add", "ops", "--role", "control", "--role", "metrics", "--json")[1])
    keys = Keys(path)
    web, other = keys.find(key), keys.find(ops["key"])
    assert web and other and (web.tenant, other.roles) == ("shop", {"control", "metrics"})
    assert json.loads(run("list", "--json")[1]) == [
        {"name": "web", "tenant": "shop", "roles": ["inference"], "prefixes": "shop", "limits": {}},
        {"name": "ops", "tenant": "ops", "roles": ["control", "metrics"], "prefixes": "ops", "limits": {}},
    ]
    before = path.read_text()
    for wrong, complaint in ((("add", "web"), "keys[0] has the name 'web'"), (("remove", "nobody"), "has no key")):
        code, out, err = run(*wrong)
        assert (code, out) == (2, "") and complaint in err
    assert path.read_text() == before
    assert run("remove", "web")[0] == 0 and not Keys(path).find(key)
    path.write_text("keys: 1")
    assert run("add", "web")[0] == 2 and path.read_text() == "keys: 1"  # left for whoever wrote it


def test_a_key_is_found_among_many_as_soon_as_among_few(tmp_path: Path) -> None:
    """They are looked up on the event loop, several times a request."""

    def find_s(count: int) -> float:
        keys = Keys(write(tmp_path / "k", *(entry(f"a{number}") for number in range(count))))
        return min(timeit.repeat(lambda: keys.find("key of a0"), number=20, repeat=9))

    assert find_s(2000) < 20 * find_s(1)  # 80 times as long where each is compared


def test_a_file_stays_whose_it_was_and_a_link_stays_one(tmp_path: Path) -> None:
    path, link = tmp_path / "folder" / "keys.yaml", tmp_path / "keys.yaml"
    path.parent.mkdir()
    link.symlink_to(path)
    write(path, entry("a"))
    path.chmod(0o640)
    owner = (os.geteuid() or 10001, os.getegid())  # as for a container of another user
    os.chown(path, *owner)
    assert main(["keys", "add", str(link), "b"]) == 0
    found = path.stat()
    assert (found.st_uid, found.st_gid) == owner and found.st_mode & 0o777 == 0o640
    assert link.is_symlink() and len(read_file(link).callers) == 2
    assert [each.name for each in path.parent.iterdir()] == ["keys.yaml"]


def test_changes_at_the_same_time_all_count(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    adding = [Thread(target=main, args=(["keys", "add", str(path), f"key-{number}"],)) for number in range(20)]
    for thread in adding:
        thread.start()
    for thread in adding:
        thread.join()
    assert len(read_file(path).callers) == 20


def test_a_folder_that_is_not_there_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["keys", "add", str(tmp_path / "no" / "keys.yaml"), "a"]) == 2
    said = capsys.readouterr().err
    assert "No such file or directory" in said and "Traceback" not in said


def test_keys_are_long_and_never_the_same() -> None:
    keys = {new_key() for _ in range(100)}
    assert len(keys) == 100 and all(key.startswith("octavo-") and len(key) >= 50 for key in keys)
    assert ROLES == ("inference", "control", "metrics")


@pytest.mark.parametrize("address", ["10.0.0.1:1", "scheduler:50051", "dns:///scheduler:1", "127.0.0.1:1,10.0.0.1:1"])
def test_a_client_sends_no_key_in_plain_text_to_another_machine(address: str) -> None:
    with pytest.raises(ValueError, match="is another machine, which it would reach as plain text"):
        Client(address, api_key="secret")
    Client(address, api_key="secret", plaintext_key=True).close()
    Client(address).close()


@pytest.mark.parametrize("url", ["http://10.0.0.1:1/v1", "http://127.0.0.1@host/v1"])
def test_nor_over_http(url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setenv("OCTAVO_API_KEY", "secret")
    assert main(["bench", "serve", "--url", url, "--requests=1", "--timeout-s=0.1"]) == 1
    said = capsys.readouterr().err
    assert f"{url} is another machine" in said and "secret" not in said


@pytest.mark.parametrize("end", ["\r", "\n", "\xe9", "\x7f"])
def test_a_key_that_no_header_can_have_is_refused_and_shown_to_nobody(
    end: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(ValueError, match="api_key: it holds") as refused:
        Client("127.0.0.1:1", api_key="secret" + end)
    assert "secret" not in str(refused.value)
    monkeypatch.setenv("OCTAVO_API_KEY", "secret" + end)
    over_http = ["bench", "serve", "--url", "https://127.0.0.1:1/v1", "--requests=1", "--timeout-s=0.1"]
    for command in (["generate", "a", "--address=127.0.0.1:1"], over_http):
        assert main(command)
        said = capsys.readouterr()
        assert "api_key: it holds" in said.err and "secret" not in said.err + said.out


@pytest.mark.parametrize("address", ["127.0.0.1:1", "localhost:1", "[::1]:1", "unix:/tmp/socket", "dns:///localhost:1"])
def test_this_machine_may_have_it(address: str) -> None:
    with Client(address, api_key="secret") as client:
        assert client._metadata == (("authorization", "Bearer secret"),)


def test_the_command_says_what_tenants_may_have_and_keeps_the_rest(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = write(tmp_path / "k", entry("web", tenant="shop"), entry("ops"))

    def run(*arguments: str) -> tuple[int, str]:
        code = main(["keys", arguments[0], str(path), *arguments[1:]])
        said = capsys.readouterr()
        return code, (said.out or said.err).strip()

    assert run("limit", "shop", "--tokens-per-minute", "1000", "--weight", "2.5") == (
        0,
        "shop: weight 2.5  tokens_per_minute 1000",
    )
    assert run("limit", "--default", "--requests-per-minute", "60", "--json") == (
        0,
        '{"tenant": null, "requests_per_minute": 60}',
    )
    assert run("limit", "shop", "--bytes", "5", "--weight", "none")[1] == "shop: tokens_per_minute 1000  bytes 5"
    assert run("add", "more")[0] == 0 and run("remove", "ops")[0] == 0
    sections = yaml.safe_load(path.read_text())
    assert sections["tenants"] == [{"name": "shop", "tokens_per_minute": 1000, "bytes": 5}]
    assert sections["default"] == {"requests_per_minute": 60}
    assert run("list")[1].splitlines() == [
        "web  tenant shop  inference",
        "more  tenant more  inference",
        "tenant shop  tokens_per_minute 1000  bytes 5",
        "other tenants  requests_per_minute 60",
    ]
    assert [key["limits"] for key in json.loads(run("list", "--json")[1])] == [
        {"tokens_per_minute": 1000, "bytes": 5},
        {"requests_per_minute": 60},
    ]
    before = path.read_text()
    for wrong, complaint in (
        (("shop",), "nothing to change: --weight"),
        (("shop", "--bytes", "many"), "--bytes is 'many'; a number or none is accepted"),
        (("shop", "--bytes", "0"), "bytes is 0; a whole number from 1 on"),
        (("shop", "--waiting-requests", "1"), "waiting_requests bounds what waits"),
    ):
        code, said = run("limit", *wrong)
        assert code == 2 and complaint in said and path.read_text() == before
    assert run("limit", "shop", "--tokens-per-minute", "none", "--bytes", "none") == (0, "shop: no limits")
    assert run("limit", "--default", "--requests-per-minute", "none") == (0, "default: no limits")
    assert set(yaml.safe_load(path.read_text())) == {"keys"}
    path.unlink()
    assert run("limit", "shop", "--bytes", "5")[0] == 0, "for those who bring tokens"
    assert yaml.safe_load(path.read_text()) == {"keys": [], "tenants": [{"name": "shop", "bytes": 5}]}


@pytest.mark.parametrize("section", ["tenants: [{name: shop, bytes: 5}]", "default: {bytes: 5}"])
def test_a_file_may_have_limits_alone(section: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "limits.yaml"
    path.write_text(section)
    assert not read_file(path).callers and read_file(path).tenants.of("shop").bytes == 5
    assert main(["keys", "list", str(path)]) == 0 and "bytes 5" in capsys.readouterr().out
    assert main(["keys", "remove", str(path), "web"]) == 2 and "has no key 'web'" in capsys.readouterr().err
    assert main(["keys", "limit", str(path), "shop", "--bytes", "6"]) == 0
    assert main(["keys", "add", str(path), "web"]) == 0
    after = read_file(path)
    assert [caller.name for caller in after.callers.values()] == ["web"] and after.tenants.of("shop").bytes == 6


def test_who_shares_prefixes_with_other_tenants_is_known(tmp_path: Path) -> None:
    one, two, third = entry("a", prefixes="all"), entry("b", tenant="a", prefixes="all"), entry("c", prefixes="all")
    path, clock = write(tmp_path / "k", one, two), Clock()
    keys = Keys(path, clock)
    assert not (caller := keys.find("key of a")) or not caller.shares_prefixes
    assert keys.others_in("all", "c") and not keys.others_in("all", "a") and not keys.others_in("none", "a")
    write(path, one, two, third)
    clock.now_s += LOOK_AGAIN_S
    found = [keys.find(f"key of {name}") for name in "abc"]
    assert all(caller is not None and caller.shares_prefixes for caller in found)
