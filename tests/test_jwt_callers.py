"""Tokens of an issuer: whose they are, which are refused and why, and keys that come and go."""

from __future__ import annotations

import base64
import http.server
import json
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jwt
import pytest
import yaml
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from octavo.shared.access.callers import Callers, UnknownCaller
from octavo.shared.access.jwks import JwksError, KeySource, read_set
from octavo.shared.access.jwt_callers import LEEWAY_S, MAX_CHARS, MAX_REMEMBERED, JwtCallers, TokenRefused, TokenRules
from octavo.shared.access.keys import Keys, hash_of
from octavo.shared.watched_files import LOOK_AGAIN_S
from tests.waiting import wait_until

NOW_S = 1_800_000_000.0
RULES = TokenRules("https://issuer", "octavo")
RSA = rsa.generate_private_key(65537, 2048)
SMALL_RSA = rsa.generate_private_key(65537, 1024)
EC = ec.generate_private_key(ec.SECP256R1())
OTHER_EC = ec.generate_private_key(ec.SECP256R1())
ED = ed25519.Ed25519PrivateKey.generate()
_MAKERS = {
    "RSA": jwt.algorithms.RSAAlgorithm(jwt.algorithms.RSAAlgorithm.SHA256),
    "EC": jwt.algorithms.ECAlgorithm(jwt.algorithms.ECAlgorithm.SHA256),
    "ED": jwt.algorithms.OKPAlgorithm(),
}


def jwk(kind: str, private: Any, kid: str, **fields: Any) -> dict[str, Any]:
    return {**_MAKERS[kind].to_jwk(private.public_key(), as_dict=True), "kid": kid, **fields}


SET = {"keys": [jwk("RSA", RSA, "r", alg="RS256"), jwk("EC", EC, "e"), jwk("ED", ED, "d", use="sig")]}


def token(key: Any = EC, alg: str = "ES256", kid: str | None = "e", **claims: Any) -> str:
    said = {"iss": "https://issuer", "aud": "octavo", "sub": "shop", "exp": int(NOW_S) + 60, **claims}
    headers = {} if kid is None else {"kid": kid}
    return jwt.encode({name: value for name, value in said.items() if value is not None}, key, alg, headers=headers)


class Clock:
    now_s = NOW_S

    def __call__(self) -> float:
        return self.now_s


def write(path: Path, keys: Any = SET) -> Path:
    path.write_text(json.dumps(keys))
    return path


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def callers(tmp_path: Path, clock: Clock) -> JwtCallers:
    return JwtCallers(KeySource(write(tmp_path / "jwks.json"), "", clock), RULES, clock)


def test_a_token_stands_for_its_tenant_and_roles(callers: JwtCallers) -> None:
    for key, alg, kid in ((RSA, "RS256", "r"), (EC, "ES256", "e"), (ED, "EdDSA", "d")):
        caller = callers.find(token(key, alg, kid))
        assert (caller.name, caller.tenant, caller.roles, caller.prefixes) == (
            "jwt:shop",
            "shop",
            {"inference"},
            "shop",
        )
    assert callers.find(token(roles=["control", "admin"])).roles == {"control"}
    assert callers.find(token(roles="inference metrics x")).roles == {"inference", "metrics"}
    assert callers.find(token(roles=[])).roles == callers.find(token(roles={"inference": 1})).roles == set()
    assert callers.find(token(aud=["other", "octavo"])).tenant == "shop"


def test_claims_have_the_names_that_the_issuer_gives_them(tmp_path: Path, clock: Clock) -> None:
    rules = TokenRules("https://issuer", "octavo", "https://corp.example/team", "realm_access.roles")
    callers = JwtCallers(KeySource(write(tmp_path / "k"), "", clock), rules, clock)
    caller = callers.find(token(**{"https://corp.example/team": "a"}, realm_access={"roles": ["metrics"]}))
    assert (caller.name, caller.tenant, caller.roles) == ("jwt:shop", "a", {"metrics"})
    with pytest.raises(TokenRefused, match=r"claim 'https://corp\.example/team' of its token names no tenant"):
        callers.find(token())


def unsigned() -> str:
    body = token().split(".")[1]
    none = base64.urlsafe_b64encode(b'{"alg":"none","typ":"JWT"}').rstrip(b"=").decode()
    return f"{none}.{body}."


def by_public_key_as_secret() -> str:
    """The old trick, as far as the library lets one write it: HMAC with what everybody knows."""
    return token("x" * 64, "HS256")


