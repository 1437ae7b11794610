"""Test command lines of llama.cpp, Ollama and llm, and what they do."""

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

import localllm
from localllm.cli.argv import suggest_name
from localllm.cli.commands.completion import complete_word
from localllm.cli.commands.config import config
from localllm.cli.compat import MISSING_COMMANDS, SYNONYMS
from localllm.cli.interactive.settings import change_option
from localllm.cli.interactive.slash_commands import ExitChat, execute
from localllm.cli.map_run import check_provenance
from localllm.cli.open_model import make_compile_progress
from localllm.cli.registry import COMMANDS
from localllm.cli.terminal.output import ProgressLine
from localllm.cli.terminal.render import format_columns
from localllm.errors import UsageError
from localllm.files.gguf.file import describe_other_file
from localllm.generation.beam_search import Answer, select_best
from localllm.generation.constraints.constraint import Constraint, restrict_to_ascii
from localllm.generation.options import GenerationOptions
from localllm.services.hub.catalogue import normalize_name
from localllm.services.hub.huggingface import describe_failure
from localllm.services.records.lines import PromptBuilder, Record
from tests.unit.cli.test_command import parsed

SHORT = ("-n", "3", "--temp", "0")
PROMPT = ("-p", "Hi")


@pytest.fixture
def configure(tmp_path: Path, monkeypatch):
    """Return a function that writes config.toml."""
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path))
    (tmp_path / "localllm").mkdir()
    return (tmp_path / "localllm" / "config.toml").write_text


# What was wrong.


@pytest.mark.parametrize("words", ["MODEL", "-m MODEL", "alias"])
def test_map_takes_any_way_to_name_a_model(tiny: str, cli, configure, words: str):
    configure(f'[aliases]\nalias = "{tiny}"\n')
    code, out, err = cli("map", *words.replace("MODEL", tiny).split(), *SHORT, stdin=b"Hi\n")
    assert (code, json.loads(out)["input"]) == (0, "Hi"), err


def test_map_reports_a_missing_model_before_reading_input(cli, tmp_path: Path):
    (tmp_path / "empty").touch()
    code, out, err = cli("map", "nonexistent.gguf", tmp_path / "empty")
    assert (code, out) == (3, "") and err == "localllm: error: nonexistent.gguf: no such file\n"


def test_replay_opens_the_model_of_the_receipt(tiny: str, cli, configure, monkeypatch, tmp_path: Path):
    receipt = tmp_path / "receipt.json"
    assert cli("run", tiny, *PROMPT, *SHORT, "--receipt", receipt)[0] == 0
    configure('[defaults]\nmodel = "nothing.gguf"\n')
    monkeypatch.setenv("LOCALLLM_MODEL", "nothing.gguf")
    assert cli("replay", receipt)[:2] == (0, "the same text\n")
    assert cli("replay", receipt, "-m", "nothing.gguf")[0] == 3


def test_numbers_must_be_ascii_digits():
    assert restrict_to_ascii(r"\d{3}-[\w.]\S\\d\[\d") == r"[0-9]{3}-[0-9A-Za-z_.][^ \t\n\r\f\v]\\d\[[0-9]"
    assert restrict_to_ascii(r"(?u)\d") == r"\d"
    assert Constraint.from_regex(r"[^\d]\W[\s\D]").kind == "regex"


def test_map_continues_an_output_only_for_the_same_input(tiny: str, cli, tmp_path: Path):
    first, second, out = tmp_path / "a.jsonl", tmp_path / "b.jsonl", tmp_path / "out.jsonl"
    first.write_text('{"id": "x", "prompt": "Hi"}\n{"id": "y", "messages": "nope"}\n')
    second.write_text('{"id": "z", "prompt": "Hi"}\n')
    assert cli("map", tiny, first, "-o", out, *SHORT)[0] == 6
    before = out.read_bytes()
    code, _, err = cli("map", tiny, second, "-o", out, *SHORT)
    assert code == 2 and err.endswith("b.jsonl (28 bytes); --redo replaces them, or use another output file\n")
    (tmp_path / ".out.jsonl.localllm").unlink()
    code, _, err = cli("map", tiny, second, "-o", out, *SHORT)
    assert code == 2 and "record 'x' of this file is not in the input; give another output file" in err
    assert out.read_bytes() == before and b'"error"' in before
    first.write_text(first.read_text() + '{"id": "w", "prompt": "Ho"}\n')
    assert cli("map", tiny, first, "-o", out, *SHORT)[0] == 6
    assert [json.loads(line)["id"] for line in out.read_text().splitlines()] == ["x", "y", "w"]


