"""A refusal by a tenant's limit."""

from __future__ import annotations

from scheduler_svc.errors import QueueFull

OTHERS = "others"  # in metrics: tenants that the file does not name, however many


class OverLimit(QueueFull):
    """The message is for the tenant's clients.

    Attributes:
        tenant, limit: whose, and by the name that it has in the file.
        most: what the file says.
        left: of it, at this moment.
        label: the tenant's name in metrics.
    """

    def __init__(
        self, message: str, retry_after_s: float, *, tenant: str, limit: str, most: int, left: int, label: str
    ) -> None:
        super().__init__(message, retry_after_s)
        self.tenant, self.limit, self.most, self.left, self.label = tenant, limit, most, left, label
