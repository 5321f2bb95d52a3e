"""What may be concluded from an answer of a Kubernetes API server, and from none."""

from __future__ import annotations

import json

import pytest
import urllib3

from recovery.backend import Ambiguous, Conflict, Rejected, Unavailable
from recovery.backends.kube.api import AlreadyExists, Expired, Vanished, _lost, _refused

FORBIDDEN = (
    'jobs.batch is forbidden: User "system:serviceaccount:training:transom" cannot create resource "jobs" in API group '
    '"batch" in the namespace "training"'
)
CLUSTER = 'nodes is forbidden: User "me" cannot list resource "nodes" in API group "" at the cluster scope'
QUOTA = 'pods "x" is forbidden: exceeded quota: team, requested: pods=4, used: pods=8, limited: pods=10'


def body(message: str, reason: str = "") -> bytes:
    return json.dumps({"kind": "Status", "message": message, "reason": reason}).encode()


@pytest.mark.parametrize(
    ("method", "status", "payload", "error"),
    [
        ("POST", 400, body("bad"), Rejected),
        ("POST", 422, body("invalid", "Invalid"), Rejected),
        ("POST", 401, body("Unauthorized"), Unavailable),  # a token is renewed
        ("POST", 429, body("slow down"), Unavailable),
        ("POST", 403, body(FORBIDDEN), Rejected),
        ("POST", 403, body(QUOTA), Unavailable),  # room comes and goes
        ("POST", 409, body("there", "AlreadyExists"), AlreadyExists),
        ("PATCH", 409, body("changed", "Conflict"), Conflict),
        ("PATCH", 404, body("gone", "NotFound"), Vanished),
        ("GET", 410, body("too old", "Expired"), Expired),
        ("GET", 500, body("etcd"), Unavailable),
        ("GET", 503, b"<html>upstream</html>", Unavailable),
        ("DELETE", 500, body("etcdserver: request timed out"), Ambiguous),
        ("PATCH", 503, b"<html>upstream</html>", Ambiguous),
        ("POST", 504, b"", Ambiguous),
    ],
)
def test_each_status_says_what_may_be_concluded(
    method: str, status: int, payload: bytes, error: type[Exception]
) -> None:
    assert type(_refused(method, "/path", status, payload)) is error


def test_a_missing_right_is_one_sentence_that_names_who_what_and_where() -> None:
    told = str(_refused("POST", "/path", 403, body(FORBIDDEN)))
    assert told.startswith("system:serviceaccount:training:transom may not create jobs.batch in namespace training;")
    assert "docs/kubernetes.md" in told
    assert "me may not list nodes in the cluster;" in str(_refused("GET", "/path", 403, body(CLUSTER)))


@pytest.mark.parametrize(
    ("error", "method", "expected"),
    [
        (urllib3.exceptions.NewConnectionError(None, "refused"), "DELETE", Unavailable),
        (urllib3.exceptions.ConnectTimeoutError("slow"), "DELETE", Unavailable),
        (OSError("CERTIFICATE_VERIFY_FAILED"), "DELETE", Unavailable),
        (urllib3.exceptions.ReadTimeoutError(None, "/", "slow"), "DELETE", Ambiguous),
        (urllib3.exceptions.ProtocolError("reset"), "PATCH", Ambiguous),
        (urllib3.exceptions.ProtocolError("reset"), "GET", Unavailable),
        (ConnectionResetError("reset"), "POST", Ambiguous),
    ],
)
def test_without_an_answer_a_write_may_have_happened_unless_nobody_was_reached(
    error: Exception, method: str, expected: type[Exception]
) -> None:
    assert type(_lost(method, "/path", error)) is expected