def test_an_output_records_its_input(tiny: str, cli, tmp_path: Path):
    first, second, out = tmp_path / "a.txt", tmp_path / "b.txt", tmp_path / "out.jsonl"
    first.write_text("Hi\n")
    second.write_text("Hi\nHo\n")
    assert cli("map", tiny, first, "-o", out, *SHORT)[0] == 0
    before = out.read_bytes()
    code, _, err = cli("map", tiny, second, "-o", out, *SHORT)
    assert code == 2 and "a.txt (3 bytes)" in err
    assert err.endswith("b.txt (6 bytes); --redo replaces them, or use another output file\n")
    assert out.read_bytes() == before
    assert cli("map", tiny, "-o", out, *SHORT, stdin=b"Hi\n")[0] == 0, "the same by another way"
    assert cli("map", tiny, second, "-o", out, *SHORT)[0] == 0, "lines of a pipe are compared, and this goes on"
    assert out.read_bytes().startswith(before) and out.read_bytes().count(b"\n") == 2
    out.unlink()
    assert cli("map", tiny, second, "-o", out, *SHORT)[0] == 0, "a new one"
    second.write_text("Hi\nHo\nHu\n")
    assert cli("map", tiny, second, "-o", out, *SHORT)[0] == 0, "it has grown"
    assert out.read_bytes().count(b"\n") == 3


def test_a_failed_map_leaves_no_record_of_its_input(tiny: str, cli, tmp_path: Path):
    with (
        pytest.raises(KeyboardInterrupt),
        check_provenance(str(tmp_path / "out.jsonl"), b"Hi\n", "", {}, False) as remember,
    ):
        remember()
        assert (tmp_path / ".out.jsonl.localllm").exists()
        raise KeyboardInterrupt
    assert not list(tmp_path.iterdir())


def test_the_compile_message_counts_kernels(capsys):
    for total, count in ((1, "a kernel"), (2, "2 kernels")):
        make_compile_progress(ProgressLine())(0, total)
        assert capsys.readouterr().err.startswith(f"localllm: compiling {count} for this computer, once;")


def test_messages_that_are_no_list_are_refused():
    with pytest.raises(UsageError, match='"messages" must be a list of messages'):
        PromptBuilder()(Record(1, {"messages": "nope"}))


def test_a_local_file_is_not_pulled(tiny: str, cli):
    code, out, _ = cli("pull", tiny)
    assert (code, out) == (0, f"{tiny}\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("--samplers foo", "--samplers: unknown sampler 'foo'; available: penalties;dry;top_n_sigma;top_k;"),
        ("--sampler-seq kz", "--sampler-seq: unknown letter 'z'; available: e (penalties), d (dry), s"),
        ("--grammar root::=x --regex x", "--grammar and --regex cannot be combined"),
        ("-j x.json --regex x", "--json-schema and --regex cannot be combined"),
    ],
)
def test_errors_suggest_existing_values(tiny: str, refused, words: str, message: str):
    assert refused(["run", tiny, *PROMPT, *words.split()]).startswith(f"localllm: error: {message}")


def test_an_empty_schema_is_refused_by_name(tiny: str, cli):
    code, _, err = cli("run", tiny, *PROMPT, "-j", "")
    assert code == 2 and err.endswith("-j must not be empty: give its text or a file name\n")


def test_config_names_the_source_of_the_model(cli, configure):
    configure('[defaults]\nmodel = "small.gguf"\n')
    row = next(line for line in cli("config", "run")[1].splitlines() if line.startswith("MODEL"))
    assert row.split(maxsplit=2)[1:] == ["small.gguf", "config.toml, line 2"]
    assert config.__name__ == "config"


def test_chat_suggests_only_commands_it_has(tiny: str, cli, refused):
    assert refused(["chat", tiny]).endswith("the prompt is missing: give one with -p TEXT or through a pipe\n")
    assert cli("chat", tiny, *PROMPT, *SHORT)[:2] == cli("run", tiny, *PROMPT, *SHORT)[:2]


