"""Who may do what in the console: a login is a role, and only an operator's commands leave it."""

from __future__ import annotations

import hmac
from typing import Literal

Role = Literal["viewer", "operator"]


def role_of(given: str, operator_token: str, viewer_token: str = "") -> Role | None:
    """The role that a token gives; None where it is nobody's. Takes as long for a wrong token as for a right one."""
    operator = bool(operator_token) & hmac.compare_digest(given.encode(), operator_token.encode())
    viewer = bool(viewer_token) & hmac.compare_digest(given.encode(), viewer_token.encode())
    return "operator" if operator else "viewer" if viewer else None


def why_not(*, finished: bool, login: bool, role: Role | None) -> str:
    """Why commands are refused; empty where they are not."""
    if finished:
        return "This ledger is finished: it can be read, and nothing can be asked of it."
    if login and role != "operator":
        return "You are logged in as a viewer; commands need the operator's token."
    return ""
