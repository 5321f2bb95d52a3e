"""The document of the ledger's API is the API's."""

import json

from tests.golden.write_openapi import FILE, openapi_document


def test_the_openapi_document_is_up_to_date() -> None:
    assert FILE.read_text(encoding="utf-8") == openapi_document(), "run tests/golden/write_openapi.py"


def test_every_read_of_the_api_is_in_it() -> None:
    paths = json.loads(openapi_document())["paths"]
    assert {"/v1/sql", "/v1/snapshots", "/v1/samples", "/v1/series", "/v1/incidents", "/v1/commands"} <= set(paths)
