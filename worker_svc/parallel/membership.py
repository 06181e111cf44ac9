"""Which rank of a parallel group this process is, by the variables that torchrun sets too."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker_svc.errors import StartupError

_VARIABLES = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True, slots=True)
class Membership:
    """One process's place in a group; rank 0 is the one that serves.

    `address`, `port`: where the ranks meet. `local_rank`: counts the ranks of this machine, `local_size` of them.
    """

    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str
    port: int

    def variables(self) -> dict[str, str]:
        """The environment that `membership_of` reads this from."""
        return {
            "RANK": str(self.rank),
            "WORLD_SIZE": str(self.size),
            "LOCAL_RANK": str(self.local_rank),
            "LOCAL_WORLD_SIZE": str(self.local_size),
            "MASTER_ADDR": self.address,
            "MASTER_PORT": str(self.port),
        }


def membership_of(size: int, environ: Mapping[str, str]) -> Membership | None:
    """The place that the environment gives to this process in a group of `size`; None where it gives none.

    Raises StartupError for one that contradicts itself or `size`.
    """
    if size == 1 or "RANK" not in environ:
        return None
    if missing := [name for name in _VARIABLES if name not in environ]:
        raise StartupError(f"RANK is set, as for a rank of a parallel group, but not {missing[0]}")
    rank, world = _number(environ, "RANK"), _number(environ, "WORLD_SIZE")
    if world != size:
        raise StartupError(f"WORLD_SIZE is {world}, but the model is to be split over {size} ranks")
    if rank >= world:
        raise StartupError(f"RANK is {rank}, not below WORLD_SIZE, {world}")
    local_rank = _number(environ, "LOCAL_RANK") if "LOCAL_RANK" in environ else 0
    local_size = _number(environ, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environ else 1
    return Membership(rank, world, local_rank, local_size, environ["MASTER_ADDR"], _number(environ, "MASTER_PORT"))


def _number(environ: Mapping[str, str], name: str) -> int:
    value = environ[name]
    if not value.isdecimal():
        raise StartupError(f"{name} is {value!r}, not a number")
    return int(value)
