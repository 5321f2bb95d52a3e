"""The door to Kubernetes' official client: requests with time-outs, answers as what a caller may conclude.

Errors are of `recovery.backend`'s four kinds:

    Rejected     not allowed, not valid, no such namespace: asking again will not help
    Conflict     somebody else was first (409); `AlreadyExists` where the name is taken, `Vanished` where it is gone
    Unavailable  certainly no effect: not reached, 401, 429, 410, or a read that failed
    Ambiguous    a write without an answer, or with a 5xx: it may have happened
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec
import urllib3
from kubernetes import client as kubernetes_client
from kubernetes import config as kubernetes_config

from ingest.clock import Clock
from recovery.backend import Ambiguous, BackendError, Conflict, Rejected, Unavailable

from .objects import AccessReview, Change, Identified, ListMeta, ListOf, Meta, Refusal

CONNECT_SECONDS_MAX = 3.0
ANSWER_SECONDS_MAX = 10.0
PAGE_ITEMS = 500
PAGES_MAX = 200
WATCH_SECONDS_MAX = 300
WATCH_AGAIN_SECONDS = 0.2  # after a watch that could not be opened
LINE_BYTES_MAX = 4 * 1024 * 1024
READS = ("GET",)
STRICT = [("fieldValidation", "Strict")]  # an older server drops a field that it does not know: a promise would be lost
MERGE_PATCH = "application/merge-patch+json"
FORBIDDEN = re.compile(
    r'User "(?P<user>[^"]*)" cannot (?P<verb>\w+) resource "(?P<resource>[^"]*)" in API group "(?P<group>[^"]*)" '
    r'(?:in the namespace "(?P<namespace>[^"]*)"|at the cluster scope)'
)

Thing = TypeVar("Thing", bound=Identified)


class AlreadyExists(Conflict):
    """An object of that name is there."""


class Vanished(Conflict):
    """The object that was to be changed is not there any more."""


class Expired(Unavailable):
    """The history after that version is gone (410): list again."""


@dataclass(frozen=True, slots=True)
class Kind:
    """One kind of object: its path and the words of a rule."""

    plural: str
    group: str = ""
    version: str = "v1"
    namespaced: bool = True

    def path(self, namespace: str, name: str = "") -> str:
        root = f"/apis/{self.group}/{self.version}" if self.group else f"/api/{self.version}"
        where = f"/namespaces/{namespace}" if self.namespaced else ""
        return f"{root}{where}/{self.plural}" + (f"/{name}" if name else "")


JOBS = Kind("jobs", "batch")
PODS = Kind("pods")
NODES = Kind("nodes", namespaced=False)
CONFIG_MAPS = Kind("configmaps")
SECRETS = Kind("secrets")
LEASES = Kind("leases", "coordination.k8s.io")
ACCESS_REVIEWS = Kind("selfsubjectaccessreviews", "authorization.k8s.io", namespaced=False)


class KubeApi:
    """One cluster, one namespace, as somebody: a kubeconfig's user, or the service account of the pod we run in.

    Safe to use from several threads.
    """

    def __init__(self, client: Any, namespace: str, clock: Clock) -> None:
        self._client = client
        self.namespace = namespace
        self._clock = clock

    @classmethod
    def connect(cls, kubeconfig: str, context: str, namespace: str, clock: Clock) -> KubeApi:
        """With neither given: the service account of our pod, elsewhere the user's own kubeconfig. Raises Rejected."""
        configuration = kubernetes_client.Configuration()
        configuration.retries = False  # the library would repeat a DELETE or PUT whose answer was lost
        try:
            if not kubeconfig and not context:
                try:
                    kubernetes_config.load_incluster_config(client_configuration=configuration)
                except kubernetes_config.ConfigException:
                    kubernetes_config.load_kube_config(client_configuration=configuration)
            else:
                kubernetes_config.load_kube_config(
                    kubeconfig or None, context=context or None, client_configuration=configuration
                )
        except (kubernetes_config.ConfigException, OSError, ValueError) as error:
            raise Rejected(f"no Kubernetes cluster can be asked: {_one_line(error)}; name a kubeconfig") from error
        return cls(kubernetes_client.ApiClient(configuration), namespace, clock)

    def close(self) -> None:
        self._client.close()

    # one object

    def get(self, kind: Kind, name: str, type_: type[Thing]) -> Thing | None:
        """The object, None where there is none of that name."""
        try:
            return self._decoded(self._call("GET", kind.path(self.namespace, name)), type_)
        except Vanished:
            return None

    def create(self, kind: Kind, body: Mapping[str, Any], type_: type[Thing]) -> Thing:
        """Raises AlreadyExists where the name is taken."""
        try:
            payload = self._call("POST", kind.path(self.namespace), query=STRICT, body=body)
            return self._decoded(payload, type_, after_write=True)
        except Vanished as error:
            raise Rejected(f"the namespace {self.namespace} does not exist ({error})") from error

    def patch(self, kind: Kind, name: str, body: Mapping[str, Any], type_: type[Thing]) -> Thing:
        """A merge patch; with `metadata.resourceVersion` in it a compare-and-swap. Raises Conflict, Vanished."""
        path = kind.path(self.namespace, name)
        return self._decoded(
            self._call("PATCH", path, query=STRICT, body=body, content=MERGE_PATCH), type_, after_write=True
        )

    def delete(self, kind: Kind, meta: Meta, *, propagation: str = "Foreground") -> None:
        """Delete this very object and no later one of its name; gone already is good. Raises Conflict."""
        # Everything stands in the body: with one, the server does not look at query parameters.
        body = {
            "kind": "DeleteOptions",
            "apiVersion": "v1",
            "propagationPolicy": propagation,
            "preconditions": {"uid": meta.uid},
        }
        try:
            self._call("DELETE", kind.path(self.namespace, meta.name), body=body)
        except Vanished:
            return

    # many objects

    def list_all(
        self, kind: Kind, type_: type[Thing], *, labels: str = "", fields: str = ""
    ) -> tuple[list[Thing], str]:
        """All that match, and the version from which `watch` goes on. Raises Expired where the list took too long."""
        found: list[Thing] = []
        selectors = _selectors(labels, fields)
        page = ListMeta()
        for _ in range(PAGES_MAX):
            query = [*selectors, ("limit", str(PAGE_ITEMS))]
            if page.continue_:
                query.append(("continue", page.continue_))
            payload = self._call("GET", kind.path(self.namespace), query=query)
            listed = _decode(payload, ListOf[type_])  # type: ignore[valid-type]
            found += listed.items or []
            page = listed.metadata
            if not page.continue_:
                return found, page.resource_version
        raise Rejected(f"more than {PAGES_MAX * PAGE_ITEMS} {kind.plural} match {labels!r} in {self.namespace}")

    def watch(
        self, kind: Kind, type_: type[Thing], *, version: str, seconds: float, labels: str = "", fields: str = ""
    ) -> Iterator[tuple[str, Thing]]:
        """(ADDED, MODIFIED or DELETED, object) after `version`, for so long; goes on where a connection breaks.

        Raises Expired where the server does not know that version any more, and what a request raises.
        """
        end = self._clock.monotonic() + seconds
        selectors = _selectors(labels, fields)
        while (left := end - self._clock.monotonic()) > 0:
            query = [
                *selectors,
                ("watch", "true"),
                ("allowWatchBookmarks", "true"),
                ("resourceVersion", version),
                ("timeoutSeconds", str(max(1, min(WATCH_SECONDS_MAX, round(left))))),
            ]
            try:
                response = self._open(kind.path(self.namespace), query, left)
            except Expired:
                raise
            except Unavailable:
                self._clock.sleep(min(WATCH_AGAIN_SECONDS, left))
                continue
            try:
                for change in _changes(response):
                    seen = _decode(change.object, type_)
                    version = seen.metadata.resource_version or version
                    if change.type != "BOOKMARK":
                        yield change.type, seen
            except (urllib3.exceptions.HTTPError, OSError):
                continue  # it broke: from the last version on
            finally:
                response.close()

    def may(self, verb: str, kind: Kind) -> bool:
        """Whether we have that right here, as the server itself sees it."""
        attributes = {"verb": verb, "resource": kind.plural, "group": kind.group}
        if kind.namespaced:
            attributes["namespace"] = self.namespace
        body = {
            "kind": "SelfSubjectAccessReview",
            "apiVersion": "authorization.k8s.io/v1",
            "spec": {"resourceAttributes": attributes},
        }
        return _decode(self._call("POST", ACCESS_REVIEWS.path(""), body=body), AccessReview).status.allowed

    # the wire

    def _open(self, path: str, query: list[tuple[str, str]], seconds: float) -> Any:
        """A response that goes on; its body is not read yet."""
        response = self._send("GET", path, query, None, "application/json", (CONNECT_SECONDS_MAX, seconds))
        if response.status != 200:
            raise _refused("GET", path, response.status, _read("GET", path, response))
        return response.response

    def _call(
        self,
        method: str,
        path: str,
        *,
        query: list[tuple[str, str]] | None = None,
        body: Mapping[str, Any] | None = None,
        content: str = "application/json",
    ) -> bytes:
        timeouts = (CONNECT_SECONDS_MAX, ANSWER_SECONDS_MAX)
        response = self._send(method, path, query or [], body, content, timeouts)
        payload = _read(method, path, response)
        if 200 <= response.status < 300:
            return payload
        raise _refused(method, path, response.status, payload)

    def _send(
        self,
        method: str,
        path: str,
        query: list[tuple[str, str]],
        body: Mapping[str, Any] | None,
        content: str,
        timeouts: tuple[float, float],
    ) -> Any:
        headers = {"Accept": "application/json"} | ({"Content-Type": content} if body is not None else {})
        request = self._client.param_serialize(
            method,
            path,
            query_params=query,
            header_params=headers,
            body=None if body is None else dict(body),
            auth_settings=["BearerToken"],
        )
        try:
            return self._client.call_api(*request, _request_timeout=timeouts)
        except (urllib3.exceptions.HTTPError, kubernetes_client.ApiException, OSError) as error:
            raise _lost(method, path, error) from error

    def _decoded(self, payload: bytes, type_: type[Thing], *, after_write: bool = False) -> Thing:
        try:
            return _decode(payload, type_)
        except Unavailable as error:
            if after_write:
                raise Ambiguous(str(error)) from error
            raise


