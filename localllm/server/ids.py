"""Names of what a client gets."""

import secrets
import string


def call_id() -> str:
    """Of a call: nine letters and digits, which some templates demand."""
    return "".join(secrets.choice(string.ascii_letters + string.digits) for _ in range(9))


def new_id(prefix: str) -> str:
    return f"{prefix}{secrets.token_hex(12)}"