def test_candidates_with_equal_texts_are_one_answer():
    answers = [Answer(text, [number], -float(number), "stop") for number, text in enumerate(("yes", "no", "yes"))]
    assert [answer.tokens for answer in select_best(answers, 3)] == [[0], [1]]


def test_error_messages_do_not_mention_python(cli, tmp_path: Path):
    assert describe_failure(OSError("[Errno -2] Name or service not known")).startswith("no network connection")
    assert describe_other_file(b"export A=1\n") == "is a text file"
    assert describe_other_file(b"\x01\x02\x03") == "does not begin with GGUF"
    assert cli("inspect")[2] == "localllm: error: MODEL is missing: GGUF file or model name (see `localllm list`).\n"


# Command lines that were copied.


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("hf.co/a/b:Q8_0", "hf:a/b:Q8_0"),
        ("https://huggingface.co/a/b", "hf:a/b"),
        ("https://huggingface.co/a/b/resolve/main/x-Q4.gguf?download=true", "hf:a/b/x-Q4.gguf"),
        ("https://huggingface.co/a/b/tree/main", "hf:a/b"),
        ("a/b", "hf:a/b"),
        ("folder/x.gguf", "folder/x.gguf"),
        ("./a/b", "./a/b"),
        ("hf.co/a/b/blob/main/sub/x.gguf", "hf:a/b/sub/x.gguf"),
        ("https://www.huggingface.co/a/b/?x=1#y", "hf:a/b"),
        ("a/b/c", "a/b/c"),
        ("gemma3:4b", "gemma-3-4b"),
        ("Gemma3:4b-it", "gemma-3-4b"),
        ("gemma3:5b", "gemma3:5b"),
        ("qwen2.5:0.5b", "qwen2.5-0.5b"),
        ("qwen3-4b:Q8_0", "qwen3-4b:Q8_0"),
    ],
)
def test_model_names_of_ollama_and_hugging_face_are_understood(text: str, meant: str):
    assert normalize_name(text) == meant


def test_a_missing_model_is_answered_with_its_pull_command(cli):
    code, _, err = cli("run", "hf.co/nobody/nothing:Q4_K_M", *PROMPT)
    assert code == 3 and "`localllm pull hf:nobody/nothing:Q4_K_M`" in err


def test_ignored_options_are_reported_once(tiny: str, cli):
    plain = cli("run", tiny, *PROMPT, *SHORT)
    code, out, err = cli("run", tiny, *PROMPT, *SHORT, "-fa", "on", "--mlock", "-b", "512", "--no-cnv", "--jinja")
    assert (code, out) == plain[:2]
    assert err == "localllm: ignored (no effect): -fa, --mlock, -b, --no-cnv, --jinja\n"
    assert cli("run", tiny, *PROMPT, *SHORT, "-fa")[2] == ("localllm: -fa is ignored: flash attention is always on\n")


def test_aliases_of_options_have_the_same_meaning():
    assert parsed("run", "-hf", "a/b:Q4_0", "-p", "x")["model"] == "hf:a/b:Q4_0"
    assert parsed("chat", "m", "--context-shift", "-md", "small.gguf")["on_overflow"] == "shift"
    assert parsed("chat", "m", "-md", "small.gguf")["speculate"] == "draft:small.gguf"
    for command in ("perplexity", "tokenize", "inspect"):
        assert parsed(command, "m", "-ngl", "99")["model"] == "m"


