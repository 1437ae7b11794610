"""Test localllm serve with Ollama's clients: the package ollama, and the requests of its documentation."""

import json

import pytest
from served import Reply, Served, prompt_of_latest, scripted, serving
from tiny_model import write_tiny_model

from localllm.errors import UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.server.fields import RequestBody
from localllm.server.model_pool import NameOptions
from localllm.server.ollama_chat import parse_request
from localllm.server.ollama_models import format_count
from tests.integration.test_serve import GUIDE
from tests.integration.test_serve_clients import SCRIPT, THINKING
from tests.integration.test_serve_tools import ROME, TOOLS
from tests.unit.generation.embedding.test_embedder import write_wordpiece_model
from tests.unit.generation.test_infill import write_fim_model

HELLO = [{"role": "user", "content": "hello"}]
TIMES = ("total_duration", "load_duration", "prompt_eval_duration", "eval_duration")


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models")
    path = write_tiny_model(folder / "tiny.gguf", chat_template=THINKING)
    fim = str(write_fim_model(folder))
    with serving({"scripted": lambda: scripted(str(path), SCRIPT), "guide": GUIDE, "fim": fim}) as server:
        yield server


def lines(reply: Reply) -> list[dict]:
    assert reply.status == 200 and reply.headers["content-type"].startswith("application/x-ndjson")
    return [json.loads(line) for line in reply.body.decode().splitlines()]


# ---- answers


def test_chat_streams_lines_unless_stream_is_false(served: Served):
    body = {"model": "scripted", "messages": HELLO}
    parts = lines(served.post("/api/chat", body))
    assert "".join(part["message"]["content"] for part in parts) == "Hello there."
    assert [part["done"] for part in parts] == [False] * (len(parts) - 1) + [True]
    last, whole = parts[-1], served.post("/api/chat", {**body, "stream": False}).json
    assert last["done_reason"] == "stop" and last["message"] == {"role": "assistant", "content": ""}
    assert whole["message"] == {"role": "assistant", "content": "Hello there."} and whole["model"] == "scripted"
    assert whole["eval_count"] == last["eval_count"] == 10 and whole["prompt_eval_count"] > 0
    assert all(isinstance(whole[name], int) and whole[name] >= 0 for name in TIMES)


def test_generate_uses_the_template_unless_raw(served: Served):
    whole = served.post("/api/generate", {"model": "scripted:latest", "prompt": "hello", "stream": False}).json
    assert whole["response"] == "Hello there." and whole["done_reason"] == "stop"
    assert "<|im_start|>user\nhello" in prompt_of_latest(served, "scripted")
    served.post("/api/generate", {"model": "scripted", "prompt": "hello", "system": "Be kind.", "stream": False})
    assert "Be kind." in prompt_of_latest(served, "scripted")
    raw = {"model": "guide", "prompt": "GGUF is", "raw": True, "options": {"num_predict": 4, "temperature": 0}}
    parts = lines(served.post("/api/generate", raw))
    completion = {"model": "guide", "prompt": "GGUF is", "max_tokens": 4, "temperature": 0}
    text = served.post("/v1/completions", completion).json["choices"][0]["text"]
    assert "".join(part["response"] for part in parts) == text and parts[-1]["done_reason"] == "length"


def test_context_continues_the_conversation(served: Served):
    first = served.post("/api/generate", {"model": "scripted", "prompt": "hello", "stream": False}).json
    again = {"model": "scripted", "prompt": "think", "context": first["context"], "stream": False}
    assert served.post("/api/generate", again).json["response"] == "It is four."
    read = prompt_of_latest(served, "scripted")
    assert read.index("hello") < read.index("Hello there.") < read.index("think")
    assert served.post("/api/generate", {**again, "context": ["x"]}).status == 400


