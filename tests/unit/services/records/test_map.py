"""Test localllm map: input and output, resuming after any interruption, and errors by line."""

import json
import os
import re
import signal
import subprocess
import sys
import time
from contextlib import suppress
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from project import ROOT, complaints
from signals import apart, ctrl_c, keyboard
from system_calls import SAFE, SystemCalls
from tiny_model import write_tiny_model

from localllm import builtin_model
from localllm.cli.map_run import finish_on_ctrl_c
from localllm.cli.terminal.output import ProgressLine
from localllm.errors import LocalllmError, UsageError
from localllm.files.jsonl_file import JsonlFile, encode_line
from localllm.services.records.lines import PromptBuilder, Record, read_records
from localllm.services.records.map import (
    MapJob,
    RecordMapping,
    iter_in_order,
    make_result_filter,
    select_unfinished,
    sort_by_length,
)
from localllm.services.records.map import make_result as result_of
from localllm.text import sandbox

GUIDE = builtin_model()
QUESTIONS = ["What is a GGUF file?", "How do I stop an answer?", "Which commands are there?", "What is Q4_K_M?"]


def lines(text: str) -> list[dict]:
    return [json.loads(line) for line in text.splitlines()]


@pytest.fixture
def questions(tmp_path: Path) -> Path:
    """Write a file with a question per line."""
    file = tmp_path / "questions.txt"
    file.write_text("\n".join(QUESTIONS) + "\n")
    return file


# The whole command, with the built-in model.


def test_map_gives_the_answers_of_run(cli, questions: Path):
    code, out, err = cli("map", GUIDE, questions, "--temp", 0, "-n", 12)
    assert (code, err) == (0, "")
    for number, (result, question) in enumerate(zip(lines(out), QUESTIONS, strict=True), 1):
        run_result = json.loads(cli("run", GUIDE, "-p", question, "--temp", 0, "-n", 12, "--json", stdin=b"")[1])
        assert result == {
            "id": number,
            "output": run_result["text"],
            "finish_reason": run_result["finish_reason"],
            "prompt_tokens": run_result["prompt_tokens"],
            "completion_tokens": run_result["completion_tokens"],
            "input": question,
        }


def test_map_with_raw_does_not_warn_of_a_missing_template(cli, tmp_path: Path, questions: Path):
    bare = str(write_tiny_model(tmp_path / "bare.gguf", chat_template=None))
    for raw in (False, True):
        code, _, err = cli("map", bare, questions, "-n", 1, "--temp", 0, *["--raw"] * raw)
        assert code == 0 and ("no chat template" in err) == (not raw), err


def test_map_shows_progress_after_every_step(cli, monkeypatch, questions: Path):
    """Show how many are answered, and the remaining time at that rate."""
    shown: list[str] = []
    monkeypatch.setattr(ProgressLine, "show", lambda line, text: shown.append(text))
    assert cli("map", GUIDE, questions, "--temp", 0, "-n", 3)[0] == 0
    counts = [int(re.fullmatch(r"(\d) of 4 answered, .* tokens/s(, \S.* left)?", text)[1]) for text in shown]
    assert counts == sorted(counts) and counts[-1] == 4 and shown[-1].endswith(", 0 s left")
    assert all(bool(count) == text.endswith(" left") for count, text in zip(counts, shown, strict=True))


def test_the_ctrl_c_handler_is_restored():
    def before(number: int, frame: object) -> None: ...

    meant = signal.signal(signal.SIGINT, before)
    try:
        for error in (None, ValueError):
            with suppress(ValueError), finish_on_ctrl_c(lambda: None):
                assert signal.getsignal(signal.SIGINT) is not before
                if error:
                    raise error
            assert signal.getsignal(signal.SIGINT) is before
    finally:
        signal.signal(signal.SIGINT, meant)


