"""Test what every option passes on: each command runs with a stand-in for the function it calls."""

import re
import sys
from contextlib import nullcontext
from typing import Any

import numpy as np
import project
import pytest
from invoked import Opened, Told, flat, invoke, told_by

from localllm import api
from localllm.cli import map_command, one_shot
from localllm.cli import open_model as opening
from localllm.cli.app import make_context
from localllm.cli.commands import chat, embed, quantize
from localllm.cli.options import one_shot as one_shot_options
from localllm.cli.registry import COMMANDS, list_params
from localllm.errors import UsageError
from localllm.generation.constraints.constraint import make_constraint
from localllm.generation.options import GenerationOptions
from localllm.generation.sampling.options import OPTIONS
from localllm.quantizing import plan as quantize_plan
from localllm.services.records import map as map_service
from localllm.services.records import map_ray
from localllm.services.remote import mapping

# ---- how a model is opened

LINES = {
    "-t 3 -c 77 --kv-type q8_0 --device cpu -ngl 5": {
        "threads": 3, "context": 77, "kv_type": "q8_0", "backend": "cpu", "gpu_layers": 5,
    },
    "-ctk q8_0 -ctv f32 -ngl -1": {"kv_type": "k=q8_0,v=f32", "gpu_layers": "all"},
    "-ctv q4_0 -ngl auto -t -1 -c 0": {"kv_type": "k=f16,v=q4_0"},
    "--memory 8G": {"memory": 8 * 10**9},
    "--mmproj eye.gguf --chat-template phi3": {"mmproj": "eye.gguf", "chat_template": "phi3"},
}  # fmt: skip
NO_CACHE, PAN = {"--no-cache": {"cache": False}}, {"--pan-and-scan": {"pan_and_scan": True}}
OPENS = {"run": LINES | NO_CACHE | PAN, "chat": LINES | NO_CACHE | PAN, "serve": LINES | NO_CACHE, "map": LINES}
USUAL = {"threads": None, "context": None, "kv_type": "f16", "backend": "auto", "observer": None, "progress": None,
         "chat_template": None, "cache": True, "gpu_layers": "auto", "on_upload": None, "rope": None, "mmproj": None,
         "pan_and_scan": False, "lora": [], "control_vectors": [], "control_layers": None,
         "memory": None}  # fmt: skip


@pytest.mark.parametrize("name", OPENS)
def test_engine_options_reach_open_with_options(name: str, tiny: str, monkeypatch):
    from localllm.server import run as server

    monkeypatch.setattr(server, "run_server", lambda setup, *arguments: setup.open_model(setup.paths["tiny"]))
    monkeypatch.setattr("os.path.abspath", lambda path: path)
    words = {"run": ["-p", "Hi"], "map": ["-p", "{line}"]}.get(name, [])
    for line, expected in {"": {}, **OPENS[name]}.items():
        arguments = told_by((api, "open_with_options"), name, tiny, *words, *line.split(), stdin=b"Hi\n")
        engine = arguments.pop("options")
        assert arguments | engine == USUAL | {"path": tiny} | expected, line


# ---- how an answer is made

# Every option of sampling that is a number, with one that is valid.
NUMBERS_TOLD: Told = {
    name: option.clamp(place + 3 if option.kind is int else (place + 30) / 100)
    for place, (name, option) in enumerate(OPTIONS.items())
    if option.range
}
NUMBERS = " ".join(f"{OPTIONS[name].flags.split()[-1]} {value}" for name, value in NUMBERS_TOLD.items())
# Between them all options of an answer, no two of one line with the same value unless they are numbers of sampling.
ANSWERS: dict[str, Told] = {
    "-n 7 -r a -r b --think off --think-budget 9 --template-var a=1 --template-var {\"b\":[2]}": {
        "max_tokens": 7, "stop": ["a", "b"], "think": "off", "think_budget": 9,
        "template_variables": {"a": 1, "b": [2]},
    },
    r"-n -1 -e -r \t --ban x --ban \x41 --think-budget -1 -s -1 --dry-sequence-breaker none": {
        "stop": ["\t"], "ban": ["x", "A"], "dry_sequence_breakers": [],
    },
    NUMBERS: NUMBERS_TOLD,
    "--dry-sequence-breaker x --dry-sequence-breaker y -l 3+1.5 -l 4-inf --ignore-eos --samplers top_k;temperature": {
        "dry_sequence_breakers": ["x", "y"], "logit_bias": {3: 1.5, 4: -np.inf}, "ignore_eos": True,
        "samplers": ["top_k", "temperature"],
    },
    "--mirostat 1 --sampling-seq pt": {"mirostat": 1, "samplers": ["top_p", "temperature"]},
}  # fmt: skip
ONE_ANSWER: dict[str, Told] = {
    "--speculate off --on-overflow shift --keep 5": {"speculate": "off", "on_overflow": "shift", "keep": 5},
    "--on-overflow drop-turns --keep 5": {"on_overflow": "drop-turns"},
    "--keep 5": {},
}
ABOUT_ANSWERS = ("Sampling", "More sampling options", "Generation", "Thinking and")


