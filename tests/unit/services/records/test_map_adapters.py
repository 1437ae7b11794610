"""The field `lora` of records: which adapters answer each of them."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from adapters import random_adapter, supported_names, write_adapter

import localllm
from localllm.cli import map_run
from localllm.errors import UsageError
from localllm.files.gguf.file import GGUFFile
from localllm.generation.adapters import parse_scales
from localllm.generation.options import GenerationOptions
from localllm.services.records.lines import PromptBuilder, Record
from localllm.services.records.map import MapJob, select_options
from localllm.services.remote.dialect import DIALECTS, OTHER, OutputFormat, build_request

FORM = "lora must be an array of objects with id (or name) and scale, or an object of scales by name"
SCALES: list[Any] = [
    None, [{"id": 0, "scale": 6.0}], {"judge": -6}, [{"name": "poet", "scale": 2}, {"id": 1, "scale": 4}], {"0": 3.0},
    [], {"poet": 0},
]  # fmt: skip


@pytest.fixture(scope="module")
def lora(tiny: str, tmp_path_factory) -> list[str]:
    """Write two adapters, and return the options that open them at scale 0."""
    folder, words = tmp_path_factory.mktemp("adapters"), list[str]()
    with GGUFFile.open(tiny) as file:
        for seed, name in enumerate(["poet", "judge"]):
            adapter = random_adapter(file, supported_names(file), 4, seed)
            words += ["--lora", f"{write_adapter(adapter, folder / f'{name}.gguf', 4.0)}:0"]
    return words


def map_records(cli, tiny: str, words: list[str], records: list[dict[str, Any]]) -> list[dict[str, Any]]:
    stdin = "".join(f"{json.dumps(record)}\n" for record in records).encode()
    _, out, _ = cli("map", tiny, "-", *words, stdin=stdin)
    return [json.loads(line) for line in out.splitlines()]


def make_records() -> list[dict[str, Any]]:
    records = [{"prompt": f"tell me {number % 2}", "lora": scales} for number, scales in enumerate(SCALES * 2)]
    return [{key: value for key, value in record.items() if value is not None} for record in records]


def test_records_of_one_batch_get_the_answers_that_each_gets_alone(cli, tiny: str, lora: list[str]):
    words = [*lora, "--temp", "0", "-n", "12"]
    together = map_records(cli, tiny, words, make_records())
    alone = [map_records(cli, tiny, words, [record])[0]["output"] for record in make_records()]
    assert [result["output"] for result in together] == alone and len({*alone}) > 4
    assert [result["input"] for result in together] == make_records()


def test_choices_are_those_of_the_adapters(cli, tiny: str, lora: list[str]):
    results = map_records(cli, tiny, [*lora, "--choices", "yes,no"], make_records())
    files = {word.removesuffix(":0"): 0.0 for word in lora[1::2]}
    with localllm.open(tiny, backend="auto", lora=files) as model:
        for record, result in zip(make_records(), results, strict=True):
            messages = [{"role": "user", "content": record["prompt"]}]
            options: Any = {"lora": parse_scales(record["lora"])} if "lora" in record else {}
            expected = {each.text: each.logprob for each in model.choose(messages, ["yes", "no"], **options)}
            assert result["logprobs"] == pytest.approx(expected, abs=1e-4)
    assert len({result["logprobs"]["yes"] for result in results}) > 4


@pytest.mark.parametrize(("scales", "message"), [
    ({"nobody": 1}, "unknown adapter 'nobody': the model has poet, judge"),
    ([{"id": 2}], "unknown adapter '2': the model has poet, judge"),
    ("poet", FORM), (3, FORM), ([{"id": -1}], FORM), ([{"scale": 1}], FORM), ({"poet": "high"}, FORM),
    ({"poet": True}, FORM), (["poet"], FORM),
    ({"poet": 10**400}, "the scale of adapter 'poet' must be a number, not 1000000"),
])  # fmt: skip
@pytest.mark.parametrize("choices", [[], ["--choices", "yes,no"]])
def test_a_wrong_value_is_the_error_of_its_record(
    cli, tiny: str, lora: list[str], scales: Any, message: str, choices: list[str]
):
    good, bad = {"prompt": "a"}, {"prompt": "a", "lora": scales}
    results = map_records(cli, tiny, [*lora, "-n", "2", *choices], [good, bad, good])
    assert ["error" in result for result in results] == [False, True, False]
    assert results[1]["error"].startswith(message) and results[1]["input"] == bad


def test_adapters_of_a_model_without_any_are_an_error(cli, tiny: str):
    [result] = map_records(cli, tiny, ["-n", "2"], [{"prompt": "a", "lora": {"poet": 1}}])
    assert result["error"] == "unknown adapter 'poet': the model was opened without one"


def test_the_field_is_data_if_the_prompt_names_it():
    record, usual = Record(1, {"lora": "rank 8", "text": "a"}), GenerationOptions()
    for prompt in ("{text}: {lora}", "{{ text }}: {{ lora }}"):
        assert select_options(record, PromptBuilder(prompt), usual) is usual
    for prompt in ("{text}", "{{ text }} {{ flora }}"):
        with pytest.raises(UsageError, match="lora must be"):
            select_options(record, PromptBuilder(prompt), usual)


def test_a_table_has_it_as_json(cli, tiny: str, lora: list[str], tmp_path: Path):
    (tmp_path / "q.csv").write_text('q,lora\na,"{""poet"": 6}"\na,\na,"[{""id"": 0, ""scale"": 6}]"\n')
    words = (*lora, "-p", "{q}", "--temp", "0", "-n", "12")
    code, out, _ = cli("map", tiny, tmp_path / "q.csv", *words)
    first, second, third = (json.loads(line)["output"] for line in out.splitlines())
    assert code == 0 and first == third != second


def test_servers_get_the_adapters_that_they_understand():
    options = GenerationOptions(lora={"poet": 0.5, "1": 2})
    fields = build_request(options, OutputFormat(), DIALECTS["localllm"])
    assert fields["lora"] == [{"name": "poet", "scale": 0.5}, {"id": 1, "scale": 2}]
    ids = build_request(GenerationOptions(lora={"1": 2}), OutputFormat(), DIALECTS["llamacpp"])
    assert ids["lora"] == [{"id": 1, "scale": 2}]
    with pytest.raises(UsageError, match="must have ids, not 'poet': llama-server does not know adapters by name"):
        build_request(options, OutputFormat(), DIALECTS["llamacpp"])
    with pytest.raises(UsageError, match="lora is not available with this endpoint"):
        build_request(options, OutputFormat(), OTHER)


def test_another_control_vector_is_another_model():
    job = MapJob("m.gguf", PromptBuilder(), GenerationOptions())
    vectors = replace(job, control_vectors=(("v.gguf", 0.5),))
    jobs = [job, vectors, replace(vectors, control_layers=(1, 2)), replace(job, lora=(("v.gguf", 0.5),))]
    assert len({each.compute_digests("m.gguf")["model"] for each in jobs}) == 4


def test_eval_remembers_the_adapters(cli, tiny: str, tmp_path: Path, monkeypatch):
    jobs = list[MapJob]()
    monkeypatch.setattr(map_run, "answer_questions", lambda model, job, *rest: jobs.append(job) or [])
    (tmp_path / "q.jsonl").write_text('{"prompt": "1?", "answer": "1"}\n')
    cli("eval", tiny, tmp_path / "q.jsonl", "--lora", tmp_path / "a.gguf", "--control-vector", tmp_path / "v.gguf:2")
    assert [(job.lora, job.control_vectors) for job in jobs] == [
        (((str(tmp_path / "a.gguf"), 1.0),), ((str(tmp_path / "v.gguf"), 2.0),))
    ]