@pytest.mark.parametrize(
    "line",
    [
        "run -m M -p x -n 400 -e -ngl 33 -sm none -mg 0",
        "run -m M -p x --repeat_penalty 1.1 --ctx_size 2048 --top_k 40 --n_predict 128 --batch_size 256",
        "run -m M -p x --jinja --single-turn -sys S",
        "run -m M -p x -dev CUDA1 -ts 3,1",
        "run -m M -p x --load-mode none -dev none -n -2 -c 0 --no-escape",
        "run -m M -p x --no-mmproj --cache-reuse 256 --reasoning-format deepseek --reasoning-budget 0",
        "run -m M -p x --cpu-moe -fa auto -ot exps=CPU --no-kv-offload --numa distribute",
        "run M x --verbose --keepalive 5m --nowordwrap --think=false",
        "run M x --hidethinking",
        "run -hf ggml-org/Qwen3-8B-GGUF:q8_0 -p hi",
        "chat -m M -ins --color -c 2048 --temp 0.2 -n 256 --repeat-penalty 1.1",
        "chat -m M --interactive-first --multiline-input --keep -1",
        "chat -m M --ignore-eos -n -1",
        "bench -m M -n 0 -n 16 -p 64 -t 1,2,4,8,16,32",
        "bench -m M -fa 0,1 -ctk q8_0 -ctv q8_0 -mmp 0 -r 3 --delay 1 --progress",
        "bench -m M -pg 512,128 -d 0,512 -ub 512",
        "perplexity --file wiki.test.raw -ngl 999 --model M",
        "perplexity -m M -f wiki.test.raw --kl-divergence-base base.kld --kl-divergence",
        "imatrix -m M -f c.txt --output-format dat -o i.dat -ngl 99 --save-frequency 50 --no-ppl --process-output",
        "quantize --imatrix i.gguf --include-weights attn_v --include-weights ffn_down in.gguf q4_k_m 8",
        "quantize --output-tensor-type q5_k --token-embedding-type q3_k --keep-split in.gguf q4_k_m 8",
        "quantize --prune-layers 20,21 in.gguf q4_k_m",
        "tokenize -m M -p x --ids --log-disable --stdin",
    ],
)
def test_documented_command_lines_are_accepted(line: str):
    """Copy them from llama.cpp's and Ollama's documentation (2026), except for the program's name."""
    assert parsed(*line.split())


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("bench -m M -o json", "-o: use --json for JSON, --md for a Markdown table"),
        ("chat -m M -f x", "-f: use -p for the first question"),
        ("tokenize -m M -p x --no-bos", "--no-bos: tokens are always those of `run --raw`"),
        ("perplexity -m M -f x --ppl-stride 4", "--ppl-stride: only the default is supported"),
        ("imatrix -m M -f x --chunk 5", "--chunk: texts are always read from the beginning"),
        ("run M --format json x", "--format: use --json-schema '{}' for any JSON"),
        ("inspect M --license", "--license: use `localllm inspect --modelfile`, or /show in `localllm chat MODEL`"),
    ],
)
def test_unsupported_options_are_refused_with_a_reason(line: str, message: str):
    with pytest.raises(UsageError) as error:
        parsed(*line.split())
    assert str(error.value).startswith(message)


def test_values_of_other_programs_are_translated():
    assert parsed("run", "m", "-dev", "CUDA1")["device"] == "cuda:1"
    assert parsed("run", "m", "-dev", "none", "-n", "-2")["device"] == "cpu"
    assert parsed("run", "m", "--think=false")["think"] == "off"
    assert parsed("run", "m", "--n_predict", "7")["max_tokens"] == 7
    assert parsed("tokenize", "m", "-p", "a text")["text"] == "a text"


def test_run_takes_the_prompt_after_the_model(tiny: str, cli):
    assert cli("run", tiny, "Hi", *SHORT) == cli("run", tiny, *PROMPT, *SHORT) == cli("run", "Hi", "-m", tiny, *SHORT)
    assert parsed("run", "m", "-p", "a", "-p", "b", "-f", "c", "-f", "d")["prompt"] == ["a", "b"]


@pytest.mark.sampled
def test_run_without_a_model_uses_the_built_in_one_and_says_so(cli, configure, tiny: str):
    code, out, err = cli("run", *PROMPT, "-n", "4")
    assert code == 0 and out and err.startswith("localllm: no model given; using the tiny built-in model")
    code, _, err = cli("run", "Why is the sky blue?")
    assert (
        code == 2
        and "'Why is the sky blue?' is not a model; give MODEL before the prompt, or the prompt with -p" in err
    )
    code, _, err = cli("run")
    assert code == 2 and "MODEL and the prompt are missing" in err


def test_run_without_a_model_uses_the_configured_one(cli, configure, tiny: str):
    configure(f'[defaults]\nmodel = "{tiny}"\n')
    whole = cli("run", tiny, "-p", "Why is it?", *SHORT)
    assert whole[0] == 0 and whole[1]
    assert cli("run", "-p", "Why is it?", *SHORT) == whole
    assert cli("run", "Why is it?", *SHORT) == cli("run", *SHORT, "Why is it?") == whole


