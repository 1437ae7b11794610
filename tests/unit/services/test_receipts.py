"""Test receipts: they hold everything an answer came from, and replay tells the same text from another."""

import hashlib
import json
import os
import platform
import subprocess
import sys
from collections.abc import Callable
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from adapters import random_adapter, supported_names, write_adapter
from project import ROOT
from signals import apart, ctrl_c
from tiny_model import write_tiny_model

import localllm
from localllm.cli import one_shot as cli_receipt
from localllm.errors import UsageError
from localllm.files.cache import checksummed_cache
from localllm.files.gguf.file import GGUFFile
from localllm.generation.options import CALLABLES, GenerationOptions
from localllm.generation.sampling.options import SamplingOptions
from localllm.generation.speculation.speculator import ModelDrafter
from localllm.kernels.machine import Lane
from localllm.services import receipts
from localllm.services.control_vectors import write_control_vector


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = write_tiny_model(tmp_path_factory.mktemp("models") / "tiny.gguf", context=2048)
    localllm.open(path).close()  # compiles the kernels, of which stderr would tell
    return str(path)


@pytest.fixture(autouse=True)
def hashes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Use a cache folder for hashes only."""
    monkeypatch.setattr(checksummed_cache, "get_cache_folder", lambda: tmp_path / "cache")
    return tmp_path / "cache" / "sha256"


def write_receipt(cli, path: Path, *arguments: object, stdin: bytes = b"") -> dict:
    code, _, err = cli("run", *arguments, "--receipt", path, stdin=stdin)
    assert code == 0 and (not err or err.startswith("localllm: ignored (no effect): --dry-multiplier"))
    return json.loads(path.read_bytes())


def change(path: Path, *place: str | int, to: object) -> None:
    """Change a value of a receipt."""
    receipt = inner = json.loads(path.read_bytes())
    for name in place[:-1]:
        inner = inner[name]
    inner[place[-1]] = to
    path.write_text(json.dumps(receipt))


@pytest.mark.parametrize(
    "choices",
    [
        ["-p", "Hi"],
        ["-p", "Hi", "--raw", "--temp", "2", "--top-k", "0", "-s", "5", "--kv-type", "q8_0", "-t", "1", "-c", "300"],
        ["-p", "Hi", "-sys", "Be brief", "--chat-template", "phi3", "-r", "zz", "--speculate", "off"],
        ["-p", "Hi", "--n", "2", "--temp", "1.5"],
        ["-p", "Hi", "-l", "20-inf", "-l", "21+2.5", "--samplers", "top_k;temperature", "--ignore-eos"],
        ["-p", "Hi", "--mirostat", "2", "--dry-multiplier", "0.8", "--dry-sequence-breaker", "x"],
        ["-p", "Hi", "--grammar", 'root ::= "yes" | "no"'],
        ["-p", "Hi", "--beams", "2", "--n", "2"],
        [],
    ],
    ids=" ".join,
)
def test_replay_reproduces_the_text(tiny: str, cli, tmp_path: Path, choices: list[str]):
    write_receipt(
        cli, tmp_path / "r.json", tiny, *choices, "-n", "8", stdin=b"" if choices else "für [\n1,\n2\n] 👍".encode()
    )
    assert cli("replay", tmp_path / "r.json") == (0, "the same text\n", "")


def test_a_receipt_holds_model_prompt_options_and_result(tiny: str, cli, tmp_path: Path):
    text = "für 👍 [ 1, 2 ]"
    receipt = write_receipt(cli, tmp_path / "r.json", tiny, "-p", text, "-n", "6", "--top-p", "0.5", "-r", "x\ny")
    data = Path(tiny).read_bytes()
    file = {"path": tiny, "size": len(data), "sha256": hashlib.sha256(data).hexdigest()}
    assert receipt["model"] == {"arch": "llama", "format": "F32", "files": [file]}
    asked = [{"role": "user", "content": text}]
    assert "model" not in receipt["result"], "it is told above, by its hash"
    assert receipt["prompt"] == {"asked": asked, "sha256": hashlib.sha256(json.dumps(asked).encode()).hexdigest()}
    assert receipt["opening"].pop("threads") >= 1
    assert receipt["opening"] == {"context": 2048, "kv_type": "k=f16,v=f16", "chat_template": None}
    options = receipt["options"]
    assert options.keys() == {field.name for field in fields(GenerationOptions)} - {"on_progress", *CALLABLES} | {
        "n",
        "beams",
    }
    assert options["sampling"].keys() == {field.name for field in fields(SamplingOptions)}
    assert (options["max_tokens"], options["stop"], options["sampling"]["top_p"]) == (6, ["x\ny"], 0.5)
    assert options["sampling"]["seed"] == receipt["result"]["seed"] is not None
    assert receipt["made_by"]["localllm"] == localllm.__version__
    assert {"numpy", "numba", "processor", "instructions", "kernels"} < receipt["made_by"].keys()
    result = receipt["result"]
    assert result["completion_tokens"] == len(result["tokens"]) == 6 and result["timings"]["total_s"] > 0
    with localllm.open(tiny) as model:
        answer = model.chat(asked, max_tokens=6, stop=["x\ny"], top_p=0.5, seed=result["seed"])
        assert ("".join(answer), answer.tokens) == (result["text"], result["tokens"])


@pytest.mark.parametrize(
    ("features", "expected"),
    [("+avx2,+avx512f,+sse4.2", "avx2 avx512f"), ("+neon,+dotprod,+i8mm,+crc", "dotprod i8mm neon"), ("", "")],
)
def test_instructions_that_change_kernels_are_recorded(monkeypatch, features: str, expected: str):
    """Cover every processor type."""
    monkeypatch.setattr(receipts, "get_lane", lambda: Lane("", features))
    assert (
        receipts.describe_environment(SimpleNamespace(engine=SimpleNamespace(device="CPU")))["instructions"] == expected
    )


def test_a_receipt_records_python_processor_system_and_device(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(receipts, "describe_processor", lambda: "an abacus")
    monkeypatch.setattr(receipts, "get_system_name", lambda: "DOS")
    environment = receipts.describe_environment(SimpleNamespace(engine=SimpleNamespace(device="beads")))
    assert (environment["python"], environment["processor"], environment["system"]) == (
        platform.python_version(),
        "an abacus",
        "DOS",
    )
    assert environment["device"] == "beads"


def test_replay_shows_where_another_text_begins(tiny: str, cli, tmp_path: Path):
    path = tmp_path / "r.json"
    result = write_receipt(cli, path, tiny, "-p", "Hi", "-n", "8", "-s", "3")["result"]
    tokens, text = [*result["tokens"][:4], 5, *result["tokens"][5:]], result["text"]
    change(path, "result", "tokens", to=tokens)
    assert cli("replay", path)[:2] == (0, "the same text\n")
    change(path, "result", "text", to=text[:-1] + "…")
    code, out, err = cli("replay", path)
    assert (code, err) == (1, "")
    assert out == f"the text differs from token 5, character {len(text)}: it was '…' and is now {text[-1]!r}\n"


def test_replay_with_another_seed_gives_another_text(tiny: str, cli, tmp_path: Path):
    """Prove that replay generates the answer."""
    path = tmp_path / "r.json"
    write_receipt(cli, path, tiny, "-p", "Hi", "-n", "30", "-s", "3", "--temp", "2")
    change(path, "options", "sampling", "seed", to=4)
    assert cli("replay", path)[0] == 1


def test_replay_reports_what_has_changed(tiny: str, cli, tmp_path: Path):
    path, other = tmp_path / "r.json", write_tiny_model(tmp_path / "other.gguf", seed=1, context=2048)
    write_receipt(cli, path, tiny, "-p", "Hi", "-n", "8", "--temp", "0")
    change(path, "made_by", "numpy", to="1.0")
    change(path, "made_by", "processor", to="an abacus")
    code, out, err = cli("replay", path)
    assert (code, out) == (0, "the same text\n")
    lines = err.splitlines()
    assert [line.split(" was ")[0] for line in lines] == ["localllm: numpy", "localllm: processor"]
    assert lines[1].startswith("localllm: processor was an abacus, is ")
    code, out, err = cli("replay", path, "-m", other)
    assert code == 1 and out.startswith("the text differs from token 1, character 1: it was ")
    assert "localllm: the model differs: its SHA-256 was " in err
    change(path, "model", "files", 0, "path", to=str(tmp_path / "gone.gguf"))
    assert cli("replay", path)[0] == 3


def test_replay_uses_the_adapters_of_the_answer(tiny: str, cli, tmp_path: Path):
    path = tmp_path / "r.json"
    with GGUFFile.open(tiny) as file:
        poet = str(write_adapter(random_adapter(file, supported_names(file)), tmp_path / "poet.gguf", 4.0))
        width = file.tensors["token_embd.weight"].shape[1]
    vector = str(tmp_path / "v.gguf")
    write_control_vector(vector, "llama", np.random.default_rng(0).standard_normal((1, width)).astype(np.float32))
    words = ("-p", "Hi", "-n", "8", "--temp", "0", "--lora", f"{poet}:3", "--control-vector", f"{vector}:5")
    receipt = write_receipt(cli, path, tiny, *words, "--control-vector-layer-range", "1", "1")
    digest = hashlib.sha256(Path(vector).read_bytes()).hexdigest()
    assert receipt["opening"]["control_vectors"] == [{"path": vector, "digest": digest, "scale": 5.0}]
    assert receipt["opening"]["control_layers"] == [1, 1] and receipt["opening"]["lora"][0]["scale"] == 3.0
    assert cli("replay", path) == (0, "the same text\n", "")
    plain = write_receipt(cli, tmp_path / "plain.json", tiny, *words[:6])
    assert plain["result"]["text"] != receipt["result"]["text"] and "control_vectors" not in plain["opening"]
    write_control_vector(vector, "llama", np.ones((1, width), np.float32))
    code, out, err = cli("replay", path)
    assert "localllm: the control vectors differ\n" in err and code == out.startswith("the text differs")
    change(path, "opening", "control_layers", to=["a", 1])
    assert cli("replay", path)[2].startswith(
        "localllm: error: the receipt's adapters must have a path and a scale each; write it again"
    )


def test_an_interrupted_answer_is_compared_up_to_its_end(tiny: str, cli, tmp_path: Path):
    path = tmp_path / "r.json"
    write_receipt(cli, path, tiny, "-p", "Hi", "-n", "8", "-s", "1")
    change(path, "options", "max_tokens", to=None)
    change(path, "result", "finish_reason", to="interrupted")
    assert receipts.restore_options(receipts.read_receipt(path)).max_tokens == 8
    assert cli("replay", path)[:2] == (0, "the same text\n")


def test_ctrl_c_leaves_a_receipt(tiny: str, tmp_path: Path, cli):
    path, command = tmp_path / "r.json", [sys.executable, "-m", "localllm", "run", tiny, "-p", "Hi", "--no-stdin"]
    environment = {**os.environ, "PYTHONPATH": str(ROOT)}
    words = [*command, "--receipt", str(path), "-s", "1"]
    process = subprocess.Popen(words, stdout=subprocess.PIPE, env=environment, **apart())
    assert process.stdout is not None and process.stdout.read(10)
    ctrl_c(process)
    text = process.communicate(timeout=120)[0]
    assert process.returncode == 130
    result = json.loads(path.read_bytes())["result"]
    assert result["finish_reason"] == "interrupted"
    assert result["text"].encode().endswith(text[:-1])
    assert cli("replay", path)[:2] == (0, "the same text\n")


def test_damaged_receipts_are_refused(tiny: str, cli, refused, tmp_path: Path):
    path = tmp_path / "r.json"
    good = write_receipt(cli, path, tiny, "-p", "Hi", "-n", "2")
    broken = [b"", b"[]", b"{}", b"\xff", b'{"receipt": 1}', b"[" * 100_000]
    for place in ("model", "prompt", "opening", "options", "made_by", "result"):
        broken += [json.dumps({**good, place: None}).encode(), json.dumps({**good, place: {}}).encode()]
    broken.remove(json.dumps({**good, "made_by": {}}).encode())  # of which all is told to be new
    for data in broken:
        path.write_bytes(data)
        code, out, err = cli("replay", path)
        assert (code, out, err) == (
            2,
            "",
            f"localllm: error: {path}: not a receipt; `localllm run --receipt FILE` writes one\n",
        )
    for field, value, problem in (
        ("receipt", 99, "from another version"),
        ("options", good["options"] | {"new": 1}, "'new'"),
        ("options", good["options"] | {"sampling": good["options"]["sampling"] | {"top_k": -1}}, "top_k must be"),
    ):
        path.write_text(json.dumps({**good, field: value}))
        refused(["replay", path], problem)
    assert cli("replay", tmp_path / "missing.json")[0] == 2


OWN: dict[str, Any] = {
    "receipt": 1, "model": {"files": [{"path": "m.gguf", "sha256": "0"}]}, "prompt": {"asked": "Hi"},
    "opening": {"context": 9, "threads": 1, "kv_type": "f16", "chat_template": None},
    "options": {"sampling": {}, "n": 1, "beams": 0, "speculate": "off"}, "made_by": {},
    "result": {"text": "", "tokens": []},
}  # fmt: skip
REMOTE = {**OWN, "model": {"endpoint": "http://a/v1", "name": "m"}, "options": {**OWN["options"], "form": {}}}
REMOTE = {name: value for name, value in REMOTE.items() if name not in ("opening", "made_by")} | {
    "result": {"text": ""}
}
SEVERAL = {"answers": [{"text": "", "tokens": []}] * 2}


@pytest.mark.parametrize(
    ("receipt", "is_one"),
    [
        (OWN, True), (REMOTE, True), ({**OWN, "result": SEVERAL}, True), ({**REMOTE, "result": SEVERAL}, True),
        ({**OWN, "result": {"text": ""}}, False), ({**REMOTE, "result": {"answers": [{"text": ""}]}}, True),
        ({**REMOTE, "result": {"answers": [{"text": ""}, {}]}}, False), ({**OWN, "result": {"answers": []}}, False),
        ({**OWN, "result": {"answers": [{"text": "", "tokens": []}, {"text": ""}]}}, False),
        ({**OWN, "model": {"files": []}}, False), ({**OWN, "model": {"files": [*OWN["model"]["files"], {}]}}, False),
        ({**OWN, "prompt": {"asked": [{"role": "user"}]}}, True), ({**OWN, "prompt": {"asked": 5}}, False),
        ({**OWN, "opening": {**OWN["opening"], "chat_template": "x"}}, True),
        ({**OWN, "opening": {**OWN["opening"], "threads": None}}, False), ({**OWN, "more": 1}, True),
        ({**REMOTE, "options": OWN["options"]}, False),
    ],
)  # fmt: skip
def test_receipts_are_recognized_by_their_fields(tmp_path: Path, receipt: dict[str, Any], is_one: bool):
    """Require tokens for a local model and none for an endpoint; ignore fields that `replay` does not read."""
    path = tmp_path / "r.json"
    path.write_text(json.dumps(receipt))
    if is_one:
        assert receipts.read_receipt(path) == receipt
    else:
        with pytest.raises(UsageError) as failure:
            receipts.read_receipt(path)
        assert str(failure.value) == f"{path}: not a receipt; `localllm run --receipt FILE` writes one"


@pytest.mark.parametrize("asked", ["Hi", [{"role": "user", "content": "Hi"}]])
@pytest.mark.parametrize(("n", "beams"), [(1, 0), (2, 0), (1, 2), (3, 3)])
def test_replay_uses_the_method_of_the_answer(asked: Any, n: int, beams: int):
    called, heard = list[Any](), list[int]()

    class Answer(SimpleNamespace):
        def __iter__(self):
            for token in (7, 8):
                self.tokens.append(token)
                yield "x"

    def saying(name: str) -> Any:
        return lambda *arguments: called.append((name, *arguments)) or Answer(text="xx", tokens=[])

    session = SimpleNamespace(complete=saying("complete"), chat=saying("chat"))
    session.candidates = lambda *arguments: [saying("candidates")(*arguments)] * arguments[2]
    receipt, options = {**OWN, "prompt": {"asked": asked}, "options": {"n": n, "beams": beams}}, GenerationOptions()
    result = receipts.regenerate(SimpleNamespace(session=session), receipt, options, heard.append)
    if (n, beams) == (1, 0):
        assert (result, heard) == ({"text": "xx", "tokens": [7, 8]}, [1, 2])
        assert called == [("complete" if asked == "Hi" else "chat", asked, options)]
    else:
        assert (result, heard) == ({"answers": [{"text": "xx", "tokens": []}] * n}, [])
        assert called == [("candidates", asked, options, n, beams)]


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({"x": 1, "y": "2"}, {"x": 1, "y": "2"}, []),
        ({"x": 1}, {"x": 2, "y": 3}, ["x was 1, is now 2", "y was None, is now 3"]),
        ({"x": 1, "gone": 1}, {"x": 1}, []),
    ],
)  # fmt: skip
def test_changes_of_the_environment_are_listed(
    monkeypatch: pytest.MonkeyPatch, then: Any, now: Any, expected: list[str]
):
    """Shorten hashes where several differ."""
    monkeypatch.setattr(receipts, "describe_environment", lambda model: now)
    engine = SimpleNamespace(adapters=(), adapter_scales=(), control_vectors=())
    hashes, model = ["0123456789abcdef01", "f" * 64], SimpleNamespace(engine=engine)
    monkeypatch.setattr(receipts, "identify_files", lambda *arguments: [{"sha256": each} for each in hashes])
    receipt = {"made_by": then, "opening": {}, "model": {"files": [{"sha256": each} for each in hashes]}}
    assert receipts.list_changes(receipt, model) == expected
    receipt["model"]["files"].pop()
    assert receipts.list_changes(receipt, model) == [
        *expected, "the model differs: its SHA-256 was 0123456789abcdef…, is now 0123456789abcdef, ffffffffffffffff…"
    ]  # fmt: skip


LONG = "0123456789" * 5


@pytest.mark.parametrize(
    ("then", "now", "expected"),
    [
        ({"text": "ab", "tokens": [1]}, {"text": "ab", "tokens": [2]}, None),
        ({"text": "ab", "tokens": [1, 2]}, {"text": "ac", "tokens": [1, 3]},
         "token 2, character 2: it was 'b' and is now 'c'"),
        ({"text": "ab"}, {"text": "a", "tokens": [1]}, "character 2: it was 'b' and is now ''"),
        ({"text": "a" + LONG, "tokens": []}, {"text": "b" + LONG, "tokens": []},
         f"token 1, character 1: it was 'a{LONG[:39]}' and is now 'b{LONG[:39]}'"),
        ({"answers": [{"text": "a"}, {"text": "b"}]}, {"answers": [{"text": "a"}, {"text": "c", "tokens": []}]},
         "answer 2, character 1: it was 'b' and is now 'c'"),
        ({"answers": [{"text": "a"}] * 2}, {"text": "a"}, "there were 2 answers, and now 1"),
        ({"text": "ab", "finish_reason": "interrupted", "tokens": [5]}, {"text": "abc", "tokens": [5, 6]}, None),
        ({"text": "ab", "finish_reason": "length", "tokens": [5]}, {"text": "abc", "tokens": [5, 6]},
         "token 2, character 3: it was '' and is now 'c'"),
    ],
)  # fmt: skip
def test_the_first_difference_of_two_texts_is_described(then: Any, now: Any, expected: str | None):
    assert receipts.find_difference(then, now) == expected


def test_a_receipt_does_not_overwrite_an_input(tiny: str, cli, tmp_path: Path, link: Callable[[Path, Path], None]):
    prompt = tmp_path / "prompt.txt"
    prompt.write_text("Hi")
    before = Path(tiny).read_bytes()

    def is_refused(target: str | Path) -> bool:
        code, out, err = cli("run", tiny, "-f", prompt, "-n", "2", "--receipt", target)
        is_as_before = Path(tiny).read_bytes() == before and prompt.read_text() == "Hi"
        return (code, out) == (2, "") and err.count("\n") == 1 and is_as_before

    assert all(map(is_refused, (tiny, prompt, tmp_path / "no folder" / "r.json", tmp_path)))
    link(tmp_path / "link.json", Path(tiny))
    assert is_refused(tmp_path / "link.json")


def test_a_receipt_is_readable_for_people(tmp_path: Path):
    """Write a line per field, all tokens on one, and texts unescaped."""
    receipt = {"prompt": {"asked": "é\n"}, "result": {"text": "[\n1,\n2]", "tokens": [1, 22, 333], "none": []}}
    receipts.write_receipt(tmp_path / "r.json", receipt)
    assert (tmp_path / "r.json").read_text(encoding="utf-8").splitlines() == [
        "{", ' "prompt": {', '  "asked": "é\\n"', " },", ' "result": {', '  "text": "[\\n1,\\n2]",',
        '  "tokens": [ 1, 22, 333 ],', '  "none": []', " }", "}",
    ]  # fmt: skip
    assert json.loads((tmp_path / "r.json").read_bytes()) == receipt


@pytest.mark.parametrize("value", [object(), float("nan"), float("-inf"), {"depth": [float("inf")]}])
def test_options_without_a_json_form_are_refused(value: object):
    options = GenerationOptions(template_variables={"x": value})
    with pytest.raises(UsageError) as failure:
        receipts.serialize_options(options)
    assert (
        str(failure.value)
        == f"template_variables must be a JSON value to be stored in a receipt (found {{'x': {value!r}}}): leave it out"
    )


def test_a_draft_model_is_recorded_by_its_path():
    options = GenerationOptions(speculate=ModelDrafter.__new__(ModelDrafter), on_progress=print)
    assert receipts.serialize_options(options).keys() == {each.name for each in fields(options)} - {
        "on_progress", "speculate", "logits_processor", "stopping_criteria"
    }  # fmt: skip


@pytest.mark.parametrize("name", ["logits_processor", "stopping_criteria"])
def test_functions_cannot_be_recorded(name: str):
    with pytest.raises(UsageError, match=f"{name} must be a JSON value to be stored in a receipt"):
        receipts.serialize_options(GenerationOptions(**{name: print}))


def test_the_opening_of_a_model_is_recorded():
    """Record the text of a chat template, as its name or file may change."""
    template, kv_type = SimpleNamespace(source="{{ text }}"), SimpleNamespace(keys="q8_0", values="f16")
    engine, session = (
        SimpleNamespace(kv_type=kv_type, thread_count=3, rope=None, adapters=(), control_vectors=()),
        SimpleNamespace(template=template),
    )
    model: Any = SimpleNamespace(context=77, engine=engine, session=session)
    known = {"context": 77, "threads": 3, "kv_type": "k=q8_0,v=f16"}
    assert receipts.get_open_arguments(model, "phi3") == {**known, "chat_template": "{{ text }}"}
    assert receipts.get_open_arguments(model, None) == {**known, "chat_template": None}


def test_unrecordable_options_are_refused_before_the_answer(tmp_path: Path):
    model = SimpleNamespace(file=None, files=())
    options = GenerationOptions(sampling=SamplingOptions(seed=1))
    object.__setattr__(options, "keep", object())
    with pytest.raises(UsageError, match="keep must be a JSON value to be stored in a receipt"):
        cli_receipt.prepare_options(str(tmp_path / "r.json"), options, model, [], False)


def test_hashes_are_cached_while_a_file_is_unchanged(tmp_path: Path, hashes: Path):
    path, heard = tmp_path / "file", []
    path.write_bytes(b"a" * 100)
    assert (
        checksummed_cache.get_sha256(path, lambda *progress: heard.append(progress))
        == hashlib.sha256(b"a" * 100).hexdigest()
    )
    assert heard == [(100, 100)]
    checksummed_cache.get_sha256(path, lambda *progress: heard.append(progress))
    assert len(heard) == 1 and len(os.listdir(hashes)) == 1
    state = os.stat(path)
    path.write_bytes(b"b" * 100)
    os.utime(path, ns=(state.st_atime_ns, state.st_mtime_ns))
    assert checksummed_cache.get_sha256(path) == hashlib.sha256(b"b" * 100).hexdigest()
    (kept,) = [file for file in hashes.iterdir() if file.read_text() == hashlib.sha256(b"b" * 100).hexdigest()]
    kept.write_text("nonsense")
    assert checksummed_cache.get_sha256(path) == hashlib.sha256(b"b" * 100).hexdigest()
    if os.name == "posix":
        hashes.chmod(0o777)  # others may have written there
        kept.write_text("0" * 64)
        assert checksummed_cache.get_sha256(path) == hashlib.sha256(b"b" * 100).hexdigest()


@pytest.mark.parametrize(("speculate", "kind"), [("draft:gone.gguf", "auto"), ("ngram", "ngram"), ("off", "off")])
def test_replay_works_without_the_draft_model(tiny: str, cli, tmp_path: Path, speculate: str, kind: str):
    path = tmp_path / "r.json"
    write_receipt(cli, path, tiny, "-p", "Hi", "-n", "8")
    change(path, "options", "speculate", to=speculate)
    assert receipts.restore_options(json.loads(path.read_bytes())).speculate == kind