def test_a_seed_gives_the_answers_of_run(cli):
    sampling = "--temp", 1.5, "-n", 9, "--seed", 3
    _, out, _ = cli("map", GUIDE, *sampling, "--n", 3, stdin=QUESTIONS[0].encode())
    [result] = lines(out)
    run_result = json.loads(cli("run", GUIDE, "-p", QUESTIONS[0], *sampling, "--n", 3, "--json")[1])
    assert result["output"] == [answer["text"] for answer in run_result["answers"]]
    assert result["finish_reason"] == [answer["finish_reason"] for answer in run_result["answers"]]
    assert result["completion_tokens"] == [len(answer["tokens"]) for answer in run_result["answers"]]


def test_templates_messages_and_raw_prompts_can_ask_the_same(cli, tmp_path: Path):
    template = tmp_path / "prompt.jinja"
    template.write_text("What is {% if article %}{{ article }} {% endif %}{{ thing | trim }}?")
    record = {"thing": "GGUF file", "article": "a", "messages": [{"role": "user", "content": "What is a GGUF file?"}]}
    source = json.dumps({"id": "x", **record}).encode() + b"\n"
    asked: list[list[Any]] = [
        ["-p", "What is {article} {thing}?"],
        ["-f", template],
        [],
        ["-p", "<|user|>What is a GGUF file?{nothing}", "--raw"],
    ]
    results = [cli("map", GUIDE, "--temp", 0, "-n", 9, *how, stdin=source) for how in asked]
    outputs = [lines(out)[0].get("output") for _, out, _ in results[:3]]
    assert outputs[0] and outputs == [outputs[0]] * 3
    assert lines(results[3][1]) == [
        {"id": "x", "error": "the record has no field 'nothing'", "input": {"id": "x", **record}}
    ]
    assert results[3][0] == 6


def test_failing_lines_do_not_stop_the_others(cli, tmp_path: Path):
    source = b'{"id": "a", "prompt": "Hi"}\n{torn\n[1]\n{"id": "a", "prompt": "Hi"}\n{"id": [], "prompt": "Hi"}\n\n'
    source += b'{"text": "Hi"}\n{"id": "long", "prompt": "' + b"word " * 700 + b'"}\n{"id": "b", "prompt": "Ho"}\n'
    code, out, err = cli("map", GUIDE, "--temp", 0, "-n", 3, "-c", 256, stdin=source)
    assert code == 6
    assert err == "localllm: error: 6 of 8 records failed; see the error field of their output lines\n"
    results = [(result["id"], result.get("error")) for result in lines(out)]
    assert results[0] == ("a", None) and results[-1] == ("b", None)
    assert [number for number, _ in results[1:-1]] == [2, 3, "a", 5, 7, "long"]
    expected = (
        "not JSON",
        "not a JSON object",
        "id 'a' was already used in line 1",
        "an id must be",
        "no field",
        "tokens",
    )
    assert all(part in error for part, (_, error) in zip(expected, results[1:-1], strict=True))


def test_a_second_start_answers_what_is_missing(cli, questions: Path, tmp_path: Path):
    output = tmp_path / "answers.jsonl"
    command = "map", GUIDE, questions, "-o", output, "--temp", 0, "-n", 5
    assert cli(*command) == (0, "", "")
    whole = output.read_text()
    first, second, third, fourth = whole.splitlines(keepends=True)
    failed = json.dumps({"id": 3, "error": "no memory", "input": QUESTIONS[2]}) + "\n"
    for left in (first + second, first + second + third[:30], first + third + failed, fourth + second + '{"i'):
        output.write_text(left)
        assert cli(*command) == (0, "", f"localllm: {output} already answers 2 of 4 records\n")
        assert sorted(output.read_text().splitlines()) == sorted(whole.splitlines())
    inode = output.stat().st_ino
    assert cli(*command) == (0, "", f"localllm: {output} already answers 4 of 4 records\n")
    assert output.stat().st_ino == inode, "nothing to do"


