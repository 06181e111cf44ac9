"""Whether a service may listen where others reach it: only with a lock on the door, or on somebody's word."""

from __future__ import annotations

import structlog

from octavo.shared.options import OptionError
from octavo.shared.ports import is_loopback

log = structlog.get_logger()


def check_exposure(host: str, *, is_locked: bool, insecure: bool, locks: str) -> None:
    """Raises OptionError for a service that anybody on the network could use, unless it is `insecure` on purpose, which
    is then said once. `locks`: the options that lock it."""
    if is_loopback(host) or host.startswith("unix:") or is_locked:
        return
    if not insecure:
        raise OptionError(
            f"host is {host}, where others reach this service and could use it: lock it with {locks}; --insecure "
            "lets everybody in, for a network whose every member is trusted"
        )
    log.warning("everybody who reaches this port may use it", host=host, locks=locks)
