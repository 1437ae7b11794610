"""Test receipts of an endpoint's answers: replay sends what was recorded, and nothing else."""

import json
from dataclasses import replace
from hashlib import sha256
from typing import Any

import pytest

from localllm.generation.constraints.constraint import constraint_of
from localllm.generation.options import GenerationOptions
from localllm.generation.sampling.options import SamplingOptions
from localllm.services import remote_receipts
from localllm.services.receipts import answers_of, difference, options_of
from localllm.services.remote.dialect import Form
from tests.unit.services.remote.test_model import answer_events, answered, model

CHAT = [{"role": "user", "content": "Hi"}]
OPTIONS = GenerationOptions(7, ("x",), SamplingOptions(temperature=0.5, seed=3))


def make_receipt(asked: Any, n: int, result: dict[str, Any], form: Form | None = None) -> dict[str, Any]:
    """Return a receipt as read from its file."""
    asking = model(name="m", owner="localllm", form=form)
    return json.loads(json.dumps(remote_receipts.make(asking, asked, OPTIONS, n, result)))


def test_a_remote_receipt_holds_endpoint_prompt_and_options():
    receipt = make_receipt(CHAT, 2, {"text": "a", "model": "left out"}, Form(regex="a+"))
    assert receipt["model"] == {"endpoint": "http://a/v1", "name": "m", "server": "localllm"}
    assert receipt["prompt"] == {"asked": CHAT, "sha256": sha256(json.dumps(CHAT).encode()).hexdigest()}
    options = receipt["options"]
    assert (options["n"], options["beams"], options["speculate"], options["max_tokens"]) == (2, 0, "off", 7)
    assert receipt["result"] == {"text": "a"} and remote_receipts.is_remote(receipt)
    assert remote_receipts.form_of(receipt) == Form(None, None, "a+")
    assert remote_receipts.form_of(make_receipt(CHAT, 1, {}, Form({"type": "null"}, "g"))) == Form(
        {"type": "null"}, "g", None
    )
    again = options_of(receipt)
    assert (again.max_tokens, again.stop, again.sampling.temperature, again.sampling.seed) == (7, ["x"], 0.5, 3)


def test_a_constraint_is_recorded_as_it_was_given():
    """Do not record it as compiled for local models."""
    asking = model(name="m", form=Form(regex="a+"))
    options = replace(OPTIONS, stop=(), constraint=constraint_of(regex="a+"))
    receipt = remote_receipts.make(asking, CHAT, options, 1, {})
    assert receipt["options"]["constraint"] is None and receipt["options"]["form"]["regex"] == "a+"


def test_an_unset_seed_is_drawn():
    """Leave all other unset options to the server."""
    assert remote_receipts.fully_specified(OPTIONS) is OPTIONS
    drawn = [remote_receipts.fully_specified(GenerationOptions(7)) for _ in range(20)]
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
    assert [answer["text"] for answer in answers_of(result)] == ([*"ab"] if n > 1 else ["ab"])
    ((path, body),) = asking.endpoint.asked
    assert path == ("/completions" if asked == "Once" else "/chat/completions")
    assert body["prompt" if asked == "Once" else "messages"] == asked
    assert (body["max_tokens"], body["stop"], body["seed"], body["temperature"]) == (7, ["x"], 3, 0.5)
    assert (body.get("n"), body.get("stream")) == ((2, None) if n > 1 else (None, True))
    assert difference(result, result) is None
    other = {"answers": [*answers_of(result)[:-1], {"text": "z", "tokens": []}]}
    assert difference(result, other) == (
        "answer 2, token 1, character 1: it was 'b' and is now 'z'" if n > 1 else
        "token 1, character 1: it was 'ab' and is now 'z'"
    )  # fmt: skip