@pytest.mark.parametrize(
    ("more", "differs"),
    [
        (["-p", "Translate: {line}"], "another prompt"),
        (["-sys", "Be brief."], "another prompt"),
        (["-n", 4], "another set of options"),
        (["--json-schema", '{"type": "integer"}', "-p", "{line}"], "another prompt and another set of options"),
    ],
)
def test_answers_by_other_options_are_refused_or_redone(cli, questions, tmp_path, more, differs):
    output = tmp_path / "answers.jsonl"
    command = "map", GUIDE, questions, "-o", output, "--temp", 0, "-n", 5
    assert cli(*command)[0] == 0
    before = output.read_bytes()
    code, _, err = cli(*command, *more)
    assert code == 2 and f"has answers by {differs}; --redo replaces them" in err
    assert output.read_bytes() == before
    code, _, err = cli(*command, *more, "--redo")
    assert code in (0, 6) and "already" not in err and output.read_bytes() != before
    assert cli(*command, *more)[0] in (0, 6), "now they are the same"


def test_only_errors_are_answered_again_by_other_options(cli, questions: Path, tmp_path: Path):
    output = tmp_path / "answers.jsonl"
    command = "map", GUIDE, questions, "-o", output, "--temp", 0
    assert cli(*command, "--regex", "(ab){9}|x", "-n", 1)[0] == 6
    lines = [json.loads(line) for line in output.read_text().splitlines()]
    good = {"id": 2, "output": "mine", "input": QUESTIONS[1]}
    output.write_text("".join(json.dumps(each if each["id"] != 2 else good) + "\n" for each in lines))
    assert cli(*command, "--regex", "(ab){9}|x", "-n", 60)[0] == 2, "another set of options"
    code, _, err = cli(*command, "--regex", "(ab){9}|x", "-n", 60, "--redo-errors")
    assert (code, err) == (0, f"localllm: {output} already answers 1 of 4 records\n")
    answers = {each["id"]: each for each in map(json.loads, output.read_text().splitlines())}
    assert [answers[id]["input"] for id in range(1, 5)] == QUESTIONS and answers.pop(2) == good
    assert all(each["output"] in ("ab" * 9, "x") for each in answers.values())
    assert "4 of 4" in cli(*command, "--regex", "(ab){9}|x", "-n", 60)[2], "now they are by these options"
    code, _, err = cli(*command, "--redo", "--redo-errors")
    assert code == 2 and "either --redo or --redo-errors" in err
    code, _, err = cli(*command[:3], "--redo-errors")
    assert code == 2 and "--redo-errors applies to the answers in the output file: add -o FILE" in err


def test_answers_of_another_model_are_refused(cli, questions: Path, tmp_path: Path):
    output, copy = tmp_path / "answers.jsonl", tmp_path / "other.gguf"
    copy.write_bytes(Path(GUIDE).read_bytes())
    assert cli("map", GUIDE, questions, "-o", output, "--temp", 0, "-n", 2)[0] == 0
    code, _, err = cli("map", copy, questions, "-o", output, "--temp", 0, "-n", 2)
    assert code == 2 and "another model" in err
    assert cli("map", GUIDE, questions, "-o", output, "--temp", 0, "-n", 2, "-t", 1)[0] == 0


def test_a_failing_redo_loses_nothing(cli, questions: Path, tmp_path: Path):
    output = tmp_path / "answers.jsonl"
    assert cli("map", GUIDE, questions, "-o", output, "--temp", 0, "-n", 2)[0] == 0
    before = output.read_bytes()
    assert cli("map", questions, questions, "-o", output, "--redo")[0] in (2, 3)
    assert output.read_bytes() == before
    code, _, err = cli("map", GUIDE, questions, "--redo")
    assert code == 2 and "--redo applies to the answers in the output file: add -o FILE" in err


