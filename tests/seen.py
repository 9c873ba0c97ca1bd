"""What the log says of a member, which is what others know of it."""

from schemas.log.membership import Membership
from schemas.records import MemberState


def is_seen_ready(membership: Membership) -> bool:
    """Whether a heartbeat has told it; until the next one only the member knows."""
    seen = membership.view.members.get(membership.member_id)
    is_its_own = seen is not None and seen.epoch == membership.epoch  # not of a life before it
    return seen is not None and is_its_own and seen.state is MemberState.READY
