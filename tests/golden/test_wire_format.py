"""What lies on the bus is a public contract: a change of it must be a change of these files."""

import json

import pytest

from ingest.codec import Codec
from recovery.action import RECOVERY_TYPES
from tests.golden.write_wire import SCHEMAS, WIRE, schema_documents, wire_documents
from tests.wire_examples import EXAMPLES

HOW = "if the change is meant, run: python tests/golden/write_wire.py"


def test_every_type_has_an_example_a_golden_file_and_a_schema() -> None:
    names = {f"{name}.json" for name in RECOVERY_TYPES}
    assert {f"{name}.json" for name in EXAMPLES} == names, "add an example to tests/wire_examples.py"
    assert {path.name for path in WIRE.glob("*.json")} == names, HOW
    assert {path.name for path in SCHEMAS.glob("*.json")} == names, HOW


@pytest.mark.parametrize("name", RECOVERY_TYPES)
def test_the_wire_has_not_changed(name: str) -> None:
    text = (WIRE / f"{name}.json").read_text(encoding="utf-8")
    assert wire_documents()[f"{name}.json"] == text, HOW


@pytest.mark.parametrize("name", RECOVERY_TYPES)
def test_golden_bytes_are_read_as_the_message_they_were(name: str) -> None:
    document = json.loads((WIRE / f"{name}.json").read_text(encoding="utf-8"))
    headers = [(header, text.encode()) for header, text in document["headers"].items()]
    message = Codec(RECOVERY_TYPES).decode(headers, document["value"].encode())
    assert message == EXAMPLES[name]
    # A newer producer of the same major version may add fields.
    richer = {**json.loads(document["value"]), "added_later": {"deep": [1, None]}}
    assert Codec(RECOVERY_TYPES).decode(headers, json.dumps(richer).encode()) == message


@pytest.mark.parametrize("name", RECOVERY_TYPES)
def test_the_schema_in_the_documentation_is_current(name: str) -> None:
    text = (SCHEMAS / f"{name}.json").read_text(encoding="utf-8")
    assert schema_documents()[f"{name}.json"] == text, HOW
