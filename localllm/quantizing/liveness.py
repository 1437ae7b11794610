"""After which verbs of a model nobody reads an activation any more: what lets memory hold few of them."""

from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from localllm.arch.weights import Weight
from localllm.engine.operations.activation import Activation

WITHOUT = ("begin", "deepen", "enter", "ignore", "by_context")  # verbs that make nothing new


class LastReads:
    """A builder (localllm.arch.verbs) that passes verbs on to one that records them, and counts them.

    Attributes:
        verbs: the names of those that make something new, in the order in which they were said.
    """

    def __init__(self) -> None:
        self.verbs = list[str]()
        self._last = dict[Activation, tuple[int, Any]]()  # the number of what reads it last, and its place there
        self._made, self._met = dict[Activation, list[int]](), dict[str, int]()  # by which verbs; weights, by the first

    def watching(self, forward: Callable[..., Activation]) -> Callable[..., Activation]:
        """An architecture's `forward` that is seen from here."""

        def watched(recorder: Any, *given: Any) -> Activation:
            self._recorder = recorder
            return forward(self, *given)

        return watched

    def __getattr__(self, name: str) -> Any:
        found = getattr(self._recorder, name)
        return partial(self._say, name, found) if callable(found) and name not in WITHOUT else found

    def _say(self, name: str, verb: Callable[..., Any], *given: Any, **named: Any) -> Any:
        for place, x in (*enumerate(given), *named.items()):
            for read in (x, getattr(x, "chosen", None)):  # of Scores
                if isinstance(read, Activation):
                    self._last[read] = len(self.verbs), place if read is x else None
            if isinstance(x, Weight):
                self._met.setdefault(x.name, len(self.verbs))
        self.verbs.append(name)
        made = verb(*given, **named)
        if isinstance(made, Activation):
            self._made.setdefault(made, []).append(len(self.verbs) - 1)  # some give back what they are given
        return made

    def places(self) -> list[set[Any]]:
        """Of each verb, the places (numbers or names) of what it reads and nobody afterwards."""
        found: list[set[Any]] = [set() for _ in self.verbs]
        for number, place in self._last.values():
            found[number].add(place)
        return found

    def first_with(self, names: Iterable[str]) -> int:
        """The number of the first verb that one of these weights is given to."""
        return min(self._met[name] for name in names)

    def read_from(self, number: int) -> set[int]:
        """The verbs before one whose activations are read there or afterwards."""
        read = [activation for activation, (last, _) in self._last.items() if last >= number]
        return {verb for activation in read for verb in self._made.get(activation, ()) if verb < number}