def test_run_of_a_checkpoint_suggests_quantize(cli, tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    code, _, err = cli("run", tmp_path, *PROMPT)
    assert code == 3 and f"`localllm quantize {tmp_path} Q4_K_M` converts this checkpoint" in err


def test_open_in_python_takes_aliases(tiny: str, configure):
    configure(f'[aliases]\nsmall = "{tiny}"\n')
    with localllm.open("small", cache=False) as model:
        assert model.path == tiny


# What a person sees.

SCHEMA = '{"type": "object", "properties": {"a": {"type": "array", "items": {"type": "integer"}}}, "required": ["a"]}'


def test_json_output_is_compact_unless_json_whitespace_is_set():
    from llguidance import LLMatcher, LLTokenizer

    texts = ('{"a":[1,2]}', '{"a": [1, 2]}', '{\n  "a": [1, 2]\n}')
    for whitespace in (False, True):
        form = Constraint.from_schema(SCHEMA, whitespace)
        vocabulary = LLTokenizer("byte")
        for text in texts:
            assert LLMatcher(vocabulary, form.grammar).validate_tokens(list(text.encode())) == len(text)
        assert form.is_compact is not whitespace
    assert parsed("run", "m", "--json-whitespace")["json_whitespace"] is True


def test_a_constrained_answer_that_was_cut_exits_with_7(tiny: str, cli):
    code, out, err = cli("run", tiny, *PROMPT, *SHORT, "--regex", "[0-9]{8}")
    assert (code, err) == (
        7,
        "localllm: error: the answer was cut off before it matched its regex; raise -n or the context\n",
    )
    assert (digits := out.rstrip("\n")).isdecimal()
    code, out, _ = cli("map", tiny, *SHORT, "--regex", "[0-9]{8}", stdin=b"Hi\n")
    assert (code, json.loads(out)) == (
        6,
        {
            "id": 1,
            "error": "the answer was cut off before it matched its regex; raise -n or the context",
            "output": digits,
            "input": "Hi",
        },
    )
    assert cli("chat", tiny, *PROMPT, *SHORT, "--regex", "[0-9]{8}")[0] == 7
    assert cli("run", tiny, *PROMPT, *SHORT)[0] == 0


@pytest.mark.sampled
def test_outputs_replace_only_files_of_their_type(tiny: str, cli, tmp_path: Path):
    text, precious = tmp_path / "text", tmp_path / "precious"
    text.write_text("Some words and some more of them. " * 30)
    for words in (
        ["run", tiny, *PROMPT, *SHORT, "--receipt"],
        ["imatrix", tiny, text, "-c", 16, "--chunks", 1, "-o"],
        ["perplexity", tiny, text, "-c", 16, "--chunks", 1, "--save-logits"],
    ):
        precious.write_text("precious")
        code, _, err = cli(*words, precious)
        assert code == 2 and "the file exists and is not " in err and err.endswith("; use --force to replace it\n")
        assert precious.read_text() == "precious"
        assert cli(*words, precious, "--force")[0] == 0
        assert cli(*words, precious)[0] == 0  # one of its own kind


@pytest.mark.sampled
def test_quantize_replaces_only_models_and_refuses_larger_types(tiny: str, cli, tmp_path: Path):
    out = tmp_path / "out.gguf"
    out.write_text("precious")
    assert "is not a model; use --force to replace it" in cli("quantize", tiny, out, "Q8_0")[2]
    assert cli("quantize", tiny, out, "Q8_0", "--force")[0] == 0
    assert cli("quantize", tiny, out, "Q8_0")[0] == 0
    larger = cli("quantize", out, tmp_path / "large.gguf", "F32", "--allow-requantize")
    assert larger[0] == 2 and "would be larger than the old one" in larger[2]
    assert cli("quantize", out, tmp_path / "large.gguf", "F32", "--allow-requantize", "--force")[0] == 0


@pytest.mark.slow
def test_tokenize_inspect_and_sizes_agree_on_a_tiny_model(tiny: str, cli, tmp_path: Path):
    text = tmp_path / "text"
    text.write_text("Hi\n")
    ids = json.loads(cli("tokenize", tiny, "-f", text, "--ids")[1])
    assert ids == [each["id"] for each in json.loads(cli("tokenize", tiny, "Hi\n", "--json")[1])]
    assert cli("inspect", tiny, "--template")[1].startswith("{%")
    facts = json.loads(cli("inspect", tiny, "--json")[1])
    assert len(facts["metadata"]["tokenizer.ggml.tokens"]) == facts["vocabulary"]["size"]
    assert facts["metadata"]["general.architecture"] == "llama"
    assert cli("inspect", tiny, "--check")[2].startswith("checked: all ")
    rows = json.loads(cli("fit", tiny, "-c", 512, "--json")[1])["rows"]
    assert {row["context"] for row in rows} == {512}
    assert cli("fit", tiny, "-c", 10**9)[0] == 2
    code, out, _ = cli("pull", tiny, text)
    assert (code, out) == (0, f"{tiny}\n{text}\n")
    code, _, err = cli("map", tiny, *SHORT, "--stats", stdin=b"a\nb\n")
    assert code == 0 and err.startswith("2 records in ") and err.endswith("tokens/s, 0 failed\n")
    assert re.search(r"^2 records in (\d|[1-5]\d) s, ", err), "not since the computer has started"
    assert cli("sessions", "list")[0] == 0


def test_config_path_prints_the_path(cli, configure, tmp_path: Path):
    assert cli("config", "path")[1] == f"{tmp_path}/localllm/config.toml\n"


def test_cache_limit_names_its_source(cli, configure, monkeypatch):
    def row() -> list[str]:
        return next(line for line in cli("config")[1].splitlines() if line.startswith("prompts kept")).split()[2:]

    variable = "LOCALLLM_PREFIX_GB"
    assert row()[-1] == variable, "which conftest.py sets"
    monkeypatch.delenv(variable)
    configure("")
    assert row()[-1] == "default"
    configure("\ncache_gb = 0.5\n")
    assert row() == ["500.0", "MB", "config.toml,", "line", "2"]
    monkeypatch.setenv(variable, "0.25")
    assert row() == ["250.0", "MB", variable]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[defaults]\ntempp = 1\n", "line 2: no command has an option --tempp"),
        ("[command.run]\nmd = true\n", "line 2: run has no option --md"),
        ("[command.rnu]\nx = 1\n", "line 1: unknown command rnu"),
        ('[defaults]\ntemp = "cold"\n', "line 2: temp: must be a number, not 'cold'"),
        ("[model.other]\nmin-p = true\n", "line 2: min-p: must be a string or a number, not true"),
    ],
)
def test_unknown_settings_are_reported_by_every_command(cli, configure, text: str, message: str):
    configure(text)
    code, _, err = cli("cache")
    assert code == 0 and message in err and err.startswith("localllm: warning: ") and err.count("\n") == 1