def test_reasoning_is_returned_apart_from_the_answer(served: Served):
    body = {"model": "scripted", "messages": [{"role": "user", "content": "think"}]}
    message = served.post("/api/chat", {**body, "stream": False, "think": True}).json["message"]
    assert message == {"role": "assistant", "content": "It is four.", "thinking": "Hm, well."}
    parts = lines(served.post("/api/chat", body))
    assert "".join(part["message"].get("thinking", "") for part in parts) == "Hm, well."
    assert served.post("/api/chat", {**body, "think": 3}).status == 400


def test_suffix_fills_the_middle(served: Served):
    options = {"num_predict": 6, "temperature": 0}
    body = {"model": "fim", "prompt": "hello", "suffix": "world", "stream": False, "options": options}
    other = {"model": "fim", "prompt": "hello", "suffix": "world", "max_tokens": 6, "temperature": 0}
    text = served.post("/v1/completions", other).json["choices"][0]["text"]
    assert served.post("/api/generate", body).json["response"] == text


def test_format_is_a_schema_or_json(served: Served):
    schema = {"type": "object", "properties": {"n": {"type": "integer", "maximum": 9}}, "required": ["n"]}
    body = {"model": "guide", "messages": HELLO, "stream": False, "format": schema, "options": {"seed": 3}}
    assert isinstance(json.loads(served.post("/api/chat", body).json["message"]["content"])["n"], int)
    assert served.post("/api/chat", {**body, "format": "xml"}).status == 400
    assert parse_request(RequestBody({"format": "json"}), ["a"]).options.constraint is not None


def test_options_have_the_names_of_ollama():
    options = {"num_predict": -1, "top_k": 3, "typical_p": 0.5, "stop": ["a"], "num_ctx": 4096, "magic": 1}
    body = RequestBody({"model": "a:latest", "options": options})
    parsed = parse_request(body, ["x"])
    assert parsed.model == "a" and parsed.options.max_tokens is None and parsed.options.stop == ("a",)
    assert (parsed.options.sampling.top_k, parsed.options.sampling.typical) == (3, 0.5)
    assert body.ignored == ["num_ctx", "magic"]
    with pytest.raises(UsageError, match=r"options\.num_predict must be an integer"):
        parse_request(RequestBody({"options": {"num_predict": "x"}}), ["x"])


def test_chat_returns_logprobs_on_request(served: Served):
    body = {"model": "scripted", "messages": HELLO, "stream": False, "logprobs": True, "top_logprobs": 2}
    logprobs = served.post("/api/chat", body).json["logprobs"]
    assert len(logprobs) == 10 and len(logprobs[0]["top_logprobs"]) == 2


# ---- models


def test_models_are_listed_and_described(served: Served):
    models = served.get("/api/tags").json["models"]
    assert [model["name"] for model in models] == ["guide", "fim"]  # scripted has no file
    assert models[0]["details"]["format"] == "gguf" and models[0]["size"] > 0 and len(models[0]["digest"]) == 64
    shown = served.post("/api/show", {"model": "fim"}).json
    assert {"completion", "insert"} <= {*shown["capabilities"]} and "general.architecture" in shown["model_info"]
    assert "insert" not in served.post("/api/show", {"name": "guide"}).json["capabilities"]
    assert served.post("/api/show", {"model": "nobody"}).json["error"].startswith("model 'nobody' not found")
    assert served.get("/api/version").json["version"].count(".") == 2


def test_show_returns_arrays_only_if_verbose(served: Served):
    brief, whole = (served.post("/api/show", {"model": "fim", "verbose": verbose}).json for verbose in (False, True))
    with GGUFFile.open(served.service.pool.entries["fim"].path) as file:
        tokens, count = file.metadata["tokenizer.ggml.tokens"], len(file.tensors)
        shape = [*reversed(file.tensors["token_embd.weight"].shape)]
    assert brief["model_info"]["tokenizer.ggml.tokens"] == [] and "tensors" not in brief
    assert whole["model_info"]["tokenizer.ggml.tokens"] == tokens and len(whole["tensors"]) == count
    assert {"name": "token_embd.weight", "type": "F32", "shape": shape} in whole["tensors"]
    assert brief["model_info"].keys() == whole["model_info"].keys()
    same = ("template", "details", "capabilities", "modified_at", "modelfile", "parameters")
    assert [brief[key] for key in same] == [whole[key] for key in same]


