"""Writes what the wire looks like: tests/golden/wire/*.json and docs/schemas/*.json. Run it when a change is meant.

python tests/golden/write_wire.py
"""

import functools
import json
from pathlib import Path

import msgspec

from ingest.codec import Codec
from recovery.action import RECOVERY_TYPES
from tests.wire_examples import EXAMPLES

ROOT = Path(__file__).resolve().parents[2]
WIRE = ROOT / "tests" / "golden" / "wire"
SCHEMAS = ROOT / "docs" / "schemas"


@functools.cache
def wire_documents() -> dict[str, str]:
    """File name to text: topic, key, headers and the exact value of each example."""
    codec = Codec(RECOVERY_TYPES)
    documents = {}
    for name, message in EXAMPLES.items():
        encoded = codec.encode(message)
        document = {
            "topic": encoded.topic,
            "key": encoded.key,
            "headers": {header: raw.decode() for header, raw in encoded.headers},
            "value": encoded.value.decode(),
        }
        documents[f"{name}.json"] = json.dumps(document, indent=2, ensure_ascii=False) + "\n"
    return documents


@functools.cache
def schema_documents() -> dict[str, str]:
    """File name to JSON Schema of each message type."""
    documents = {}
    for name, (topic, type_) in RECOVERY_TYPES.items():
        schema = {
            "$schema": "https://json-schema.org/draft/2020-12/schema",
            "$id": f"org.transom.{name}",
            "$comment": f"Topic {topic}. Fields that are not listed are to be ignored.",
            **msgspec.json.schema(type_),
        }
        documents[f"{name}.json"] = json.dumps(schema, indent=2, ensure_ascii=False) + "\n"
    return documents


def main() -> None:
    for folder, documents in ((WIRE, wire_documents()), (SCHEMAS, schema_documents())):
        folder.mkdir(parents=True, exist_ok=True)
        for stale in set(folder.glob("*.json")) - {folder / name for name in documents}:
            stale.unlink()
        for name, text in documents.items():
            (folder / name).write_text(text, encoding="utf-8")


if __name__ == "__main__":
    main()