def test_a_template_is_the_same_in_an_argument_and_in_a_file(cli, questions: Path, tmp_path: Path):
    plain, jinja = tmp_path / "plain.txt", tmp_path / "jinja.txt"
    plain.write_text("Say: {line}\n")
    jinja.write_text("Say: {{ line }}\n")
    ways = [("-f", plain), ("-f", jinja), ("-p", "Say: {line}"), ("-p", "Say: {{ line }}")]
    results = [cli("map", GUIDE, questions, "--temp", 0, "-n", 3, *way) for way in ways]
    assert all(code == 0 for code, _, _ in results)
    assert len({json.loads(out.splitlines()[0])["prompt_tokens"] for _, out, _ in results}) == 1
    plain.write_text("Say something.\n")
    code, _, err = cli("map", GUIDE, questions, "-f", plain)
    assert code == 2 and "must name a field" in err


def test_a_missing_model_is_reported_even_without_records(cli, questions: Path, tmp_path: Path):
    empty = tmp_path / "empty.txt"
    empty.touch()
    assert cli("map", questions, empty)[0] == 3
    assert cli("map", GUIDE, empty) == (0, "", "")


def test_outputs_that_would_destroy_files_are_refused(cli, questions: Path, tmp_path: Path):
    before = questions.read_bytes()
    for output in (questions, GUIDE):
        code, _, err = cli("map", GUIDE, questions, "-o", output)
        assert code == 2 and "the output is also an input" in err
    notes = tmp_path / "notes.txt"
    notes.write_text("my notes")
    code, _, err = cli("map", GUIDE, questions, "-o", notes)
    assert code == 2 and "line 1 is not a record" in err
    output = tmp_path / "answers.jsonl"
    output.write_text(json.dumps({"id": 1, "output": "", "input": "another question"}) + "\n")
    code, _, err = cli("map", GUIDE, questions, "-o", output)
    assert code == 2 and "another input" in err
    assert (questions.read_bytes(), notes.read_text()) == (before, "my notes")


def test_a_failing_start_leaves_no_output(cli, questions: Path, tmp_path: Path):
    assert cli("map", tmp_path / "none.gguf", questions, "-o", tmp_path / "out.jsonl")[0] == 3
    assert not (tmp_path / "out.jsonl").exists()


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["-p", "Summarize"], "must name a field"),
        (["-p", "{line}", "-f", "README.md"], "not both"),
        (["-f", "nowhere.jinja"], "cannot read nowhere.jinja"),
        (["--raw", "-sys", "Be brief."], "system message"),
        (["--n", "0"], "n must be 1 or greater"),
    ],
)
def test_invalid_arguments_are_refused(refused, arguments: list[str], message: str):
    refused(["map", GUIDE, *arguments], message, stdin=b"Hi\n")


def start(*arguments: object, **options) -> subprocess.Popen:
    command = [sys.executable, "-m", "localllm", "map", *map(str, arguments)]
    return subprocess.Popen(command, cwd=ROOT, stderr=subprocess.PIPE, **options)


def wait_for(output: Path, count: int) -> None:
    end = time.monotonic() + 60
    while not output.exists() or output.read_bytes().count(b"\n") < count:
        assert time.monotonic() < end
        time.sleep(0.002)


@pytest.fixture
def many(tmp_path: Path) -> Path:
    """Write a file with 3000 questions."""
    file = tmp_path / "many.txt"
    file.write_text("".join(f"Question {number}: {QUESTIONS[number % 4]}\n" for number in range(3000)))
    return file


def test_ctrl_c_finishes_running_answers(many: Path, tmp_path: Path):
    output = tmp_path / "answers.jsonl"
    process = start(GUIDE, many, "-o", output, "-n", "8", "--temp", "0", **apart())
    wait_for(output, 20)
    ctrl_c(process)
    _, err = process.communicate(timeout=60)
    assert process.returncode == 130
    assert err.decode().splitlines() == ["localllm: finishing the running records; press Ctrl-C again to quit at once"]
    results = lines(output.read_text())
    assert [result["id"] for result in results] == list(range(1, len(results) + 1))
    assert 20 <= len(results) < 3000