@pytest.mark.parametrize("name", ["run", "chat", "map"])
def test_generation_options_reach_the_generation(name: str, tiny: str, monkeypatch):
    monkeypatch.setattr(opening, "open_model", lambda path, *more, **named: Opened(path))
    places = {"run": (one_shot, "start_answer"), "chat": (chat, "answer_once"), "map": (map_command, "open_mapping")}
    words = {"run": ["-p", "Hi"], "map": ["-p", "{line}"]}.get(name, [])

    def chosen(*more: str) -> Told:
        arguments = told_by(places[name], name, tiny, *words, *more, stdin=b"Hi\n")
        return (
            arguments["job"]["options"] if name == "map" else arguments["generation" if name == "chat" else "options"]
        )

    cases = ANSWERS | ({} if name == "map" else ONE_ANSWER)
    for line, expected in {"": {}, **cases}.items():
        arguments, usual = chosen(*line.split()), flat(GenerationOptions())
        assert arguments.pop("sampling") | arguments == usual.pop("sampling") | usual | expected, line
    typed = {word for line in cases for word in line.split() if word.startswith("-")}
    for param in list_params(name):
        assert not (param.rich_help_panel or "").startswith(ABOUT_ANSWERS) or typed & {*param.names}, param.names


@pytest.mark.parametrize(("line", "constraint"), [
    ("--regex [ab]c", {"regex": "[ab]c"}), ("--grammar root::=\"x\"", {"grammar": 'root::="x"'}),
    ('-j {"type":"array"}', {"schema": '{"type":"array"}'}),
    ('-j {"type":"array"} --json-whitespace', {"schema": '{"type":"array"}', "json_whitespace": True}),
])  # fmt: skip
def test_constraint_options_reach_the_generation(line: str, constraint: Told, tiny: str, monkeypatch):
    monkeypatch.setattr(opening, "open_model", lambda path, *more, **named: Opened(path))
    arguments = told_by((one_shot, "start_answer"), "run", tiny, "-p", "Hi", *line.split())
    assert arguments["options"]["constraint"] == flat(make_constraint(**constraint))


def test_run_does_not_write_its_receipt_over_an_input(tiny: str, monkeypatch, tmp_path):
    """Pass the paths that were read to the receipt's writer."""
    other = project.__file__
    prepared = told_by(
        (one_shot, "prepare_options"), "run", tiny, "-f", __file__, "-bf", other, "--receipt", tmp_path / "r", "--force"
    )
    assert (prepared["path"], prepared["inputs"], prepared["force"]) == (str(tmp_path / "r"), [__file__, other], True)


# ---- many prompts

JOB = {"n": 1, "precise": True, "context": None, "threads": None, "kv_type": "f16", "chat_template": None,
       "mmproj": None}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "job", "more"),
    [
        ("", {}, {}),
        ("--n 3 --fast -c 77 -t 2 --kv-type q8_0 --chat-template phi3 --mmproj eye.gguf",
         {"n": 3, "precise": False, "context": 77, "threads": 2, "kv_type": "q8_0", "chat_template": "phi3",
          "mmproj": "eye.gguf"}, {}),
        ("--raw", {}, {"warns": False}),
        ("--ray here", {}, {"ray": "here"}),
    ],
)  # fmt: skip
def test_map_options_reach_the_job(line: str, job: Told, more: Told, tiny: str, monkeypatch, tmp_path):
    (tmp_path / "in.txt").write_text("long line\nHi\n")
    monkeypatch.setattr("os.path.abspath", lambda path: path)
    arguments = told_by((map_command, "open_mapping"), "map", tiny, tmp_path / "in.txt", "-p", "{line}", *line.split())
    assert {name: arguments["job"][name] for name in JOB} == JOB | job and arguments["job"]["path"] == tiny
    assert [record["input"] for record in arguments["records"]] == ["long line", "Hi"]
    assert {name: arguments[name] for name in ("ray", "warns", "remote")} == {
        "ray": None,
        "warns": True,
        "remote": None,
    } | more


