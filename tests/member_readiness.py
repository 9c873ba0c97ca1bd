"""What the log says of a member, which is what others know of it."""

from schemas.records import MemberState
from streams.log.membership import Membership


def is_seen_ready(membership: Membership) -> bool:
    """Return whether the log shows the member as ready; the member itself knows before."""
    view = membership.view.members.get(membership.member_id)
    if view is None or view.epoch != membership.epoch:  # of a life before this one
        return False
    return view.state is MemberState.READY