@pytest.mark.parametrize("is_streaming", [False, True])
def test_a_raw_answer_has_no_context(served: Served, is_streaming: bool):
    for is_raw in (False, True):
        body = {"model": "scripted", "prompt": "think", "raw": is_raw, "options": {"num_predict": 2}}
        last = json.loads(served.post("/api/generate", {**body, "stream": is_streaming}).body.splitlines()[-1])
        assert last["done"] and ("context" in last) is not is_raw
    for more in ({"system": "Be short."}, {"context": [1]}):
        reply = served.post("/api/generate", {"model": "scripted", "prompt": "x", "raw": True, **more})
        assert reply.status == 400 and reply.json["error"].startswith("raw cannot be combined with system or context")


def test_empty_requests_load_and_unload_models(served: Served):
    assert served.post("/api/generate", {"model": "guide"}).json["done_reason"] == "load"
    (running,) = [model for model in served.get("/api/ps").json["models"] if model["name"] == "guide"]
    assert running["context_length"] > 0 and running["size_vram"] == 0 and running["expires_at"] > "2100"
    gone = served.post("/api/chat", {"model": "guide", "messages": [], "keep_alive": 0}).json
    assert gone["done_reason"] == "unload" and gone["message"]["content"] == ""


def test_a_pull_of_a_local_model_succeeds(served: Served):
    for name in ("guide", "guide:latest"):
        assert served.post("/api/pull", {"model": name, "stream": False}).json == {"status": "success"}
        lines = served.post("/api/pull", {"name": name}).body.splitlines()
        assert [json.loads(line)["status"] for line in lines] == ["pulling manifest", "success"]
    assert served.post("/api/pull", {}).status == 400


@pytest.mark.parametrize(("method", "path", "way"), [
    ("POST", "push", "this server does not publish models"), ("POST", "blobs/sha256:0", "this server takes no files"),
])  # fmt: skip
def test_requests_that_send_files_are_refused(served: Served, method: str, path: str, way: str):
    reply = served.ask(method, f"/api/{path}", b'{"model": "other"}', {"Content-Type": "application/json"})
    assert reply.status == 501 and reply.json["error"].startswith(way)


def test_models_added_after_the_start_are_served(tmp_path):
    path, added = str(write_tiny_model(tmp_path / "tiny.gguf")), list[tuple]()
    find = lambda names, wanted="": [each for each in added if each[0] not in names and not wanted]  # noqa: E731
    with serving({"first": path}) as served:
        served.service.pool.find = find
        assert served.post("/api/show", {"model": "second"}).status == 200, "a single model has any name"
        added.append(("second", str(write_tiny_model(tmp_path / "second.gguf", seed=1)), NameOptions()))
        assert served.post("/api/pull", {"model": "second", "stream": False}).status == 200
        assert served.chat("Hi", model="second", max_tokens=1).json["model"] == "second"
        assert served.chat("Hi", model="third").status == 404
        added.append(("third", path, NameOptions()))
        for address, key, name in (("/api/tags", "models", "name"), ("/v1/models", "data", "id")):
            assert [model[name] for model in served.get(address).json[key]] == ["first", "second", "third"]
        assert served.chat("Hi", model="third", max_tokens=1).json["model"] == "third"


def test_removed_models_are_no_longer_listed_but_the_last_one_stays(tmp_path):
    paths = {name: write_tiny_model(tmp_path / f"{name}.gguf", seed=seed) for seed, name in enumerate("abcd")}
    gone = list[tuple]()
    with serving({name: str(path) for name, path in paths.items()}) as served:
        served.service.pool.find = lambda names, wanted="": [each for each in gone if each[0] in names and not wanted]
        assert served.chat("Hi", model="b", max_tokens=1).status == 200
        paths["b"].unlink()
        gone.append(("c", "", NameOptions()))
        assert [model["id"] for model in served.get("/v1/models").json["data"]] == ["a", "d"]
        assert served.chat("Hi", model="b").status == 404
        paths["a"].unlink()
        paths["d"].unlink()
        assert [model["id"] for model in served.get("/v1/models").json["data"]] == ["d"]


