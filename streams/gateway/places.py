"""Places that tenants share, in one process: no tenant ever has all of them. Pure."""

from collections import Counter

from schemas.errors import TooManyRequests


class Places:
    """So many at once. They are divided by the tenants that use some now, and one more. The last
    quarter is for those that have few: each gets half of what others have left, so that whoever
    comes finds some.
    """

    def __init__(self, most: int, *, tenants: int) -> None:
        """`tenants` there are in the deployment."""
        self._most, self._is_shared = most, tenants > 1
        self._for_newcomers = max(1, most // 4) if self._is_shared else 0
        self._taken: Counter[str] = Counter()

    @property
    def taken(self) -> int:
        """By all."""
        return self._taken.total()

    def most_of(self, tenant: str) -> int:
        """How many a tenant may have now."""
        if not self._is_shared:
            return self._most
        others = len(self._taken) - (tenant in self._taken)
        return max(1, self._most // (others + 2))

    def check(self, tenant: str, what: str, count: int = 1) -> None:
        """Raise TooManyRequests, which says of `what` there are too many, for so many more."""
        own, most = self._taken.get(tenant, 0), self.most_of(tenant)
        has_few = own + count <= max(1, (self._most - self.taken + own) // 2)
        together = self._most if has_few else self._most - self._for_newcomers
        if own + count > most or self.taken + count > together:
            raise TooManyRequests(
                f"{own} of your {what} and {self.taken - own} of others are under way, and at most "
                f"{most} and {self._most} together may be; try again later"
            )

    def take(self, tenant: str, what: str, count: int = 1) -> None:
        """`check`, and then take them."""
        self.check(tenant, what, count)
        self.add(tenant, count)

    def add(self, tenant: str, count: int = 1) -> None:
        """They are taken, whatever the bound."""
        self._taken[tenant] += count

    def give_back(self, tenant: str, count: int = 1) -> None:
        """They are free again."""
        self._taken[tenant] -= count
        if not self._taken[tenant]:
            del self._taken[tenant]
