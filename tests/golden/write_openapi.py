"""Writes docs/ledger-openapi.json: the ledger's API for programs. Run it when a change is meant.

python tests/golden/write_openapi.py
"""

import json
from pathlib import Path
from typing import Any, cast

from pipelines.ledger.api import Doors, create_app
from pipelines.ledger.reader import LocalReader
from pipelines.ledger.sql import SqlDesk

FILE = Path(__file__).resolve().parents[2] / "docs" / "ledger-openapi.json"


def openapi_document() -> str:
    """The document as FastAPI derives it from the routes; nobody is asked anything."""
    nobody = cast(Any, None)
    app = create_app(cast(LocalReader, nobody), bytes, doors=Doors(SqlDesk(nobody), nobody))
    return json.dumps(app.openapi(), indent=2, ensure_ascii=False) + "\n"


if __name__ == "__main__":
    FILE.write_text(openapi_document(), encoding="utf-8")