def test_a_second_ctrl_c_exits_at_once(many: Path, tmp_path: Path):
    output = tmp_path / "answers.jsonl"
    process = start(GUIDE, many, "-o", output, "-n", "400", "--temp", "0", "--as-finished", **apart())
    with keyboard(process) as press:
        wait_for(output, 1)
        press()
        assert process.stderr is not None
        assert b"finishing" in process.stderr.readline()
        press()
    process.communicate(timeout=60)
    assert process.returncode == 130
    assert all("output" in result for result in lines(output.read_text()))


@pytest.mark.slow
def test_a_killed_map_is_resumed(many: Path, tmp_path: Path):
    output, few = tmp_path / "answers.jsonl", tmp_path / "few.txt"
    few.write_text("".join(many.read_text().splitlines(keepends=True)[:200]))
    command = GUIDE, few, "-o", output, "-n", "4", "--temp", "0"
    process = start(*command)
    wait_for(output, 30)
    process.kill()
    process.communicate()
    assert start(*command).wait(120) == 0
    assert [result["id"] for result in lines(output.read_text())] == list(range(1, 201))


def test_a_closed_stdout_is_no_error(many: Path):
    process = start(GUIDE, many, "-n", "4", stdout=subprocess.PIPE)
    assert process.stdout is not None
    assert process.stdout.readline().startswith(b'{"id": 1')
    process.stdout.close()
    assert (complaints(process.stderr.read() if process.stderr else b""), process.wait(60)) == ("", 0)


# Records and prompts.


def test_jsonl_is_told_from_plain_lines():
    assert [record.input for record in read_records(b'{"a": 1}\r\n\n{"b": 2}')] == [{"a": 1}, {"b": 2}]
    assert [record.id for record in read_records(b"\xef\xbb\xbfone\n \n{two}\n")] == [1, 3]
    assert [record.input for record in read_records(b"\xef\xbb\xbfone\n{two}\n")] == ["one", "{two}"]
    assert read_records(b"{not json}\n") == [Record(1, "{not json}")]
    assert read_records(b"{not json}\n", "in.jsonl")[0].error.startswith("line 1 is not JSON")
    assert read_records(b"") == []


@pytest.mark.parametrize(
    "line", [b'{"a": NaN}', b'{"a": 1e999}', b'{"a": "\xff"}', b"[" * 100_000, b'{"a": 1' + b"0" * 5000]
)
def test_strange_json_is_an_error_of_its_line(line: bytes):
    [good, bad] = read_records(b'{"prompt": "Hi"}\n' + line)
    assert not good.error
    assert bad.error.startswith("line 2 is not JSON")
    json.loads(encode_line({"id": bad.id, "input": bad.input}))


def test_fields_of_other_types_are_rendered_as_json():
    ask = PromptBuilder(prompt='Say {"a": 1} and {x-y}, {list}', raw=True)
    assert ask(Record(1, {"x-y": 3, "list": ["é"]})) == 'Say {"a": 1} and 3, ["é"]'


def test_a_system_message_comes_first():
    system = {"role": "system", "content": "Be brief."}
    ask = PromptBuilder(system="Be brief.")
    assert ask(Record(1, "Hi")) == [system, {"role": "user", "content": "Hi"}]
    assert ask(Record(1, {"messages": [{"role": "user", "content": "Hi"}]})) == [
        system,
        {"role": "user", "content": "Hi"},
    ]


def test_a_template_refuses_missing_fields_and_private_attributes():
    with pytest.raises(UsageError, match="template is invalid"):
        PromptBuilder(template="{% if %}")
    for source in ("{{ missing }}", "{{ ''.__class__.__mro__ }}"):
        with pytest.raises(Exception, match="template failed"):
            PromptBuilder(template=source)(Record(1, {"text": ""}))