@pytest.mark.parametrize("line", ["", "--as-finished --shortest-first"])
def test_map_orders_answers_as_asked(line: str, tiny: str, monkeypatch, tmp_path):
    (tmp_path / "in.txt").write_text("a long line\nHi\n")
    monkeypatch.setattr(map_command, "open_mapping", lambda *arguments: nullcontext())
    passed = told_by((map_command, "write_answers"), "map", tiny, tmp_path / "in.txt", "-p", "{line}", *line.split())
    assert [record["input"] for record in passed["records"]] == (
        ["Hi", "a long line"] if line else ["a long line", "Hi"]
    )
    assert passed["as_finished"] == bool(line)


# ---- a server instead of a model

SEEING = {"mmproj": None, "pan_and_scan": False, "chat_template": None}
ELSEWHERE = {"ray": False, "fast": False, "chat_template": None, "mmproj": None}


@pytest.mark.parametrize(
    ("line", "model", "refused"),
    [
        ("run -p Hi", None, SEEING), ("run m -p Hi --pan-and-scan", "m", SEEING | {"pan_and_scan": True}),
        ("run -p Hi --mmproj eye --chat-template phi3", None, SEEING | {"mmproj": "eye", "chat_template": "phi3"}),
        ("chat", None, SEEING), ("chat m --mmproj eye", "m", SEEING | {"mmproj": "eye"}),
        ("chat --pan-and-scan --chat-template phi3", None, SEEING | {"pan_and_scan": True, "chat_template": "phi3"}),
        ("map -p {line}", None, ELSEWHERE), ("map m -p {line} --fast", "m", ELSEWHERE | {"fast": True}),
        ("map -p {line} --ray --mmproj eye", None, ELSEWHERE | {"ray": True, "mmproj": "eye"}),
        ("map -p {line} --chat-template phi3", None, ELSEWHERE | {"chat_template": "phi3"}),
    ],
)  # fmt: skip
def test_endpoint_options_reach_the_endpoint(line: str, model: str | None, refused: Told):
    name, *words = line.split()
    arguments = told_by(
        ({"map": map_command, "chat": chat}.get(name, one_shot_options), "open_remote"),
        name,
        *words,
        "--endpoint",
        "http://x",
        stdin=b"Hi",
    )
    assert (arguments["model"], arguments["refused"], arguments["place"]["url"]) == (model, refused, "http://x/v1")


def test_map_passes_records_to_a_model_an_endpoint_or_ray(tiny: str, monkeypatch, tmp_path):
    """Read the only argument as the input if there is an endpoint."""
    path = tmp_path / "in"
    path.write_text("a\nb\n")
    monkeypatch.setattr(opening, "open_model", lambda path, *more, **named: Opened(path))
    monkeypatch.setattr(map_command, "open_remote", lambda place, model, *more, **named: [model])
    monkeypatch.chdir(tmp_path)
    here = told_by((map_service, "RecordMapping"), "map", tiny, path, "-p", "{line}")
    assert here["job"]["path"] == tiny and [record["input"] for record in here["records"]] == ["a", "b"]
    there = told_by((mapping, "RemoteMapping"), "map", "--endpoint", "http://x", path, "-p", "{line}", "--n", "3")
    assert (there["model"], there["n"], len(there["records"])) == ([None], 3, 2)
    there = told_by((mapping, "RemoteMapping"), "map", "--endpoint", "http://x", "in", "-p", "{line}", stdin=b"")
    assert (there["model"], len(there["records"])) == ([None], 2)
    there = told_by((mapping, "RemoteMapping"), "map", "--endpoint", "http://x", "m", path, "-p", "{line}")
    assert (there["model"], len(there["records"])) == (["m"], 2)
    for words, address in ((["--ray", "here"], "here"), (["--ray"], "")):
        ray = told_by((map_ray, "RayMapping"), "map", tiny, path, "-p", "{line}", *words)
        assert (ray["job"]["path"], len(ray["records"]), ray["address"]) == (tiny, 2, address)


