"""Test localllm serve: embeddings and reranking."""

import numpy as np
import pytest
from served import Served, serving

import localllm
from tests.integration.test_serve import GUIDE
from tests.unit.generation.embedding.test_embedder import write_wordpiece_model

TEXTS = ["the cat", "a dog and the cat", "words"]


@pytest.fixture(scope="module")
def paths(tmp_path_factory):
    folder = tmp_path_factory.mktemp("texts")
    names = {"bert": "bert", "ranker": "bert_rank"}
    return {name: str(write_wordpiece_model(model, folder / f"{name}.gguf")) for name, model in names.items()}


@pytest.fixture(scope="module")
def served(paths):
    with serving({**paths, "guide": GUIDE}) as server:
        yield server


def test_embeddings_equal_those_of_the_model(served: Served, paths):
    with localllm.open(paths["bert"], threads=1) as model:
        expected = model.embed(TEXTS)
    body = {"model": "bert", "input": TEXTS}
    reply = served.post("/v1/embeddings", body).json
    np.testing.assert_allclose([each["embedding"] for each in reply["data"]], expected, atol=1e-4)
    assert [each["index"] for each in reply["data"]] == [0, 1, 2] and reply["usage"]["prompt_tokens"] > 6
    assert len(served.post("/v1/embeddings", {**body, "dimensions": 4}).json["data"][0]["embedding"]) == 4


def test_embeddings_work_with_the_openai_package(served: Served, paths):
    openai = pytest.importorskip("openai", reason="needs the package openai, of the extra dev")
    with openai.OpenAI(base_url=f"{served.url}/v1", api_key="none", max_retries=0) as client:
        packed = client.embeddings.create(model="bert", input=TEXTS)  # asks for base64
    plain = served.post("/v1/embeddings", {"model": "bert", "input": TEXTS}).json
    np.testing.assert_allclose(
        [each.embedding for each in packed.data], [each["embedding"] for each in plain["data"]], atol=1e-6
    )


def test_rerank_sorts_documents_by_the_scores_of_the_model(served: Served, paths):
    with localllm.open(paths["ranker"], threads=1) as model:
        scores = model.rerank("cat", TEXTS)
    body = {"model": "ranker", "query": "cat", "documents": [TEXTS[0], {"text": TEXTS[1]}, TEXTS[2]]}
    reply = served.post("/v1/rerank", {**body, "top_n": 2, "return_documents": True}).json
    order = np.argsort(-scores)[:2]
    assert [each["index"] for each in reply["results"]] == order.tolist()
    np.testing.assert_allclose([each["relevance_score"] for each in reply["results"]], scores[order], atol=1e-3)
    assert reply["results"][0]["document"] == {"text": TEXTS[order[0]]}


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": "bert", "input": []}),
        ("/v1/embeddings", {"model": "bert", "input": [1, None]}),
        ("/v1/embeddings", {"model": "bert", "input": "x", "dimensions": 99999}),
        ("/v1/embeddings", {"model": "bert", "input": "cat " * 500}),
        ("/v1/embeddings", {"model": "bert", "input": "x", "encoding_format": "hex"}),
        ("/v1/embeddings", {"model": "guide", "input": "x"}),
        ("/v1/rerank", {"model": "guide", "query": "x", "documents": ["y"]}),
        ("/v1/rerank", {"model": "ranker", "query": "x", "documents": []}),
        ("/v1/rerank", {"model": "ranker", "documents": ["x"]}),
        ("/v1/chat/completions", {"model": "bert", "messages": [{"role": "user", "content": "the cat"}]}),
    ],
)
def test_invalid_bodies_are_refused(served: Served, path: str, body: dict):
    reply = served.post(path, body)
    assert reply.status == 400 and reply.json["error"]["message"], reply.json
    assert served.get("/health").status == 200


def test_long_texts_are_truncated_only_on_request(served: Served):
    """Name the request's field in the message, not an option of a command."""
    body = {"model": "bert", "input": "cat " * 500}
    refused = served.post("/v1/embeddings", body).json["error"]
    assert refused["code"] == "context_length_exceeded" and "set truncate to true" in refused["message"]
    assert "--" not in refused["message"]
    assert len(served.post("/v1/embeddings", {**body, "truncate": True}).json["data"]) == 1
    body = {"model": "ranker", "query": "cat", "documents": ["cat " * 5000]}
    assert "set truncate to true" in served.post("/v1/rerank", body).json["error"]["message"]
    assert len(served.post("/v1/rerank", {**body, "truncate": True}).json["results"]) == 1


@pytest.mark.parametrize(("input", "reason"), [
    ([], "input must not be empty"), ([[]], "array of token ids"), (["a", 1], "an array of strings"),
    ([1, -1], "array of token ids"), ([[1], 2], "or an array of these"),
    ([99999999], "from 0 to"), (5, "an array of strings"),
    (None, "an array of strings"),
])  # fmt: skip
def test_invalid_inputs_are_refused(served: Served, input, reason):
    assert reason in served.post("/v1/embeddings", {"model": "bert", "input": input}).json["error"]["message"]


def test_token_ids_are_embedded_as_their_text(served: Served):
    """Accept ids with and without begin and end tokens."""
    model = {"model": "bert"}
    whole, inner = (
        served.post("/tokenize", {**model, "content": TEXTS[0], "add_special": special}).json["tokens"]
        for special in (True, False)
    )
    assert len(whole) > len(inner) > 0
    expected = served.post("/v1/embeddings", {**model, "input": TEXTS[0]}).json["data"][0]["embedding"]
    reply = served.post("/v1/embeddings", {**model, "input": [whole, inner]}).json
    np.testing.assert_allclose([each["embedding"] for each in reply["data"]], [expected, expected], atol=1e-6)
    assert len(served.post("/v1/embeddings", {**model, "input": inner}).json["data"]) == 1


def test_truncate_prompt_tokens_limits_each_text(served: Served):
    """Count the begin and end tokens as vLLM does."""
    body = {"model": "bert", "input": "cat " * 500}
    short = served.post("/v1/embeddings", {**body, "truncate_prompt_tokens": 4}).json
    two = served.post("/v1/embeddings", {**body, "input": "cat cat"}).json
    np.testing.assert_allclose(short["data"][0]["embedding"], two["data"][0]["embedding"], atol=1e-6)
    assert short["usage"]["prompt_tokens"] == 4 == two["usage"]["prompt_tokens"]
    assert len(served.post("/v1/embeddings", {**body, "truncate_prompt_tokens": -1}).json["data"]) == 1
    assert served.post("/v1/embeddings", {**body, "truncate_prompt_tokens": -2}).status == 400


def test_errors_name_the_index_and_field_of_the_text(served: Served):
    body = {"model": "bert", "input": ["cat", "cat " * 500]}
    message = served.post("/v1/embeddings", body).json["error"]["message"]
    assert message.startswith("input[1] has ") and message.endswith("shorten it or set truncate to true")
    error = served.post("/v1/embeddings", {**body, "input": "cat", "dimensions": 10000}).json["error"]
    assert error["param"] == "dimensions" and error["message"].startswith("dimensions must be ")
    assert served.post("/v1/embeddings", {**body, "input": "cat", "dimensions": 4.0}).status == 200
    body = {"model": "ranker", "query": "cat", "documents": ["cat", "cat " * 5000]}
    assert served.post("/v1/rerank", body).json["error"]["message"].startswith("documents[1] has ")
