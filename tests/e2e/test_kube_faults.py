"""A real API server behind a proxy that loses answers, refuses and forgets: each asked again, nothing happens twice."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from recovery.backend import Ambiguous, BackendError, Unavailable
from recovery.backends.kube import api as kube_api
from recovery.backends.kube.api import CONFIG_MAPS, PODS, Expired
from recovery.backends.kube.objects import ConfigMap, Pod
from recovery.backends.kubernetes import KubernetesAllocation
from tests.kube_lab.cluster import SLOW_TO_END, KubeJob, control_plane, kube_job, namespace
from tests.kube_lab.control_plane import ControlPlane
from tests.kube_lab.fault_proxy import FaultKind, FaultProxy
from tests.launcher_lab import wait_for

__all__ = ["control_plane", "kube_job", "namespace"]


@pytest.fixture
def proxy(control_plane: ControlPlane) -> Iterator[FaultProxy]:
    with FaultProxy(control_plane.address, str(control_plane.certificate)).running() as proxy:
        yield proxy


@pytest.fixture
def through(kube_job: KubeJob, proxy: FaultProxy, monkeypatch: pytest.MonkeyPatch) -> KubernetesAllocation:
    """The allocation as it asks through the proxy; an answer that does not come is awaited for a second."""
    monkeypatch.setattr(kube_api, "ANSWER_SECONDS_MAX", 1.0)
    return kube_job.allocation(server=proxy.address)


def again(do: Callable[[], object], *errors: type[BackendError]) -> list[BackendError]:
    """Ask until there is an answer, as recovery does; the errors there were."""
    met: list[BackendError] = []

    def asked() -> bool:
        try:
            do()
        except errors as error:
            met.append(error)
            return False
        return True

    wait_for(asked, "an answer", 60)
    return met


@pytest.mark.parametrize(
    ("kind", "method", "path"),
    [
        ("time_out_after_effect", "DELETE", "/jobs/job-g1"),
        ("reset_after_effect", "DELETE", "/jobs/job-g1"),
        ("reset", "DELETE", "/jobs/job-g1"),
        ("500", "DELETE", "/jobs/job-g1"),
        ("reset_after_effect", "POST", "/jobs"),
        ("500", "POST", "/jobs"),
        ("truncated", "POST", "/jobs"),
    ],
)
def test_a_write_whose_answer_is_lost_is_ambiguous_and_asked_again_there_is_one_replacement(
    kube_job: KubeJob, proxy: FaultProxy, through: KubernetesAllocation, kind: FaultKind, method: str, path: str
) -> None:
    bad = kube_job.submit(through)[0]
    fault = proxy.add(kind, method, f"{path}(\\?|$)")

    def replace() -> None:
        through.replace(kube_job.job, attempt=2, token="t", excluded_nodes=(bad,))

    errors = again(replace, Ambiguous)
    assert fault.met == 1
    assert [type(error) for error in errors] == [Ambiguous]
    nodes = kube_job.replace(through, 2, bad, token="t")
    assert bad not in nodes
    wait_for(lambda: kube_job.jobs() == ["job-g2"], "only the second generation is left")
    assert through.look(kube_job.job).generation == 2


@pytest.mark.parametrize("kind", ["time_out_after_effect", "reset_after_effect", "500", "429", "reset"])
def test_an_intent_whose_answer_is_lost_is_looked_after_and_makes_one_generation(
    kube_job: KubeJob, proxy: FaultProxy, through: KubernetesAllocation, kind: FaultKind
) -> None:
    bad = kube_job.submit(through)[0]
    proxy.add(kind, "PATCH", "/configmaps/job")
    again(lambda: through.replace(kube_job.job, attempt=2, token="t", excluded_nodes=(bad,)), Unavailable, Ambiguous)
    kube_job.replace(through, 2, bad, token="t")
    assert through.look(kube_job.job).generation == 2


@pytest.mark.parametrize("kind", ["429", "500", "reset", "truncated", "410", "time_out_after_effect"])
def test_a_look_without_an_answer_is_unavailable_and_concludes_nothing(
    kube_job: KubeJob, proxy: FaultProxy, through: KubernetesAllocation, kind: FaultKind
) -> None:
    before = kube_job.submit(through)
    proxy.add(kind, "GET", "/pods")
    with pytest.raises(Unavailable):
        through.look(kube_job.job)
    assert through.look(kube_job.job).nodes == before


def test_an_api_server_that_is_away_for_long_changes_nothing(
    kube_job: KubeJob, proxy: FaultProxy, through: KubernetesAllocation
) -> None:
    before = kube_job.submit(through)
    away = proxy.add("reset", "GET", "", times=50)
    for _ in range(20):
        with pytest.raises(Unavailable):
            through.look(kube_job.job)
        with pytest.raises(Unavailable):
            through.nothing_runs_on(kube_job.job, before[0])
    away.times = 0
    assert through.look(kube_job.job).nodes == before
    assert kube_job.jobs() == ["job-g1"]


@pytest.mark.parametrize("kind", ["cut_watch", "410", "500", "reset"])
def test_a_watch_that_breaks_goes_on(
    kube_job: KubeJob, proxy: FaultProxy, through: KubernetesAllocation, kind: FaultKind
) -> None:
    bad = kube_job.submit(through, SLOW_TO_END)[0]  # so that its end is watched
    fault = proxy.add(kind, "GET", "watch=true", times=2)
    assert bad not in kube_job.replace(through, 2, bad)
    assert fault.met > 0


def test_a_watch_goes_on_after_what_it_saw(kube_job: KubeJob, proxy: FaultProxy, through: KubernetesAllocation) -> None:
    """The connection is cut after its first change; the two that happened meanwhile come in order, each once."""
    kube_job.submit(through)
    api = through._api
    fields = f"metadata.name={kube_job.job}"
    _, version = api.list_all(CONFIG_MAPS, ConfigMap, fields=fields)
    records = kube_job.allocation().records(kube_job.job)
    for number in range(3):
        records.write_excluded(frozenset({f"n{number}"}))
    proxy.add("cut_watch", "GET", "configmaps.*watch=true")
    seen: list[tuple[str, str]] = []
    for kind, found in api.watch(CONFIG_MAPS, ConfigMap, version=version, seconds=30, fields=fields):
        seen.append((kind, found.data["excluded.json"]))
        if len(seen) == 3:
            break
    assert [kind for kind, _ in seen] == ["MODIFIED"] * 3
    assert [text for _, text in seen] == [f'{{"nodes":["n{number}"]}}' for number in range(3)]


def test_a_version_that_is_not_known_any_more_says_so(
    kube_job: KubeJob, proxy: FaultProxy, through: KubernetesAllocation
) -> None:
    proxy.add("410", "GET", "watch=true")
    with pytest.raises(Expired):
        list(through._api.watch(PODS, Pod, version="1", seconds=30))