# ---- vectors and scores

EMBED = {"dims": None, "normalize": True, "role": None, "overflow": "refuse", "max_tokens": None}


@pytest.mark.parametrize(
    ("line", "options", "engine", "more"),
    [
        ("", {}, {}, {}),
        ("--dims 5 --as query --overflow split --no-normalize",
         {"dims": 5, "normalize": False, "role": "query", "overflow": "split"}, {}, {}),
        ("-c 77 -t 3 --device cpu", {}, {"context": 77, "threads": 3, "backend": "cpu"}, {}),
        ("--pooling cls --field title", {}, {}, {"pooling": "cls", "field": "title"}),
        ("-o v.npy", {}, {}, {"output": "v.npy", "kind": "npy"}),
        ("-o v.npy --format plain", {}, {}, {"output": "v.npy", "kind": "plain"}),
        ("--image eye.png", {}, {}, {"has_images": True}),
    ],
)  # fmt: skip
def test_embed_options_reach_the_embedder(line: str, options: Told, engine: Told, more: Told, tiny: str):
    arguments = told_by((embed, "write_vectors"), "embed", tiny, *line.split(), stdin=b"a\nb\n")
    job = arguments["job"]
    assert job["options"] == EMBED | options and job["path"] == tiny
    assert {name: job["engine"][name] for name in ("context", "threads", "backend")} == {
        "context": None, "threads": None, "backend": "auto"} | engine  # fmt: skip
    passed = {"pooling": job["pooling"], "has_images": job["has_images"]} | {
        name: arguments[name] for name in ("field", "output", "kind")
    }
    assert passed == {"pooling": None, "has_images": False, "field": "text", "output": None, "kind": "jsonl"} | more


def test_near_options_reach_the_search(tiny: str):
    for line, top, stats in (("", 5, False), ("--top 2 --stats", 2, True)):
        arguments = told_by((embed, "show_nearest"), "embed", tiny, "--near", "x", *line.split(), stdin=b"a\nb\n")
        assert (arguments["query"], arguments["top"], arguments["stats"]) == ("x", top, stats)


# ---- what becomes of a file's weights, and of masked places

REQUEST = {"imatrix": None, "include": [], "exclude": [], "overrides": [],
           "edits": {"values": {}, "removed": [], "warnings": []}, "keep_split": False, "split": None,
           "allow_requantize": False, "strict": False, "texts": None}  # fmt: skip


@pytest.mark.parametrize(
    ("line", "request_", "options"),
    [
        ("Q8_0", {}, [False, "", "", False, []]),
        ("Q8_0 --imatrix i --include-weights a --include-weights b --exclude-weights c",
         {"imatrix": "i", "include": ["a", "b"], "exclude": ["c"]}, [False, "", "", False, []]),
        ("Q8_0 --keep-split --override-kv a=int:5 --token-embedding-type q5_0",
         {"keep_split": True, "overrides": [["a", 5]]}, [False, "", "Q5_0", False, []]),
        ("Q8_0 --allow-requantize --pure --output-tensor-type q6_k", {"allow_requantize": True},
         [True, "Q6_K", "", False, []]),
        ("Q8_0 --strict --leave-output-tensor --tensor-type attn=q5_0", {"strict": True},
         [False, "", "", True, [["attn", "Q5_0"]]]),
        ("Q8_0 --remove-metadata general.name --split-max-size 2M",
         {"edits": {"values": {}, "removed": ["general.name"], "warnings": []},
          "split": {"tensors": 0, "nbytes": 2_000_000, "empty_first": False}}, [False, "", "", False, []]),
        ("Q8_0 --split-max-tensors 7 --no-tensor-first-split",
         {"split": {"tensors": 7, "nbytes": 0, "empty_first": True}}, [False, "", "", False, []]),
        ("Q8_0 --calibrate", {"texts": []}, [False, "", "", False, []]),
        ("Q8_0 t u --calibrate", {"texts": ["t", "u"]}, [False, "", "", False, []]),
    ],
)  # fmt: skip
def test_quantize_options_reach_the_plan(line: str, request_: Told, options: list[Any], tiny: str, monkeypatch):
    monkeypatch.setattr("localllm.cli.terminal.output.handle_termination", lambda leave: None)
    monkeypatch.setattr("localllm.quantizing.quantize.require_valid_source", lambda source, overrides, edits: None)
    arguments = told_by((quantize_plan, "make_plan"), "quantize", tiny, *line.split())
    recipe, chosen = arguments["request"].pop("recipe"), arguments["request"].pop("options")
    patterns = [[pattern.pattern, name] for pattern, name in chosen[4]]
    assert (arguments["request"], [*chosen[:4], patterns]) == (REQUEST | request_, options)
    assert "Q8_0" in (recipe["name"] if isinstance(recipe, dict) else recipe)
    assert arguments["source"].path == tiny


