"""Generate the ids of responses, tool calls and items."""

import secrets


def new_id(prefix: str) -> str:
    """Return the prefix followed by 24 random hexadecimal digits."""
    return f"{prefix}{secrets.token_hex(12)}"
