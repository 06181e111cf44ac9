"""`octavo health`: asks a server over grpc.health.v1, or a gateway over HTTP, for probes and scripts.

Exit codes: 0 serving, 1 not serving or no such service, 3 unreachable.
"""

from __future__ import annotations

import argparse
import json

from octavo.commands.flags import connection
from octavo.shared.options import OptionError
from octavo.shared.terminal_text import say

SERVING, NOT_SERVING, UNREACHABLE = 0, 1, 3
READINESS = "octavo.v1.Inference"
HTTP, HTTPS = "http://", "https://"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The address, as a position or a flag, and which service is asked for."""
    parser.epilog = "exit codes: 0 serving, 1 not serving or no such service, 3 unreachable"
    parser.add_argument(
        "position",
        nargs="?",
        type=connection.address,
        metavar="ADDRESS",
        help="in place of --address; http://HOST:PORT or https://HOST:PORT is a gateway",
    )
    connection.add_address(parser)
    parser.add_argument(
        "--service",
        default=READINESS,
        metavar="NAME",
        help="full name (default: %(default)s); '' asks whether it is alive",
    )
    parser.add_argument(
        "--timeout", type=connection.seconds, default=5.0, metavar="SECONDS", help="default: %(default)s"
    )
    parser.add_argument("--json", action="store_true", help="print an object of address, status and details")
    connection.add_tls_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    """Asks once; the exit codes are in the module's docstring."""
    if arguments.position and arguments.address != connection.DEFAULT_ADDRESS:
        raise OptionError("the address is given twice: as a position and as --address")
    arguments.address = arguments.position or arguments.address
    if arguments.address.startswith((HTTP, HTTPS)):
        status, details, code = _over_http(arguments)
    else:
        status, details, code = _over_grpc(arguments)
    if arguments.json:
        print(json.dumps({"address": arguments.address, "status": status, "details": details}))
    else:
        say(f"{arguments.address}: {status}{f': {details}' if details else ''}")
    return code


def _over_http(arguments: argparse.Namespace) -> tuple[str, str, int]:
    """Status, details and exit code of a gateway: whether a scheduler serves behind it, or it is alive itself."""
    import http.client

    host, _, port = arguments.address.removeprefix(HTTP).removeprefix(HTTPS).rpartition(":")
    where, timeout_s = (host.strip("[]"), int(port)), arguments.timeout
    line = http.client.HTTPConnection(*where, timeout=timeout_s)
    try:
        if arguments.address.startswith(HTTPS):
            line = http.client.HTTPSConnection(*where, timeout=timeout_s, context=connection.ssl_context(arguments))
        line.request("GET", "/health" if arguments.service else "/version")
        status = line.getresponse().status
    except (OSError, http.client.HTTPException) as error:
        return "UNAVAILABLE", str(error), UNREACHABLE
    finally:
        line.close()
    return ("SERVING", "", SERVING) if status == 200 else ("NOT_SERVING", f"HTTP {status}", NOT_SERVING)


def _over_grpc(arguments: argparse.Namespace) -> tuple[str, str, int]:
    import grpc
    from grpc_health.v1 import health_pb2, health_pb2_grpc

    from octavo.shared.rpc import client_options

    credentials = connection.credentials(arguments)
    options = client_options(arguments.address)
    channel = (
        grpc.insecure_channel(arguments.address, options)
        if credentials is None
        else grpc.secure_channel(arguments.address, credentials, options)
    )
    request = health_pb2.HealthCheckRequest(service=arguments.service)
    details = ""
    with channel:
        try:
            found = health_pb2_grpc.HealthStub(channel).Check(request, timeout=arguments.timeout).status
            status = health_pb2.HealthCheckResponse.ServingStatus.Name(found)
            code = SERVING if found == health_pb2.HealthCheckResponse.SERVING else NOT_SERVING
        except grpc.RpcError as error:
            status, details = error.code().name, " ".join((error.details() or "").split())
            details = connection.connection_failure(arguments, details) or details
            code = NOT_SERVING if error.code() is grpc.StatusCode.NOT_FOUND else UNREACHABLE
    return status, details, code