@pytest.mark.parametrize(
    ("line", "threads", "force"), [("", None, False), ("5", 5, False), ("-t 3 --force", 3, True), ("5 -t 3", 3, False)]
)
def test_quantize_threads_and_force_reach_the_execution(
    line: str, threads: int | None, force: bool, tiny: str, monkeypatch, tmp_path
):
    monkeypatch.setattr("localllm.cli.terminal.output.handle_termination", lambda leave: None)
    out = str(tmp_path / "out")
    arguments = told_by((quantize, "write_files"), "quantize", tiny, out, "Q8_0", *line.split())
    assert (arguments["target"], arguments["threads"]) == (out, threads)
    arguments = told_by((quantize, "require_writable"), "quantize", tiny, out, "Q8_0", *line.split())
    assert (arguments["target"], arguments["threads"], arguments["force"]) == (out, threads, force)


def test_diffusion_options_reach_the_diffusion(tiny: str, monkeypatch):
    usual = {"steps": None, "epsilon": None, "block_length": None, "algorithm": None, "algorithm_temperature": None,
             "guidance": None, "has_noise": False, "visual": False}  # fmt: skip
    opened = Opened(tiny)
    opened.is_diffusion = True
    monkeypatch.setattr(opening, "open_model", lambda path, *more, **named: opened)
    for line, changed in {
        "": {}, "--diffusion-steps 9 --diffusion-eps 0.5 --diffusion-visual": {
            "steps": 9, "epsilon": 0.5, "visual": True},
        "--diffusion-block-length 32 --diffusion-algorithm 2 --diffusion-alg-temp 0.25": {
            "block_length": 32, "algorithm": 2, "algorithm_temperature": 0.25},
        "--diffusion-cfg-scale 1.5 --diffusion-add-gumbel-noise": {"guidance": 1.5, "has_noise": True},
    }.items():  # fmt: skip
        arguments = told_by((one_shot, "run_diffusion"), "run", tiny, "-p", "x", *line.split())
        assert arguments["diffusion"] == usual | changed, line
    opened.is_diffusion = False
    arguments = told_by((one_shot, "run_diffusion"), "run", tiny, "-p", "x", "--diffusion-steps", "1")
    assert arguments["asked"][0]["content"] == "x"
    for words, name in ((["--n", "2"], "n"), (["--beams", "1"], "beams"), (["--json"], "json"), (["--stats"], "stats")):
        with pytest.raises(UsageError, match=f"diffusion models give a single answer .*: leave out --{name}"):
            invoke("run", tiny, "-p", "x", "--diffusion-steps", "1", *words)


# ---- conversations, answers again


def test_chat_options_reach_the_conversation(tiny: str, monkeypatch):
    """Ask the prompt first on a terminal; images wait for it."""
    from localllm.cli.interactive import conversation

    did: list[Any] = []
    monkeypatch.setattr(opening, "open_model", lambda path, *more, **named: Opened(path))
    monkeypatch.setattr(chat, "is_terminal", lambda stream: True)
    for name, method in (("ask", "ask"), ("look", "attach_image")):
        monkeypatch.setattr(
            conversation.TerminalConversation, method, lambda talk, text, name=name: did.append((name, text))
        )
    monkeypatch.setattr(
        conversation.TerminalConversation, "set_system", lambda talk, text: did.append(("system", text))
    )
    for line, looks, expected in (
        ("", (False, False), []), ("--markdown", (True, False), []), ("--stats", (False, True), []),
        ("-p a -p b --image x.png -sys s", (False, False), [("system", "s"), ("look", "x.png"), ("ask", "a\n\nb")]),
    ):  # fmt: skip
        did.clear()
        arguments = told_by((chat, "run_loop"), "chat", tiny, *line.split())["conversation"]
        assert ((arguments.markdown, arguments.stats), did) == (looks, expected), line