def test_a_name_that_means_another_file_is_opened_anew(tmp_path):
    paths = [str(write_tiny_model(tmp_path / f"{name}.gguf", seed=seed)) for seed, name in enumerate("abc")]
    with serving({"a": paths[0], "b": paths[1]}) as served:
        assert served.chat("Hi", model="a", max_tokens=1).status == 200
        pool = served.service.pool
        pool.find = lambda known, wanted="": [("a", paths[2], NameOptions())] * (known["a"] == paths[0])
        assert {model["name"] for model in served.get("/api/tags").json["models"]} == {"a", "b"}
        assert served.chat("Hi", model="a", max_tokens=1).status == 200
        assert pool.entries["a"].path == paths[2]
        open_files = [entry.shared.path for entry in pool._by_file.values() if entry.worker]
        assert open_files == [paths[2]], "the earlier file is unloaded"


def test_requests_of_browsers_must_be_json(served: Served):
    data = json.dumps({"model": "scripted", "messages": HELLO, "stream": False}).encode()
    form = {"Content-Type": "application/x-www-form-urlencoded"}
    assert served.ask("POST", "/api/chat", data, form).status == 200  # curl -d
    assert served.ask("POST", "/api/chat", data, {**form, "Sec-Fetch-Site": "none"}).status == 415
    assert served.ask("POST", "/v1/chat/completions", data, form).status == 415


def test_counts_are_formatted_as_ollama_does():
    assert [format_count(n) for n in (999, 12_500, 494_030_000, 1_540_000_000)] == ["999", "12.50K", "494.03M", "1.5B"]


# ---- the package


def test_the_ollama_package_chats_streams_and_calls_tools(served: Served):
    ollama = pytest.importorskip("ollama", reason="needs the package ollama, of the extra dev")
    client = ollama.Client(host=served.url)
    assert [model.model for model in client.list().models] == ["guide", "fim"]
    assert client.chat("scripted", HELLO).message.content == "Hello there."
    chunks = client.chat("scripted", HELLO, stream=True)
    assert "".join(chunk.message.content for chunk in chunks) == "Hello there."

    asked = client.chat("scripted", [{"role": "user", "content": "call"}], tools=TOOLS)
    assert [(call.function.name, call.function.arguments) for call in asked.message.tool_calls] == [ROME, ("now", {})]
    results = [{"role": "tool", "tool_name": call.function.name, "content": "sun"} for call in asked.message.tool_calls]
    turns = [*HELLO, asked.message, *results, {"role": "user", "content": "sun"}]
    assert client.chat("scripted", turns, tools=TOOLS).message.content == "It is sunny."
    assert client.generate("scripted", "hello").response == "Hello there."
    with pytest.raises(ollama.ResponseError, match="not found"):
        client.chat("nobody", HELLO)


def test_the_ollama_package_embeds(tmp_path):
    ollama = pytest.importorskip("ollama", reason="needs the package ollama, of the extra dev")
    with serving({"bert": str(write_wordpiece_model("bert", tmp_path / "bert.gguf"))}) as served:
        client = ollama.Client(host=served.url)
        body = {"model": "bert", "input": ["the cat", "words"]}
        expected = [item["embedding"] for item in served.post("/v1/embeddings", body).json["data"]]
        result = client.embed("bert", body["input"])
        assert result.embeddings == expected and result.prompt_eval_count > 2
        assert client.embeddings("bert", "the cat").embedding == pytest.approx(expected[0], abs=1e-4)
        assert client.show("bert").capabilities == ["embedding"]
        assert len(client.embed("bert", ["cat " * 2000]).embeddings) == 1  # cut
        with pytest.raises(ollama.ResponseError, match="truncate"):
            client.embed("bert", ["cat " * 2000], truncate=False)
