"""What is odd in a file that runs all the same: other programs load it, and what it means is beyond doubt."""

MOST = 6  # of one file, in the line that the user sees


class Oddities:
    """Notes on one file, in the order in which things were noticed.

    ignored: keys of metadata that say nothing that could be done, and that a new file is better without.
    """

    def __init__(self) -> None:
        self._notes = dict[str, None]()
        self.ignored = set[str]()

    def note(self, problem: str, key: str = "") -> None:
        """Remember a problem, once. key: of metadata that are ignored for it."""
        self._notes[problem] = None
        self.ignored |= {key} if key else set()

    def extend(self, other: "Oddities") -> None:
        """Add what was noted of another part of the file."""
        self._notes |= other._notes
        self.ignored |= other.ignored

    def __len__(self) -> int:
        return len(self._notes)

    def lines(self) -> list[str]:
        """One line for the user, or none."""
        notes = [*self._notes]
        more = [f"and {len(notes) - MOST} more"] if len(notes) > MOST else []
        return [f"the file is odd, but it is clear what it means: {'; '.join([*notes[:MOST], *more])}"] if notes else []