@pytest.mark.parametrize(
    ("made", "why"),
    [
        (lambda: token(exp=int(NOW_S - LEEWAY_S)), "its token has expired"),
        (lambda: token(nbf=int(NOW_S + LEEWAY_S) + 1), "its token is not valid yet"),
        (lambda: token(iss="https://other"), "of another issuer"),
        (lambda: token(aud="other"), "for another audience"),
        (lambda: token(aud=None), "has no claim 'aud'"),
        (lambda: token(exp=None), "has no claim 'exp'"),
        (lambda: token(iss=None), "has no claim 'iss'"),
        (lambda: token(exp="soon"), "no readable times"),
        (lambda: token(sub=None), "claim 'sub' of its token names no tenant"),
        (lambda: token(sub="a b"), "claim 'sub' of its token names no tenant"),
        (unsigned, "not signed by an accepted algorithm"),
        (by_public_key_as_secret, "not signed by an accepted algorithm"),
        (lambda: token(OTHER_EC), "not signed by its issuer"),
        (lambda: token(RSA, "RS512", "r"), "not signed by its issuer"),
        (lambda: token(RSA, "RS256", "e"), "not signed by its issuer"),
        (lambda: token(kid="unknown"), "the key of its token is not known"),
        (lambda: token(kid=None), "the key of its token is not known"),
        (lambda: token(sub="a" * MAX_CHARS), f"more than {MAX_CHARS} characters"),
        (lambda: token()[:-3] + "AAA", "not signed by its issuer"),
        (lambda: "ey.ey.ey", "cannot be read"),
        (lambda: "eyJhbGciOiJFUzI1NiJ9.e30.\u00e9", "its token"),
    ],
)
def test_tokens_that_are_refused(made: Any, why: str, callers: JwtCallers) -> None:
    made_token = made()
    with pytest.raises(TokenRefused, match=why) as raised:
        callers.find(made_token)
    assert made_token.split(".")[1] not in str(raised.value)


