"""A controller's Lease in the cluster, with an epoch: who lost it notices before it acts again."""

from __future__ import annotations

from datetime import UTC, datetime

from ingest.clock import Clock
from recovery.backend import Ambiguous, Conflict, Unavailable
from recovery.lease import LeaseLost

from .api import LEASES, KubeApi
from .objects import Lease

GRANTED_SECONDS = 15
MARGIN_SECONDS = 3.0  # we stop before another may begin: clocks of one host drift less than that in 15 s


class KubernetesLease:
    """`ControllerLease` by a coordination.k8s.io Lease; `leaseTransitions` is the epoch.

    Nobody's wall clock decides: a lease of somebody else has lapsed when we have seen it unchanged for as long as it
    was granted, and ours runs from the moment before the request that renewed it. Only `is_ours` may be asked from
    several threads.
    """

    def __init__(
        self, api: KubeApi, name: str, identity: str, clock: Clock, *, granted_seconds: int = GRANTED_SECONDS
    ) -> None:
        self._api = api
        self._name = name
        self._identity = identity
        self._clock = clock
        self._granted_seconds = granted_seconds
        self._epoch = 0
        self._ours_until = float("-inf")
        self._seen_version = ""
        self._seen_at = 0.0

    @property
    def epoch(self) -> int:
        return self._epoch

    def take(self) -> bool:
        """Raises Unavailable where the cluster cannot be asked; whether it was ours before stays as it was."""
        asked_at = self._clock.monotonic()
        found = self._api.get(LEASES, self._name, Lease)
        try:
            if found is None:
                self._api.create(LEASES, self._manifest(), Lease)
                self._granted(asked_at, 1)
                return True
            if not self._may_take(found, asked_at):
                return False
            return self._swap(found, asked_at)
        except Conflict:
            return False  # somebody was quicker
        except Ambiguous as error:
            raise Unavailable(f"whether the lease {self._name} is ours is not known: {error}") from error

    def renew(self) -> None:
        if not self.take():
            self._ours_until = float("-inf")
            raise LeaseLost(f"another controller has the lease {self._name} in {self._api.namespace}")

    def is_ours(self) -> bool:
        return self._clock.monotonic() < self._ours_until

    def release(self) -> None:
        """Hand it back; where that cannot be said, it lapses by itself."""
        if not self.is_ours():
            return
        self._ours_until = float("-inf")
        try:
            found = self._api.get(LEASES, self._name, Lease)
            if found is not None and found.spec.holder_identity == self._identity:
                body = {
                    "metadata": {"resourceVersion": found.metadata.resource_version},
                    "spec": {"holderIdentity": ""},
                }
                self._api.patch(LEASES, self._name, body, Lease)
        except (Conflict, Unavailable, Ambiguous):
            return

    def _may_take(self, found: Lease, now: float) -> bool:
        spec = found.spec
        if not spec.holder_identity or (
            spec.holder_identity == self._identity and spec.lease_transitions == self._epoch
        ):
            return True
        if found.metadata.resource_version != self._seen_version:
            self._seen_version, self._seen_at = found.metadata.resource_version, now
        return now - self._seen_at >= (spec.lease_duration_seconds or self._granted_seconds)

    def _swap(self, found: Lease, asked_at: float) -> bool:
        before = found.spec.lease_transitions or 0
        ours = found.spec.holder_identity == self._identity and before == self._epoch
        epoch = before if ours else before + 1
        body = self._manifest(epoch, fresh=not ours)
        body["metadata"] = {"resourceVersion": found.metadata.resource_version}
        self._api.patch(LEASES, self._name, body, Lease)
        self._granted(asked_at, epoch)
        return True

    def _granted(self, asked_at: float, epoch: int) -> None:
        self._epoch = epoch
        self._ours_until = asked_at + self._granted_seconds - MARGIN_SECONDS

    def _manifest(self, epoch: int = 1, *, fresh: bool = True) -> dict[str, object]:
        now = datetime.fromtimestamp(self._clock.now(), UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")
        spec: dict[str, object] = {
            "holderIdentity": self._identity,
            "leaseDurationSeconds": self._granted_seconds,
            "renewTime": now,
            "leaseTransitions": epoch,
        }
        if fresh:
            spec["acquireTime"] = now
        return {"metadata": {"name": self._name}, "spec": spec}