@pytest.mark.parametrize(("words", "path"), [([], "/there.gguf"), (["-m", "/other.gguf"], "/other.gguf")])
def test_replay_opens_the_model_of_the_receipt_or_another(words: list[str], path: str, monkeypatch):
    from localllm.services import receipts

    held = {"context": 77, "threads": 3, "kv_type": "k=q8_0,v=f16", "chat_template": "phi3"}
    kept = {"opening": held, "model": {"files": [{"path": "/there.gguf"}]}, "options": {}}
    monkeypatch.setattr(receipts, "read_receipt", lambda path: kept)
    monkeypatch.setattr(receipts, "restore_options", lambda kept: GenerationOptions())
    arguments = told_by((opening, "open_model"), "replay", "r.json", *words)
    engine = arguments["engine"]
    assert (arguments["model"], arguments["chat_template"], arguments["no_cache"]) == (path, "phi3", True)
    assert (engine["context"], engine["threads"], engine["cache"]["kv_type"]) == (77, 3, "k=q8_0,v=f16")


@pytest.mark.parametrize(("key", "sent"), [("k", "k"), ("", None), (None, None)])
def test_replay_sends_the_api_key_to_the_endpoint(key: str | None, sent: str | None, monkeypatch):
    from localllm.services import receipts
    from localllm.services.remote import http

    kept = {"model": {"endpoint": "http://x", "name": "m"}}
    monkeypatch.setattr(receipts, "read_receipt", lambda path: kept)
    monkeypatch.setattr(receipts, "restore_options", lambda kept: GenerationOptions())
    monkeypatch.setattr("localllm.services.remote_receipts.is_remote", lambda kept: True)
    monkeypatch.delenv("LOCALLLM_API_KEY", raising=False)
    if key is not None:
        monkeypatch.setenv("LOCALLLM_API_KEY", key)
    arguments = told_by((http.Endpoint, "parse"), "replay", "r.json")
    assert [*arguments.values()] == ["http://x", sent]


@pytest.mark.parametrize("name", COMMANDS)
def test_defaults_are_those_that_help_shows(name: str):
    """Skip None, which is decided elsewhere, and flags, which are off."""
    for param in list_params(name):
        if param.is_switch:
            assert not param.default, param.name
        elif param.default is not None:
            match = re.search(r"\[default: ([^\],;]*)", param.help)
            assert match, param.name
            assert param.convert(match[1]) == param.default, param.name


# ---- what is refused before anything is opened