def test_unknown_environment_variables_are_reported_by_every_command(cli, monkeypatch):
    monkeypatch.setenv("LOCALLLM_TEMPP", "1")
    monkeypatch.setenv("LOCALLLM_TEMP", "0")
    warning = "localllm: warning: unknown environment variable LOCALLLM_TEMPP; did you mean LOCALLLM_TEMP?\n"
    assert cli("cache")[2] == warning


@pytest.mark.parametrize(
    ("before", "begun", "words"),
    [
        (["run", "m", "--speculate"], "", ["auto", "mtp", "ngram", "off", "draft:"]),
        (["run", "m", "--kv-type"], "q8", ["q8_0"]),
        (["run", "m", "-ctk"], "f", ["f16", "f32"]),
        (["run", "m", "--device"], "cu", ["cuda", "cuda:0", "cuda:1"]),
        (["run", "m", "--chat-template"], "gran", ["granite"]),
        (
            ["run", "m", "--on-overflow"],
            "=",
            ["error", "drop-turns", "shift", "head", "tail", "middle", "relevant", "chunks"],
        ),
        (["run", "m", "--on-overflow", "="], "dr", ["drop-turns"]),
        (["run", "m"], "--on-overflow=dr", ["--on-overflow=drop-turns"]),
        (["quantize", "x.gguf"], "Q5_K_", ["Q5_K_M", "Q5_K_S"]),
        (["config"], "ru", ["run"]),
        (["config"], "pa", ["path"]),
        (["sessions"], "s", ["show"]),
        (["sessions", "show"], "", []),
        (["cache", "clear"], "", []),
    ],
)
def test_completion_offers_words_and_models(
    before: list[str], begun: str, words: list[str], monkeypatch, tmp_path: Path
):
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    kind, offers = complete_word(before, begun)
    assert {word for word, _ in offers} >= set(words) and bool(offers) == bool(words)
    assert kind == (
        "models" if "draft:" in words else "files" if {"quantize", "--chat-template"} & {*before} else "nothing"
    )


