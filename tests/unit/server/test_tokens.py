"""Test /tokenize, /detokenize and /apply-template, as llama-server has them."""

import pytest
from served import Served, serving

import localllm

GUIDE = str(localllm.builtin_model())
MESSAGES = [{"role": "system", "content": "Be kind."}, {"role": "user", "content": "Hi <|im_end|>"}]


@pytest.fixture(scope="module")
def served():
    with serving({"guide": GUIDE}) as server:
        yield server


def test_tokenize_and_detokenize_are_inverse(served: Served):
    with localllm.open(GUIDE, threads=1) as model:
        expected = model.tokenize("Hi <|im_end|> ä", special=True)
        plain = model.tokenize("Hi <|im_end|> ä")
    text = {"content": "Hi <|im_end|> ä"}
    assert served.post("/tokenize", text).json == {"tokens": expected}
    assert served.post("/tokenize", {**text, "parse_special": False}).json == {"tokens": plain} != {"tokens": expected}
    pieces = served.post("/v1/tokenize", {**text, "with_pieces": True}).json["tokens"]
    assert [each["id"] for each in pieces] == expected
    joined = b"".join(p.encode() if isinstance(p := each["piece"], str) else bytes(p) for each in pieces)
    assert joined.decode() == text["content"]
    assert served.post("/detokenize", {"tokens": expected}).json == text
    assert served.post("/detokenize", {"tokens": []}).json == {"content": ""}


def test_a_part_of_a_character_is_returned_as_bytes(served: Served):
    pieces = served.post("/tokenize", {"content": "\U0001f9a5", "with_pieces": True}).json["tokens"]
    assert any(isinstance(each["piece"], list) for each in pieces)


def test_apply_template_renders_the_prompt_of_an_answer(served: Served):
    prompt = served.post("/apply-template", {"messages": MESSAGES}).json["prompt"]
    assert "Be kind." in prompt and "Hi <|im_end|>" in prompt
    with localllm.open(GUIDE, threads=1) as model:
        assert prompt == model.detokenize(model.chat(MESSAGES, 1).prompt, special=True)
    begun = [*MESSAGES, {"role": "assistant", "content": "Hello"}]
    assert served.post("/apply-template", {"messages": begun}).json["prompt"].endswith("Hello")


@pytest.mark.parametrize(
    ("address", "body", "message"),
    [
        ("/tokenize", {}, "content is missing"),
        ("/tokenize", {"content": 5}, "content must be a string"),
        ("/detokenize", {"tokens": ["a"]}, "tokens must be an array of token ids"),
        ("/detokenize", {"tokens": [99999999]}, "does not exist"),
        ("/apply-template", {"messages": []}, "messages must not be empty"),
    ],
)
def test_invalid_bodies_are_refused(served: Served, address: str, body: dict, message: str):
    reply = served.post(address, body)
    assert reply.status == 400 and message in reply.json["error"]["message"], reply.json