def _read(method: str, path: str, response: Any) -> bytes:
    try:
        return bytes(response.read())
    except (urllib3.exceptions.HTTPError, OSError) as error:
        raise _lost(method, path, error) from error


def _changes(response: Any) -> Iterator[Change]:
    """Lines of a watch as they come. Raises Expired, Unavailable."""
    line = bytearray()
    for chunk in response.stream(amt=None, decode_content=False):
        line += chunk
        if len(line) > LINE_BYTES_MAX:
            raise Unavailable(f"a watch sent more than {LINE_BYTES_MAX} bytes without an end of line")
        *whole, rest = bytes(line).split(b"\n")
        line = bytearray(rest)
        for one in whole:
            if not one.strip():
                continue
            change = _decode(one, Change)
            if change.type == "ERROR":
                refusal = _decode(change.object, Refusal)
                raise _refused("GET", "watch", refusal.code, bytes(change.object))
            yield change


def _refused(method: str, path: str, status: int, payload: bytes) -> BackendError:
    """An answer that is not a success, as what may be concluded from it."""
    try:
        refusal = msgspec.json.decode(payload, type=Refusal)
    except (ValueError, RecursionError):
        refusal = Refusal()
    told = _one_line(refusal.message or f"HTTP {status}")
    if status == 403:
        return _forbidden(told)
    if status == 404:
        return Vanished(told)
    if status == 409:
        return AlreadyExists(told) if refusal.reason == "AlreadyExists" else Conflict(told)
    if status == 410:
        return Expired(f"the cluster does not know that version any more: {told}")
    if status in (401, 408, 429):
        return Unavailable(f"the cluster did not do {method} {path}: {told}")
    if status >= 500:
        kind = Unavailable if method in READS else Ambiguous
        return kind(f"the cluster answered {status} to {method} {path}: {told}")
    return Rejected(f"the cluster refuses {method} {path}: {told}")