def test_a_token_is_checked_once_until_it_expires(
    callers: JwtCallers, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    one = token()
    callers.find(one)
    with monkeypatch.context() as away:
        away.setattr(jwt, "decode", lambda *_, **__: pytest.fail("it was checked again"))
        assert callers.find(one).tenant == "shop"
    clock.now_s += 60 + LEEWAY_S
    with pytest.raises(TokenRefused, match="has expired"):
        callers.find(one)
    clock.now_s -= 60 + LEEWAY_S
    monkeypatch.setattr(JwtCallers, "_check", lambda self, text: (text, NOW_S + 60))
    for number in range(MAX_REMEMBERED + 1):
        callers.find(f"ey{number}..")
    assert len(callers._remembered) <= MAX_REMEMBERED


def test_a_key_that_goes_takes_its_tokens_along_even_remembered_ones(tmp_path: Path, clock: Clock) -> None:
    path = write(tmp_path / "k")
    callers = JwtCallers(KeySource(path, "", clock), RULES, clock)
    assert callers.find(token())
    write(path, {"keys": [jwk("EC", OTHER_EC, "new")]})
    clock.now_s += LOOK_AGAIN_S
    with pytest.raises(TokenRefused, match="key of its token is not known"):
        callers.find(token())
    assert callers.find(token(OTHER_EC, kid="new")) and callers.find(token(OTHER_EC, kid=None)), "the only key"
    path.write_text("no")
    clock.now_s += LOOK_AGAIN_S
    assert callers.find(token(OTHER_EC, kid="new", sub="x")).tenant == "x" and callers.source.num_failures == 1


@pytest.mark.parametrize(
    ("text", "complaint"),
    [
        ("[", "it is no JSON"),
        ("[" * 100_000, "it is no JSON"),
        ("[]", "a JSON Web Key Set is wanted"),
        ('{"keys": [1]}', "a JSON Web Key Set is wanted"),
        ('{"keys": [{}]}', "it has no public key for signatures"),
        ('{"keys": [{"kty": "oct", "k": "AAAA", "kid": "a"}]}', "it has no public key"),
        ('{"keys": [{"kty": "EC", "crv": "P-256", "x": "AA", "y": "AA", "kid": "a"}]}', "it has no public key"),
        (json.dumps({"keys": [jwk("EC", EC, "e", use="enc")]}), "it has no public key"),
        (json.dumps({"keys": [jwk("EC", EC, "e", alg="HS256")]}), "it has no public key"),
        (json.dumps({"keys": [jwk("RSA", SMALL_RSA, "s")]}), "it has no public key"),
    ],
)
def test_sets_that_are_none(text: str, complaint: str) -> None:
    with pytest.raises(JwksError, match=complaint) as raised:
        read_set(text, "here")
    assert str(raised.value).startswith("here: ") and "\n" not in str(raised.value)


# ---- by URL ---------------------------------------------------------------------------------------------------------


class Issuer:
    """A server with a set, or an answer that is none."""

    def __init__(self) -> None:
        self.keys: Any = SET
        self.status, self.num_asked, self.location = 200, 0, ""


@contextmanager
def issuing(port: int = 0) -> Iterator[tuple[Issuer, str]]:
    issuer = Issuer()

    class Handler(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.num_asked += 1
            self.send_response(issuer.status)
            if issuer.location:
                self.send_header("location", issuer.location)
            self.end_headers()
            self.wfile.write(json.dumps(issuer.keys).encode())

        def log_message(self, *_: Any) -> None: ...

    server = http.server.ThreadingHTTPServer(("127.0.0.1", port), Handler)
    thread = threading.Thread(target=server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield issuer, f"http://127.0.0.1:{server.server_port}/jwks"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@contextmanager
def source_of(url: str, **options: Any) -> Iterator[KeySource]:
    source = KeySource(None, url, **options)
    try:
        yield source
    finally:
        source.stop()


def test_a_url_is_asked_again_for_a_key_that_is_not_known_and_no_more_often_than_it_may() -> None:
    with issuing() as (issuer, url), source_of(url, pause_s=0.2) as source:
        assert source.find("e") and issuer.num_asked == 1, "before anybody is served"
        issuer.keys = {"keys": [jwk("EC", OTHER_EC, "new")]}
        before = source.version
        began_s = time.monotonic()
        while source.find("new") is None:
            assert time.monotonic() - began_s < 5
            time.sleep(0.005)
        assert issuer.num_asked == 2 and source.version is not before and source.find("e") is None
        for _ in range(100):
            source.find("made up")
        time.sleep(0.3)
        assert issuer.num_asked <= 4


@pytest.mark.parametrize("fault", ["status", "redirect", "nothing"])
def test_what_was_read_last_stays_while_the_url_gives_nothing_better(fault: str) -> None:
    with issuing() as (issuer, url), source_of(url, refresh_s=0.02, pause_s=0.01) as source:
        if fault == "status":
            issuer.status = 500
        elif fault == "redirect":
            issuer.status, issuer.location = 302, url
        else:
            issuer.keys = {"keys": [{"kty": "oct", "k": "AAAA", "kid": "e"}]}
        wait_until(lambda: source.num_failures > 1, seconds=5)
        assert source.find("e")
        issuer.status, issuer.location, issuer.keys = 200, "", {"keys": [jwk("EC", OTHER_EC, "new")]}
        wait_until(lambda: source.find("new"), seconds=5)


def test_an_issuer_can_take_all_of_its_keys_back() -> None:
    with issuing() as (issuer, url), source_of(url, refresh_s=0.02, pause_s=0.01) as source:
        wait_until(lambda: source.find("e"), seconds=5)
        issuer.keys = {"keys": []}
        wait_until(lambda: source.find("e") is None, seconds=5)
        assert source.num_failures == 0


@pytest.mark.parametrize("header", [{"alg": []}, {"alg": {}}, {"alg": None}, {"alg": "RS256", "kid": []}])
def test_headers_of_any_type_are_refused(header: dict[str, object], callers: JwtCallers) -> None:
    parts = [base64.urlsafe_b64encode(json.dumps(part).encode()).decode().rstrip("=") for part in (header, {})]
    with pytest.raises(TokenRefused):
        callers.find(f"{parts[0]}.{parts[1]}.AAAA")


@pytest.mark.parametrize("time_s", [float("nan"), float("inf"), 10**400, "soon"])
def test_times_that_are_none_are_refused(time_s: object, callers: JwtCallers) -> None:
    with pytest.raises(TokenRefused):
        callers.find(token(exp=time_s))


def test_a_server_whose_issuer_cannot_be_reached_starts_and_knows_no_token_until_it_can() -> None:
    with issuing() as (_, url):
        port = int(url.split(":")[2].split("/")[0])
    with source_of(url, pause_s=0.02) as source:
        assert source.find("e") is None and source.num_failures >= 1
        with issuing(port):
            wait_until(lambda: source.find("e"), seconds=5)


# ---- beside keys ----------------------------------------------------------------------------------------------------


def test_keys_and_tokens_are_taken_side_by_side_and_reasons_are_told(tmp_path: Path, callers: JwtCallers) -> None:
    path = tmp_path / "keys.yaml"
    entries = [
        {"name": "ops", "sha256": hash_of("key"), "tenant": "us", "prefixes": "group"},
        {"name": "web", "sha256": hash_of("web")},
    ]
    path.write_text(yaml.safe_dump({"keys": entries}))
    both = Callers(Keys(path), callers)
    assert both.of_header("Bearer key").tenant == "us" and both.of_header(f"Bearer {token()}").tenant == "shop"
    assert both.of_header("Bearer key").shares_prefixes, "a token may be of a tenant of that name"
    assert not both.of_header("Bearer web").shares_prefixes
    assert both.of_header(f"Bearer {token(sub='group')}").shares_prefixes
    assert not both.of_header(f"Bearer {token(sub='web')}").shares_prefixes
    for header, why in (
        (f"Bearer {token(aud='other')}", "is wanted; its token is for another audience"),
        ("Bearer other", "is wanted$"),
        ("", "is wanted$"),
    ):
        with pytest.raises(UnknownCaller, match=why):
            both.of_header(header)
    with pytest.raises(UnknownCaller, match=r"is wanted$"):
        Callers(Keys(path)).of_header(f"Bearer {token()}")
