"""Places that tenants share, in one process: no tenant ever has all of them. Pure."""

from collections import Counter

from schemas.errors import TooManyRequests


class FairShare:
    """So many at once. They are divided by the tenants that use some now, and one more. The last
    quarter is for those that have few: each gets half of what others have left, so that whoever
    comes finds some.
    """

    def __init__(self, limit: int, *, tenants: int) -> None:
        """`tenants` there are in the deployment."""
        self._limit, self._is_shared = limit, tenants > 1
        self._for_newcomers = max(1, limit // 4) if self._is_shared else 0
        self._used: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """Return how much all tenants use together."""
        return self._used.total()

    def limit_of(self, tenant: str) -> int:
        """How many a tenant may have now."""
        if not self._is_shared:
            return self._limit
        other_tenants = len(self._used) - (tenant in self._used)
        return max(1, self._limit // (other_tenants + 2))

    def check(self, tenant: str, what: str, count: int = 1) -> None:
        """Raise TooManyRequests, which says of `what` there are too many, for so many more."""
        tenant_used, tenant_limit = self._used.get(tenant, 0), self.limit_of(tenant)
        has_few = tenant_used + count <= max(1, (self._limit - self.used + tenant_used) // 2)
        together = self._limit if has_few else self._limit - self._for_newcomers
        if tenant_used + count > tenant_limit or self.used + count > together:
            raise TooManyRequests(
                f"{tenant_used} of your {what} and {self.used - tenant_used} of others are under "
                f"way, and at most {tenant_limit} and {self._limit} together may be; try again "
                "later"
            )

    def take(self, tenant: str, what: str, count: int = 1) -> None:
        """Check the limits, then count them as used."""
        self.check(tenant, what, count)
        self.add(tenant, count)

    def add(self, tenant: str, count: int = 1) -> None:
        """Count them as used, whatever the limit."""
        self._used[tenant] += count

    def give_back(self, tenant: str, count: int = 1) -> None:
        """Return what a tenant no longer uses."""
        self._used[tenant] -= count
        if not self._used[tenant]:
            del self._used[tenant]
