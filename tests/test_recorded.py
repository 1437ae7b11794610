"""What a recorder refuses, and that a description of what it recorded depends on nothing else."""

from types import SimpleNamespace

import pytest

from localllm.arch.states import Paged
from localllm.arch.verbs import Scores
from localllm.engine.memory.fingerprint import described
from localllm.engine.record.operations import ALL, Activation, Operation
from localllm.engine.record.recorder import Recorder
from localllm.errors import ModelError

CONTEXT, WORDS = 64, 2  # words of 32 bits that say which keys of a context count


def attended(choices: int) -> Operation:
    """Attention of four heads in two groups, for which keys were chosen so many times."""
    recorder = Recorder(SimpleNamespace(vocab_size=9, width=8), CONTEXT)
    q, k, v, chosen = (Activation(ALL, columns) for columns in (16, 8, 8, choices * WORDS))
    recorder.attend(q, k, v, Paged(3, 2, 4, 4), Scores(4, 0.5, chosen=chosen))
    return recorder.operations[-1]


def test_keys_are_chosen_for_all_groups_together_or_for_each():
    assert [attended(choices).given["choices"] for choices in (1, 2)] == [1, 2]
    for choices in (0, 3, 4):
        with pytest.raises(ModelError, match=f"layer 3: {choices} choices of keys for 2 groups"):
            attended(choices)


def test_a_description_does_not_depend_on_the_order_in_which_things_were_said():
    x, y = Activation(ALL, 4), Activation(ALL, 4)
    given = {"epsilon": 1e-5, "axis": 1, "group": None}

    def of(**said: object):
        return described([Operation("given", (), x), Operation("norm", (x,), y, said)])

    assert of(**given) == of(**dict(reversed(given.items()))) != of(**given | {"axis": 0})
