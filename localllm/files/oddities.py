"""Notes on irregularities of a file that runs all the same: its meaning is clear, and other programs load it."""

MOST = 6  # of one file, in the line that the user sees


class Oddities:
    """Notes on one file, in the order of their discovery.

    ignored: metadata keys without an effect, which a new file leaves out.
    """

    def __init__(self) -> None:
        self._notes = dict[str, None]()
        self.ignored = set[str]()

    def note(self, problem: str, key: str = "") -> None:
        """Note a problem, once; key: of metadata that are ignored because of it."""
        self._notes[problem] = None
        self.ignored |= {key} if key else set()

    def extend(self, other: "Oddities") -> None:
        """Add the notes on another part of the file."""
        self._notes |= other._notes
        self.ignored |= other.ignored

    def __len__(self) -> int:
        return len(self._notes)

    def lines(self) -> list[str]:
        """Return one line for the user, or none."""
        notes = [*self._notes]
        more = [f"and {len(notes) - MOST} more"] if len(notes) > MOST else []
        return (
            [f"the file has irregularities that do not change its meaning: {'; '.join([*notes[:MOST], *more])}"]
            if notes
            else []
        )
