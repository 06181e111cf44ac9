"""What `octavo serve` says once it is ready: where it is, and how to call it with the locks that it has."""

from __future__ import annotations

import dataclasses
import json
from typing import TYPE_CHECKING

from octavo.shared.access.tls import TlsError, shown_by
from octavo.shared.options import OptionError
from octavo.shared.ports import is_loopback

if TYPE_CHECKING:
    from scheduler_svc.config import SchedulerConfig

REQUEST = '{"prompt": "The sea is", "sampling_params": {"max_tokens": 32}}'
API_KEY = "OCTAVO_API_KEY"  # the variable
AUTHORITY, KEY = "CA.pem", "KEY"  # where only the user knows them
CLIENT_CERT, CLIENT_KEY = "CLIENT.pem", "CLIENT.key"


@dataclasses.dataclass(frozen=True)
class Announcement:
    """`source`: the model as the user has named it; `model`: as requests do. `address` and `http`: HOST:PORT by a name
    that the certificate has. `ca_file`: whom to trust; None: there is no TLS."""

    source: str
    model: str
    num_workers: int
    address: str
    http: str | None = None
    ca_file: str | None = None
    wants_certificate: bool = False
    wants_key: bool = False

    @classmethod
    def of(
        cls, scheduler: SchedulerConfig, source: str, num_workers: int, address: str, http: str | None
    ) -> Announcement:
        """Raises OptionError for certificates that cannot be used. `model` is `source` until it is known."""
        plain = cls(source, source, num_workers, address, http, wants_key=scheduler.knows_callers)
        cert, key = scheduler.tls_cert_file, scheduler.tls_key_file
        if cert is None or key is None:
            return plain
        try:
            shown = shown_by(cert, key)
        except TlsError as error:
            raise OptionError(f"TLS: {error}") from None
        return dataclasses.replace(
            plain,
            address=_named(address, shown.names),
            http=http and _named(http, shown.names),
            ca_file=str(cert) if shown.is_own_authority else AUTHORITY,
            wants_certificate=scheduler.tls_client_ca_file is not None,
        )

    @property
    def url(self) -> str | None:
        """Of OpenAI's API."""
        return self.http and f"{'https' if self.ca_file else 'http'}://{self.http}/v1"

    def as_json(self, seconds: float) -> str:
        """One object in a line. `seconds` that the start took, here and below."""
        where = {"address": self.address, "http": self.url, "model": self.model}
        locks = {"tls": self.ca_file is not None, "keys": self.wants_key}
        return json.dumps({**where, "workers": self.num_workers, "seconds": round(seconds, 2), **locks})

    def as_text(self, seconds: float) -> str:
        """Lines for people, with commands to copy."""
        workers = "1 worker" if self.num_workers == 1 else f"{self.num_workers} workers"
        model = self.model if self.model == self.source else f"{self.model} ({self.source})"
        octavo, grpcurl = self._flags()
        key = f"{API_KEY}={KEY} " if self.wants_key else ""  # where `ps` does not show it
        over_http = f"  OpenAI's API: {self.url}\n" if self.url else ""
        return (
            f"Octavo is ready after {seconds:.1f} s: {model} at {self.address}, {workers}. Ctrl-C ends it.\n"
            f"{self._legend()}"
            f'  {key}octavo chat "Why is the sky blue?" --address {self.address}{octavo}\n'
            f"{over_http}"
            f"  grpcurl {grpcurl} -d '{REQUEST}' {self.address} octavo.v1.Inference/Generate"
        )

    def _flags(self) -> tuple[str, str]:
        """Of `octavo` commands, and of grpcurl."""
        octavo, grpcurl = [""], ["-plaintext"]
        if self.ca_file is not None:
            octavo, grpcurl = ["", f"--tls-ca-file {self.ca_file}"], [f"-cacert {self.ca_file}"]
        if self.wants_certificate:
            octavo.append(f"--tls-client-cert-file {CLIENT_CERT} --tls-client-key-file {CLIENT_KEY}")
            grpcurl.append(f"-cert {CLIENT_CERT} -key {CLIENT_KEY}")
        if self.wants_key:
            grpcurl.append(f"-H 'authorization: Bearer {KEY}'")
        return " ".join(octavo), " ".join(grpcurl)

    def _legend(self) -> str:
        """What stands for something else in the commands."""
        parts = []
        if self.ca_file == AUTHORITY:
            parts.append(f"{AUTHORITY} has the authority of its certificate")
        if self.wants_certificate:
            parts.append(f"{CLIENT_CERT} and {CLIENT_KEY} are a client's")
        if self.wants_key:
            parts.append(f"{KEY} is of its keys file")
        return f"  ({'; '.join(parts)}.)\n" if parts else ""


def _named(address: str, names: tuple[str, ...]) -> str:
    """The address as the certificate has it, where it can be told: else clients would refuse it."""
    host, _, port = address.rpartition(":")
    whole = [name for name in names if "*" not in name]
    if host.strip("[]") in whole or not whole:
        return address
    name = next(filter(is_loopback, whole), whole[0]) if is_loopback(host.strip("[]")) else whole[0]
    return f"[{name}]:{port}" if ":" in name else f"{name}:{port}"