def _forbidden(told: str) -> BackendError:
    if "exceeded quota" in told:
        return Unavailable(f"the namespace has no room now: {told}")
    match = FORBIDDEN.search(told)
    if match is None:
        return Rejected(f"the cluster forbids it: {told}")
    group = f".{match['group']}" if match["group"] else ""
    where = f"in namespace {match['namespace']}" if match["namespace"] else "in the cluster"
    return Rejected(
        f"{match['user']} may not {match['verb']} {match['resource']}{group} {where}; "
        "give it that verb as docs/kubernetes.md shows"
    )


def _lost(method: str, path: str, error: BaseException) -> BackendError:
    """No answer. Only where the connection never stood is it certain that nothing happened."""
    told = _one_line(error)
    unsent = isinstance(error, urllib3.exceptions.NewConnectionError | urllib3.exceptions.ConnectTimeoutError)
    if unsent or "CERTIFICATE_VERIFY_FAILED" in told:
        return Unavailable(f"the cluster cannot be reached for {method} {path}: {told}")
    kind = Unavailable if method in READS else Ambiguous
    return kind(f"the cluster did not answer {method} {path}: {told}")


Decoded = TypeVar("Decoded")


def _decode(payload: bytes | msgspec.Raw, type_: type[Decoded]) -> Decoded:
    try:
        return msgspec.json.decode(payload, type=type_)
    except (ValueError, RecursionError) as error:
        raise Unavailable(f"the cluster sent what is no {getattr(type_, '__name__', type_)}: {error}") from error


def _selectors(labels: str, fields: str) -> list[tuple[str, str]]:
    given = (("labelSelector", labels), ("fieldSelector", fields))
    return [(name, value) for name, value in given if value]


def _one_line(error: object) -> str:
    """A long one is cut in the middle: a server puts the whole object before what is wrong with it."""
    text = " ".join(str(error).split())
    return text if len(text) <= 500 else f"{text[:250]} … {text[-250:]}"