REFUSED = {
    "embed M --near x -o v.npy": "--near prints texts, not vectors: leave out -o and --format",
    "embed M --near x --format npy": "--near prints texts, not vectors: leave out -o and --format",
    "embed M TEXT KEYS": "unexpected argument 'KEYS': put --files before several files",
    "embed M TEXT --near x --no-normalize": "--near needs vectors of length 1: leave out --no-normalize",
    "serve M --host x": "--host lets other computers connect: add --api-key-file FILE with the API keys to accept",
    "serve M --host x --api-key-file KEYS --socket s": "give either --socket or --host, not both",
    "serve a=TEXT b=TEXT --mmproj x": "--mmproj needs a single model; several models use the mmproj-*.gguf in "
    "their folders",
    "serve M --media-path DIR --media-path TEXT": "--media-path must be an existing folder, not TEXT",
    "serve M --memory much": "--memory: must be a size in bytes, such as 500M or 8G, not 'much'",
    "run two&words": "'two words' is not a model; give MODEL before the prompt, or the prompt with -p",
    "run M -p x -f -": "-f -: stdin is closed; pipe the text, as in `cat FILE | localllm run ...`",
    "run M -p x --encoding none": "--encoding none is unknown; use, for example, utf-8, utf-16, latin-1 or cp1252",
    "run M -p x --tools list --allow DIR --raw": "--tools cannot be combined with --raw: leave out one of them",
    "run M -p x --tools list --allow DIR --n 2": "--tools cannot be combined with --n: leave out one of them",
    "run M -p x --tools list --allow DIR --beams 1": "--tools cannot be combined with --beams: leave out one of them",
    "run M -p x --tools list --allow DIR --receipt r": (
        "--tools cannot be combined with --receipt: leave out one of them"
    ),
    "run M -p x --tools list --max-steps 0": "--max-steps must be 1 or greater, not 0",
    "run M -p x --allow DIR": "--allow needs tools: add --tools or --mcp",
    "run M -p x --yes list": "--yes needs tools: add --tools or --mcp",
    "run M -p x --transcript t": "--transcript needs tools: add --tools or --mcp",
    "run M -p x --image a --receipt r": "--image cannot be combined with --receipt: leave out one of them",
    "run M -p x --image - --image -": "--image - reads one image from stdin: pipe the image, and give - only once",
    "chat M --image -": "--image - is not available in `chat`, which reads prompts from stdin: use `localllm run`",
    "run -p x --api-key-file KEYS": (
        "--api-key-file is for the server of --endpoint: add --endpoint URL, or leave it out"
    ),
    "run --endpoint http://x -p x --api-key-file EMPTY": "EMPTY must have at least one key, one per line",
    "map": "MODEL is missing: GGUF file or model name (see `localllm list`).",
    "map M": "INPUT is missing: give a file, or pipe records to stdin",
    "map M NONE": "cannot read NONE: No such file or directory",
    "tokenize M a -f TEXT": "give either TEXT or -f FILE, not both",
    "tokenize M": "TEXT is missing: give a text, or pipe one to stdin",
    "pull guide": "guide is the built-in model; there is nothing to download",
    "quantize M": "expected 2 or 3 arguments, IN [OUT] TYPE, found 1",
    "quantize M q4km": "unknown quantization type q4km; did you mean Q4_K_M?",
    "quantize M zzzzz": "unknown quantization type zzzzz; localllm quantize --help lists the types",
    "quantize M OUT Q8_0 --size 3G": "--size and --bpw choose formats by measuring the model, which needs --calibrate",
    "quantize M OUT Q8_0 -t 0": "-t must be from 1 to 1024, not 0",
    "quantize M OUT Q8_0 1025": "--threads must be from 1 to 1024, not 1025",
    "quantize M OUT Q8_0 --calibrate --size 3G --bpw 4": "give either --size or --bpw, not both",
    "quantize M OUT Q8_0 --calibrate --size 100k --plan TEXT": (
        "TEXT: the file exists; overwrite it with --force, or leave out --size to use its formats"
    ),
    "perplexity M": "TEXT is missing: give a text file",
    "perplexity M TEXT --base b": "--kl-divergence and --base FILE must be given together; --save-logits FILE "
    "writes that file",
    "perplexity M TEXT --kl-divergence": (
        "--kl-divergence and --base FILE must be given together; --save-logits FILE writes that file"
    ),
}  # fmt: skip


@pytest.mark.parametrize("line", REFUSED)
def test_invalid_command_lines_are_refused_before_anything_is_opened(line: str, tiny: str, monkeypatch, tmp_path):
    """Compare whole messages, with options as they were typed and stdin closed."""
    for name, text in {"TEXT": "text\n", "KEYS": "12345678\n", "EMPTY": "\n"}.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "DIR").mkdir()
    monkeypatch.chdir(tmp_path)
    name, *words = line.split()
    above = make_context(name)
    monkeypatch.setattr(sys, "stdin", None)
    monkeypatch.setattr("localllm.cli.terminal.output.handle_termination", lambda leave: None)
    monkeypatch.setattr("localllm.server.run.run_server", lambda *told: None)
    monkeypatch.setattr(opening, "open_model", lambda path, *more, **named: Opened(path))
    with pytest.raises(UsageError) as error:
        typed = [word.replace("&", " ") if word != "M" else tiny for word in words]
        with above.command.make_context(name, typed, parent=above.parent) as context:
            context.command.invoke(context)
    assert str(error.value) == REFUSED[line]