def test_a_failing_template_gives_a_short_reason(monkeypatch):
    """Name an exception without a message by its class."""
    for reason_text, reason in (("a\n b", "a b"), ("", "KeyError"), ("x" * 200, "x" * 200), ("x" * 201, "x" * 200)):

        def fail(*arguments: object, reason_text: str = reason_text, **named: object) -> None:
            raise ValueError(reason_text) if reason_text else KeyError

        with monkeypatch.context() as patch:
            patch.setattr(sandbox, "compile_template", fail)
            with pytest.raises(UsageError) as invalid:
                PromptBuilder(template="{{ x }}")
        with monkeypatch.context() as patch, pytest.raises(LocalllmError) as failed:
            patch.setattr(sandbox, "render_template", fail)
            PromptBuilder(template="{{ x }}")(Record(1, {"x": 1}))
        assert str(invalid.value) == f"the prompt's Jinja template is invalid: {reason}"
        assert str(failed.value) == f"the prompt's Jinja template failed: {reason}"


# Order, and what is there.


def test_results_are_sorted_by_record_even_after_an_interruption():
    records = [Record(number, "") for number in range(5)]
    results = [(records[number], {"id": number}) for number in (3, 0, 1, 4, 2)]
    assert [result["id"] for _, result in iter_in_order(results, records)] == [0, 1, 2, 3, 4]

    def interrupted():
        yield from results[:3]
        raise KeyboardInterrupt

    left = iter_in_order(interrupted(), records)
    assert [next(left)[1]["id"] for _ in range(3)] == [0, 1, 3], "nothing that is finished is lost"
    with pytest.raises(KeyboardInterrupt):
        next(left)


def test_shortest_first_sorts_by_the_length_of_the_prompt():
    """Count all messages; put failing records first."""
    records = [Record(1, "long question"), Record(2, "short"), Record(4, ""), Record(3, {"none": 0})]
    assert [record.id for record in sort_by_length(records, PromptBuilder())] == [3, 4, 2, 1]
    assert [record.id for record in sort_by_length(records, PromptBuilder(raw=True))] == [3, 4, 2, 1]
    talks = [Record(n, {"messages": [{"role": "user", "content": "x" * size}] * n}) for n, size in ((1, 8), (3, 2))]
    assert [record.id for record in sort_by_length(talks, PromptBuilder())] == [3, 1]


# A mapping, without a model.


def finished_request(
    key: Record, *answers: tuple[str, str, str], constraint: object = None, error: object = None
) -> Any:
    """Return a request with answers of text, reasoning and finish reason."""
    answers_made = [
        SimpleNamespace(text=text, thinking=hm, finish_reason=why, tokens=[1, 2]) for text, hm, why in answers
    ]
    task = SimpleNamespace(options=SimpleNamespace(constraint=constraint))
    return SimpleNamespace(key=key, n=len(answers_made), answers=answers_made, task=task, error=error, prompt=[1, 2, 3])


KEY = Record(7, "Hi")
TOLD = {"id": 7, "finish_reason": "stop", "prompt_tokens": 3, "completion_tokens": 2, "input": "Hi"}
BOTH = {**TOLD, "finish_reason": ["stop", "length"], "completion_tokens": [2, 2]}
CUT = {"id": 7, "error": "the answer was cut off before it matched its schema; raise -n or the context", "input": "Hi"}
BANNED = UsageError("the constraint allows only banned strings to follow")


