"""Liveness analysis of activations: after which verb of a model each one can be freed."""

from collections.abc import Callable, Iterable
from functools import partial

from localllm.arch.weights import Weight
from localllm.engine.operations.activation import Activation

WITHOUT = (
    "embed_inputs",
    "add_deepstack",
    "tap_layer_input",
    "ignore",
    "by_context",
)  # verbs that return no new activation
PRODUCTS = ("linear", "head_linear", "expert_linear")


class LastReads:
    """A builder (localllm.arch.verbs) that counts verbs and forwards them to a recorder.

    Attributes:
        verbs: names of the verbs that return an activation, in order.  multiplied: names of the weights that
            activations are multiplied with.
    """

    def __init__(self) -> None:
        self.verbs, self.multiplied = list[str](), set[str]()
        self._last = dict[Activation, tuple[int, object]]()  # number of the last verb that reads it, and the argument
        self._producers = dict[Activation, list[int]]()  # numbers of the verbs that return it
        self._met = dict[str, int]()  # number of the first verb per weight

    def record(self, forward: Callable[..., Activation]) -> Callable[..., Activation]:
        """Wrap an architecture's `forward` so that its verbs are counted."""

        def watched(recorder: object, *arguments: object) -> Activation:
            self._recorder = recorder
            return forward(self, *arguments)

        return watched

    def __getattr__(self, name: str) -> object:
        attribute = getattr(self._recorder, name)
        return partial(self._record_verb, name, attribute) if callable(attribute) and name not in WITHOUT else attribute

    def _record_verb(self, name: str, verb: Callable[..., object], *arguments: object, **named: object) -> object:
        for place, x in (*enumerate(arguments), *named.items()):
            for read in (x, getattr(x, "chosen", None)):  # the selected keys of Scores
                if isinstance(read, Activation):
                    self._last[read] = len(self.verbs), place if read is x else None
            if isinstance(x, Weight):
                self._met.setdefault(x.name, len(self.verbs))
                self.multiplied.update([x.name] if name in PRODUCTS else [])
        self.verbs.append(name)
        result = verb(*arguments, **named)
        if isinstance(result, Activation):
            self._producers.setdefault(result, []).append(len(self.verbs) - 1)  # some verbs return their argument
        return result

    def last_read_arguments(self) -> list[set[object]]:
        """Return per verb the arguments (numbers or names) that it is the last to read."""
        arguments_read: list[set[object]] = [set() for _ in self.verbs]
        for number, place in self._last.values():
            arguments_read[number].add(place)
        return arguments_read

    def first_verb_with(self, names: Iterable[str]) -> int:
        """Return the number of the first verb that is given one of these weights."""
        return min(self._met[name] for name in names)

    def read_from(self, number: int) -> set[int]:
        """Return the verbs before `number` whose results it or a later verb reads."""
        read = [activation for activation, (last, _) in self._last.items() if last >= number]
        return {verb for activation in read for verb in self._producers.get(activation, ()) if verb < number}