@pytest.mark.parametrize(("word", "meant"), [("cli", "chat"), ("find", "list"), ("batch", "map"), ("delete", "rm")])
def test_command_names_of_other_programs_get_a_suggestion(word: str, meant: str, cli):
    assert cli(word)[2] == f"localllm: error: unknown command {word}; did you mean {meant}?\n"


def test_suggested_words_are_not_commands_themselves():
    words = " ".join([*SYNONYMS.values(), *MISSING_COMMANDS]).split()
    assert len(words) == len({*words}) and not {*words} & {*COMMANDS} and {*SYNONYMS} <= {*COMMANDS}


def test_mistyped_formats_and_chat_commands_get_a_suggestion(tiny: str, cli):
    assert (
        cli("quantize", tiny, "Q5_KM")[2] == "localllm: error: unknown quantization type Q5_KM; did you mean Q5_K_M?\n"
    )
    with pytest.raises(UsageError, match=r"unknown command /hlep; did you mean /help\?"):
        execute(None, "/hlep", None)
    with pytest.raises(UsageError, match=r"unknown option 'xyzzyx'; press Tab after /set to list the options$"):
        change_option(GenerationOptions(), "xyzzyx", "1")
    with pytest.raises(UsageError, match=r"unknown option 'temperatur'; did you mean temperature\?$"):
        change_option(GenerationOptions(), "temperatur", "1")


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("/set blub", "unknown option 'blub'; press Tab after /set to list the options"),
        ("/set num_gpu 3", "unknown option 'num_gpu'; use --gpu-layers when you start the chat"),
        ("/set nohistory", "unknown option 'nohistory'; the history of questions cannot be switched off"),
        ("/set parameter temperatur 0.2", "unknown option 'temperatur'; did you mean temperature?"),
        ("/set parameter", "usage: /set parameter NAME VALUE"),
        ("/set num_ctx", "usage: /set num_ctx VALUE"),
        ("/set -n", "usage: /set -n VALUE; VALUE `default` resets it, /show prints it"),
        ("/export", "usage: /export FILE.md"),
        ("/exprt x.md", "unknown command /exprt; did you mean /export?"),
        ("/list", "unknown command /list; /sessions lists the conversations, `localllm list` the models"),
        ("/contxt", "unknown command /contxt; did you mean /context?"),
        (
            "/frob",
            "unknown command /frob; /help lists the commands; put a space before a text that begins with a slash",
        ),
    ],
)
def test_chat_explains_options_and_commands_that_it_lacks(line: str, message: str):
    chat = SimpleNamespace(options=GenerationOptions(), set=None)
    with pytest.raises(UsageError) as error:
        execute(chat, line, None)
    assert str(error.value) == message


@pytest.mark.parametrize("line", ["/bye", "/quit", "/exit", "bye"])
def test_chat_ends_by_the_leaving_words_of_other_programs(line: str):
    with pytest.raises(ExitChat):
        execute(None, line, None)


@pytest.mark.parametrize(
    ("typed", "names", "hint"),
    [
        ("/export", ["/exit", "/edit"], ""), ("/list", ["/set"], ""), ("system", ["temp"], ""),
        ("--tmp", ["--temp", "--top-p"], "did you mean --temp?"),
        ("--ctx", ["-ctv", "--ctx-size"], "did you mean --ctx-size?"),
        ("/bracnh", ["/branch"], "did you mean /branch?"), ("Q4-K-M9", ["Q4_K_M", "Q4_K_S"], "did you mean Q4_K_M?"),
        ("--repeat-penality", ["--repeat-penalty"], "did you mean --repeat-penalty?"),
    ],
)  # fmt: skip
def test_only_near_misses_are_suggested(typed: str, names: list[str], hint: str):
    assert suggest_name(typed, names) == hint


def test_tables_fit_the_terminal():
    rows = [("a" * 30, "1", "b" * 50), ("c", "12345", "d" * 90)]
    for width in (40, 80):
        lines = format_columns(("name", "size", "path"), rows, "<><", width)
        assert max(map(len, lines)) <= width and "a" * 30 in lines[1] and "12345" in lines[2]
        assert ("…" in lines[1]) == (width == 80), "no cell is cut to a few letters"
    assert max(map(len, format_columns(("name", "size", "path"), rows, "<><"))) > 80
