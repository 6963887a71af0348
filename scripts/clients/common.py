"""What the uses of all clients share: the server's address, the model's name, a question, a schema."""

import os

BASE, MODEL = os.environ["BASE"], os.environ["MODEL"]
V1 = f"{BASE}/v1"
ASK = "Name a city in France. Answer briefly."
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string", "maxLength": 20}},
    "required": ["city"],
    "additionalProperties": False,
}
