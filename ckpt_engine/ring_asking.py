"""How an engine asks the others of its ring: which of them live, what each holds, and a connection to one."""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from .ring_link import Caller, Holding, PeerLink, dial
from .ring_members import Member, Members
from .wire import WireError

ASKED_AT_ONCE = 8


class Asking:
    """Every method may be called from any thread."""

    def __init__(self, node: str, caller: Caller, members: Members) -> None:
        self.node = node
        self._caller = caller
        self._members = members

    def living(self, node: str) -> Member | None:
        """None where it is gone."""
        return self._members.living(node)

    def others(self) -> list[Member]:
        """The living ones, the next in the ring first."""
        order = self._members.order()
        at = order.index(self.node) + 1 if self.node in order else 0
        names = [node for node in order[at:] + order[:at] if node != self.node]
        return [member for member in map(self._members.living, names) if member is not None]

    def ask_some(self, members: Sequence[Member], deadline: float) -> list[Holding]:
        """What these hold, in their order; all are asked side by side, so give it `ASKED_AT_ONCE` at the most."""
        if not members:
            return []
        with ThreadPoolExecutor(len(members), "ring-ask") as pool:
            answers = list(pool.map(lambda member: self.ask(member, deadline), members))
        return [holding for answer in answers for holding in answer]

    def ask(self, member: Member, deadline: float) -> list[Holding]:
        """What `member` holds; nothing where it does not answer: a peer is one tier, and there is another."""
        try:
            link = self.dial(member, deadline)
        except WireError:
            return []
        try:
            return link.holdings()
        except WireError:
            return []
        finally:
            link.close()

    def dial(self, member: Member, deadline: float) -> PeerLink:
        """A proved connection that ends at `deadline`. Raises PeerError."""
        link = dial(member, self._caller)
        link.end_by(deadline)
        return link