@pytest.mark.parametrize(
    ("answers", "constraint", "expected"),
    [
        ([("a", "", "stop")], None, {**TOLD, "output": "a"}),
        ([("a", "hm", "stop")], None, {**TOLD, "output": "a", "thinking": "hm"}),
        ([("a", "", "stop"), ("b", "", "length")], None, {**BOTH, "output": ["a", "b"]}),
        ([("a", "", "stop"), ("b", "hm", "length")], None, {**BOTH, "output": ["a", "b"], "thinking": ["", "hm"]}),
        ([("a", "", "stop")], "matched its schema", {**TOLD, "output": "a"}),
        ([("a", "", "length")], "matched its schema", {**CUT, "output": "a"}),
        ([("", "", "length")], "matched its schema", CUT),
        ([("a", "", "stop"), ("b", "", "length")], "matched its schema", {**CUT, "output": ["a", "b"]}),
        ([("a", "", "length")], None, {**TOLD, "output": "a", "finish_reason": "length"}),
    ],
)  # fmt: skip
def test_a_finished_request_becomes_a_result(
    answers: list[tuple[str, str, str]], constraint: str | None, expected: dict[str, Any]
):
    promise = constraint and SimpleNamespace(promise=constraint, kind="regex")
    assert result_of(finished_request(KEY, *answers, constraint=promise)) == expected


def test_an_error_within_an_answer_keeps_its_text():
    request = finished_request(KEY, ("a", "", ""), error=BANNED)
    assert result_of(request) == {"id": 7, "error": str(BANNED), "output": "a", "input": "Hi"}


class Batch:
    """A batch that finishes one request after the other."""

    written = 5

    def __init__(self, requests: Any, precise: bool):
        self.requests, self.precise, self.ended = requests, precise, list[str]()

    def __iter__(self):
        for each in self.requests:
            yield [each] if each.answers or each.error else []

    def stop(self) -> None:
        self.ended.append("stopped")

    def close(self) -> None:
        self.ended.append("closed")


def make_mapping(records: list[Record], **choices: Any) -> Any:
    """Return a mapping whose model delays "waits", refuses "long" and fails at "bad"."""
    heard = list[Any]()

    def request(asked: Any, options: Any, n: int, key: Record) -> Any:
        heard.append((asked[-1]["content"], options, n))
        if key.input == "bad":
            raise LocalllmError("it is bad")
        if key.input == "long":
            return finished_request(key, error=LocalllmError("too long"))
        return finished_request(key, *[("A", "", "stop")] * (key.input != "waits"))

    session = SimpleNamespace(request=request, validate_combination=lambda options: heard.append(options))
    model: Any = SimpleNamespace(session=session, batch=Batch)
    options: Any = "options"
    turns = list[int]()
    mapping = RecordMapping(
        model, MapJob("m", PromptBuilder(), options, **choices), records, lambda: turns.append(mapping.done)
    )
    return mapping, heard, turns


def test_a_mapping_yields_all_results_and_closes_its_batch():
    records = [Record(number, text) for number, text in enumerate(["a", "bad", "waits", "long", "b", "bad"])]
    mapping, heard, turns = make_mapping(records, n=2, precise=False)
    assert heard == ["options"] and mapping._batch.precise is False and mapping.written == 5
    outputs = [(record.id, result.get("output") or result["error"]) for record, result in mapping]
    assert outputs == [(0, "A"), (1, "it is bad"), (3, "too long"), (4, "A"), (5, "it is bad")]
    assert turns == [1, 2, 3, 4] and mapping.done == 4 and mapping._batch.ended == ["closed"]
    assert heard[1:] == [(text, "options", 2) for text in ("a", "bad", "waits", "long", "b", "bad")]
    mapping.stop()
    assert mapping._batch.ended == ["closed", "stopped"]


def test_leaving_a_mapping_closes_its_batch():
    mapping, _, _ = make_mapping([Record(1, "a"), Record(2, "b")])
    results = iter(mapping)
    next(results)
    results.close()
    assert mapping._batch.ended == ["closed"]


@pytest.mark.parametrize("n", [0, -1])
def test_n_below_1_is_refused(n: int):
    with pytest.raises(UsageError, match=f"^n must be 1 or greater, not {n}$"):
        MapJob("m", PromptBuilder(), None, n)
    usual = MapJob("m", PromptBuilder(), None)
    assert (usual.n, usual.precise, usual.context, usual.threads, usual.kv_type) == (1, True, None, None, "f16")


