"""The runs in which a prompt is read: where they end depends on nothing but the place in the prompt.

So of two prompts that begin alike, what they have in common is computed in the same way, to the bit, as far as the last
end of a run within it: what was read of the one can stand for what would be read of the other.
"""

FIRST, LATER = 512, 256  # tokens of a run
# From here on runs are short, so that less is read once more: reading is attention by then, and as fast. In runs of 256
# from the beginning on, SmolLM2 would read 1536 tokens 7 to 20 % slower than in runs of 512.
DEEP = 2048
LONG = (
    512  # tokens of a prompt: of more, what was read is worth keeping (a second's work), and nothing is read otherwise
)


def last_end(length: int) -> int:
    """Where the last whole run ends within so many tokens."""
    run = FIRST if length < DEEP else LATER
    return length // run * run


def next_end(position: int) -> int:
    """Where the run ends in which the token at this place is read."""
    return last_end(position) + (FIRST if position < DEEP else LATER)
