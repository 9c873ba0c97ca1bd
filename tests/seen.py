"""What the log says of a member, which is what others know of it."""

from schemas.log.membership import Membership
from schemas.records import MemberState


def is_seen_ready(membership: Membership) -> bool:
    """Whether a heartbeat has told it; until the next one only the member knows."""
    seen = membership.view.members.get(membership.member_id)
    if seen is None or seen.epoch != membership.epoch:  # of a life before this one
        return False
    return seen.state is MemberState.READY