def test_results_of_another_input_are_kept():
    stays = make_result_filter([Record(1, "a"), Record(2, "b")], "out")
    assert stays({"id": 1, "input": "a", "output": "x"}) and not stays({"id": 2, "input": "b", "error": "x"})
    for result, reason in (
        ({"id": 3, "input": "a"}, "3 of this file is not in the input"),
        ({"id": "1", "input": "a"}, "'1' of this file is not in"),
        ({"id": 2, "input": "a"}, "2 was answered for another input"), ({"id": 1}, "1 was answered for another input"),
    ):  # fmt: skip
        with pytest.raises(UsageError, match=f"^out: (the )?record {reason}.*; give another output file$"):
            stays(result)


def test_a_failed_record_is_not_finished():
    records = [Record(1, "a"), Record(2, "b", "wrong line"), Record(3, "c")]
    assert select_unfinished(records, [{"id": 1}, {"id": 2}]) == records[1:]


def test_ids_are_distinguished_by_their_type():
    records = [Record(1, "a"), Record("1", "b")]
    assert select_unfinished(records, [{"id": "1", "input": "b"}]) == [records[0]]


def test_two_processes_cannot_write_the_same_file(tmp_path: Path):
    with JsonlFile(tmp_path / "out.jsonl") as first:
        first.write(encode_line({"id": 1}))
        with pytest.raises(UsageError, match="another process"), JsonlFile(tmp_path / "out.jsonl"):
            pass
    assert (tmp_path / "out.jsonl").read_bytes() == b'{"id": 1}\n'


def test_the_output_is_synced_at_the_end(tmp_path: Path, monkeypatch):
    calls = SystemCalls(monkeypatch)
    with JsonlFile(tmp_path / "out.jsonl") as out:
        out.write(encode_line({"id": 1}))
        out.write(encode_line({"id": 2}))
    assert calls.of(tmp_path / "out.jsonl") == ["write", "fsync"]


def test_removing_lines_replaces_the_file_safely(tmp_path: Path, monkeypatch):
    """Move the lock to the new file."""
    (tmp_path / "out.jsonl").write_bytes(b'{"id": 1}\n{"id": 2, "error": "x"}\n{"id": 3')
    calls = SystemCalls(monkeypatch)
    with JsonlFile(tmp_path / "out.jsonl", keep=lambda record: "error" not in record) as out:
        assert calls.of(tmp_path / "out.jsonl") == SAFE
        assert out.records == [{"id": 1}]
        out.write(encode_line({"id": 4}))
        with pytest.raises(UsageError, match="another process"), JsonlFile(tmp_path / "out.jsonl"):
            pass
    assert (tmp_path / "out.jsonl").read_bytes() == b'{"id": 1}\n{"id": 4}\n'


@pytest.mark.parametrize("begun", [b"", b'{"id": 1}\n'])
def test_an_empty_output_is_removed_after_a_failure(tmp_path: Path, begun: bytes):
    """Keep what was there before."""
    path = tmp_path / "out.jsonl"
    path.write_bytes(begun)
    with pytest.raises(KeyboardInterrupt), JsonlFile(path):
        raise KeyboardInterrupt
    assert path.exists() == bool(begun)
    with JsonlFile(path):
        pass
    assert path.read_bytes() == begun


def test_invalid_utf_8_survives():
    assert json.loads(encode_line({"id": 1, "input": "\ud800"})) == {"id": 1, "input": "\ud800"}


def test_a_full_disk_is_reported(tmp_path: Path):
    if not os.path.exists("/dev/full"):
        pytest.skip("no /dev/full here")
    with JsonlFile(tmp_path / "out.jsonl") as out:
        os.dup2(os.open("/dev/full", os.O_WRONLY), out._descriptor)
        with pytest.raises(Exception, match="No space left"):
            out.write(b"{}\n")
