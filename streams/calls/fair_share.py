"""A limit that the tenants of one process share; no tenant ever gets all of it. Pure."""

from collections import Counter

from schemas.errors import TooManyRequests


class FairShare:
    """A limit on things in use at once, divided by the number of tenants that use some now, plus
    one.

    The last quarter is for tenants that use few: each gets at most half of what the others leave,
    so that a new tenant always finds some.
    """

    def __init__(self, limit: int, *, tenants: int) -> None:
        """Set the limit; `tenants` is the number of tenants in the deployment."""
        self._limit, self._is_shared = limit, tenants > 1
        self._for_newcomers = max(1, limit // 4) if self._is_shared else 0
        self._used: Counter[str] = Counter()

    @property
    def used(self) -> int:
        """Return the number in use by all tenants together."""
        return self._used.total()

    def limit_of(self, tenant: str) -> int:
        """Return how many a tenant may use now."""
        if not self._is_shared:
            return self._limit
        other_tenants = len(self._used) - (tenant in self._used)
        return max(1, self._limit // (other_tenants + 2))

    def check(self, tenant: str, what: str, count: int = 1) -> None:
        """Raise TooManyRequests if a tenant cannot use `count` more; `what` names them in the
        message."""
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
        """Check the limits, then count `count` more as used."""
        self.check(tenant, what, count)
        self.add(tenant, count)

    def add(self, tenant: str, count: int = 1) -> None:
        """Count `count` more as used without a check."""
        self._used[tenant] += count

    def give_back(self, tenant: str, count: int = 1) -> None:
        """Count `count` fewer as used by a tenant."""
        self._used[tenant] -= count
        if not self._used[tenant]:
            del self._used[tenant]
