"""Test receipts of an endpoint's answers: replay sends what was recorded, and nothing else."""

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from localllm.generation.constraints.constraint import make_constraint
from localllm.generation.options import GenerationOptions
from localllm.generation.sampling.options import SamplingOptions
from localllm.services import remote_receipts
from localllm.services.receipts import find_difference, get_answers, restore_options
from localllm.services.remote.dialect import OutputFormat
from tests.unit.services.remote.test_model import answer_events, answered, model

CHAT = [{"role": "user", "content": "Hi"}]
OPTIONS = GenerationOptions(7, ("x",), SamplingOptions(temperature=0.5, seed=3))


def make_receipt(asked: Any, n: int, result: dict[str, Any], form: OutputFormat | None = None) -> dict[str, Any]:
    """Return a receipt as read from its file."""
    asking = model(name="m", owner="localllm", form=form)
    return json.loads(json.dumps(remote_receipts.make_receipt(asking, asked, OPTIONS, n, result)))


def test_a_remote_receipt_holds_endpoint_prompt_and_options():
    receipt = make_receipt(CHAT, 2, {"text": "a", "model": "left out"}, OutputFormat(regex="a+"))
    assert receipt["model"] == {"endpoint": "http://a/v1", "name": "m", "server": "localllm"}
    assert receipt["prompt"] == {"asked": CHAT, "sha256": sha256(json.dumps(CHAT).encode()).hexdigest()}
    options = receipt["options"]
    assert (options["n"], options["beams"], options["speculate"], options["max_tokens"]) == (2, 0, "off", 7)
    assert receipt["result"] == {"text": "a"} and remote_receipts.is_remote(receipt)
    assert remote_receipts.restore_output_format(receipt) == OutputFormat(None, None, "a+")
    assert remote_receipts.restore_output_format(
        make_receipt(CHAT, 1, {}, OutputFormat({"type": "null"}, "g"))
    ) == OutputFormat({"type": "null"}, "g", None)
    again = restore_options(receipt)
    assert (again.max_tokens, again.stop, again.sampling.temperature, again.sampling.seed) == (7, ["x"], 0.5, 3)


def test_a_constraint_is_recorded_as_it_was_given():
    """Do not record it as compiled for local models."""
    asking = model(name="m", form=OutputFormat(regex="a+"))
    options = replace(OPTIONS, stop=(), constraint=make_constraint(regex="a+"))
    receipt = remote_receipts.make_receipt(asking, CHAT, options, 1, {})
    assert receipt["options"]["constraint"] is None and receipt["options"]["form"]["regex"] == "a+"


def test_an_unset_seed_is_drawn():
    """Leave all other unset options to the server."""
    assert remote_receipts.add_seed(OPTIONS) is OPTIONS
    drawn = [remote_receipts.add_seed(GenerationOptions(7)) for _ in range(20)]
    seeds = [options.sampling.seed for options in drawn]
    assert all(0 <= seed < 2**32 for seed in seeds) and len(set(seeds)) > 1
    assert replace(drawn[0], sampling=replace(drawn[0].sampling, seed=None)) == GenerationOptions(7)


@pytest.mark.parametrize("asked", ["Once", CHAT])
@pytest.mark.parametrize("n", [1, 2])
def test_replay_sends_the_same_request(asked: Any, n: int):
    """Stream one answer, and request several at once."""
    whole = {"choices": [answered(text) for text in "ab"]}
    asking = model(whole if n > 1 else answer_events("a", "b"))
    result = remote_receipts.regenerate(asking, make_receipt(asked, n, {}), OPTIONS)
    assert [answer["text"] for answer in get_answers(result)] == ([*"ab"] if n > 1 else ["ab"])
    ((path, body),) = asking.endpoint.asked
    assert path == ("/completions" if asked == "Once" else "/chat/completions")
    assert body["prompt" if asked == "Once" else "messages"] == asked
    assert (body["max_tokens"], body["stop"], body["seed"], body["temperature"]) == (7, ["x"], 3, 0.5)
    assert (body.get("n"), body.get("stream")) == ((2, None) if n > 1 else (None, True))
    assert find_difference(result, result) is None
    other = {"answers": [*get_answers(result)[:-1], {"text": "z", "tokens": []}]}
    assert find_difference(result, other) == (
        "answer 2, token 1, character 1: it was 'b' and is now 'z'" if n > 1 else
        "token 1, character 1: it was 'ab' and is now 'z'"
    )  # fmt: skip
