"""Test options shared by several commands, reports, and files in the prompt."""

import io
import os
import re
import sys
from dataclasses import MISSING
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from localllm.cli.commands import serve
from localllm.cli.options import one_shot as tool_options
from localllm.cli.options import shared as options
from localllm.cli.options.conflicts import CONFLICTS, OptionConflict, require_compatible
from localllm.cli.options.diffusion import EPSILON, PLACES, DiffusionFlags, build_diffusion_options, decode_with_blanks
from localllm.cli.options.one_shot import EndpointFlags, ImageFlags
from localllm.cli.options.shared import (
    ConstraintFlags,
    MoreSamplingFlags,
    SamplingFlags,
    ThinkingFlags,
    parse_layers,
    read_system_message,
    read_value,
)
from localllm.cli.parameters import find_explicit_options, list_fields
from localllm.cli.terminal import result_report as report
from localllm.errors import LocalllmError, UsageError
from localllm.files.gguf import file as ahead
from localllm.files.gguf.writer import OutputTensor, write_gguf
from localllm.files.models_folder import choose_projector
from localllm.files.safe_file import create_private_folder
from localllm.quant.formats import RECIPES
from localllm.quantizing.mixed_precision.plan import parse_bits, parse_size, read_formats, set_formats, write_formats
from localllm.quantizing.plan import QuantizeRequest
from localllm.services import outputs
from localllm.services.hub.name_values import parse_variables
from localllm.services.remote.dialect import OutputFormat
from tests.unit.cli.command_helpers import answer

# Of options, by group: what nobody's word means, and what is made of that.
UNSAID = [
    (ConstraintFlags, {"json_whitespace": False, "additional_properties": False},
     ConstraintFlags.create_output_format, OutputFormat()),
    (ThinkingFlags, {"think": "auto"}, ThinkingFlags.to_fields,
     {"think": "auto", "think_budget": None, "template_variables": {}}),
    (ImageFlags, {"pan_and_scan": False}, lambda group: (group.mmproj, group.pan_and_scan), (None, False)),
    (tool_options.ToolFlags, {"max_steps": 20, "no_json_calls": False}, lambda group: group.open_tools(None), None),
    (EndpointFlags, {}, EndpointFlags.parse_endpoint, None), (SamplingFlags, {}, find_explicit_options, {}),
    (MoreSamplingFlags, {"ignore_eos": False}, MoreSamplingFlags.to_fields, {}),
    (DiffusionFlags, {"has_noise": False, "visual": False}, DiffusionFlags.to_fields, {}),
    (options.CacheFlags, {"kv_type": "f16"}, options.CacheFlags.format_types, "f16"),
    (options.EngineFlags, {"device": "auto", "gpu_layers": "auto"}, lambda group: parse_layers("auto"), "auto"),
    (options.AnswerFlags, {"escape": False}, lambda group: parse_layers("all"), "all"),
    (options.GenerationFlags, {"escape": False, "speculate": "auto"}, lambda group: parse_layers("7"), "7"),
    (serve.ServerAddressFlags, {"port": 11435, "strict_model_names": False, "access_log": False, "allow_pull": False},
    lambda group: serve.parse_size("7"),
     7),
    (serve.ServerLimitFlags, {"max_body": 32_000_000, "max_connections": 128, "grace": 30.0, "spm_infill": False},
     lambda group: serve.parse_size("1K"), 1000),
]  # fmt: skip


@pytest.mark.parametrize(("group", "usual", "build", "expected"), UNSAID, ids=[case[0].__name__ for case in UNSAID])
def test_unset_options_give_their_defaults(group: Any, usual: dict[str, Any], build: Any, expected: Any):
    defaults = {each.name: each.default for each in list_fields(group) if each.default not in (MISSING, None)}
    assert defaults == usual
    nested = {each.name: None for each in list_fields(group) if each.default is MISSING}
    assert build(group(**nested)) == expected


def test_only_one_constraint_may_be_given():
    assert ConstraintFlags().create_constraint() is None and ConstraintFlags(regex="x").create_constraint()
    for two in ({"regex": "x", "grammar": 'root ::= "y"'}, {"json_schema": "{}", "regex": ""}):
        with pytest.raises(UsageError, match="cannot be combined"):
            ConstraintFlags(**two).create_constraint()
    assert ConstraintFlags(json_schema='{"a": 1}', regex="x").create_output_format() == OutputFormat(
        {"a": 1}, None, "x"
    )


def test_invalid_text_or_file_arguments_are_refused(tmp_path: Path):
    (tmp_path / "s.json").write_bytes(b'\xef\xbb\xbf{"a": 1}')
    (tmp_path / "latin").write_bytes(b"\xe4")
    assert (
        read_value("x", None, "{") is None
        and read_value("x", "{}", "{") == "{}"
        and read_value("x", "a ::= b", "::=") == "a ::= b"
    )
    assert read_value("x", str(tmp_path / "s.json"), "{") == '{"a": 1}'
    for text, message in (
        (" ", "x must not be empty"),
        (str(tmp_path / "no"), "cannot read .*: No such file"),
        (str(tmp_path / "latin"), "not UTF-8"),
    ):
        with pytest.raises(UsageError, match=message):
            read_value("x", text, "{")


def test_template_variables_are_parsed_and_merged():
    assert (
        parse_variables("a=1") == {"a": 1}
        and parse_variables("a=x y") == {"a": "x y"}
        and parse_variables("a=") == {"a": ""}
    )
    assert parse_variables(' {"a": true, "b": null}') == {"a": True, "b": None} and parse_variables("a=b=c") == {
        "a": "b=c"
    }
    for odd in ("a", "1a=2", "{a}", "=1"):
        with pytest.raises(UsageError, match="template_var must be NAME=VALUE or a JSON object"):
            parse_variables(odd)
    thoughts = ThinkingFlags(think="on", think_budget=0, template_var=["a=1", '{"b": 2}', "a=3"])
    assert thoughts.to_fields() == {"think": "on", "think_budget": 0, "template_variables": {"a": 3, "b": 2}}
    assert not find_explicit_options(ThinkingFlags())
    for other in ({"think": "off"}, {"think_budget": 0}, {"template_var": ["a=1"]}):
        assert find_explicit_options(ThinkingFlags(**other)) == other


def test_images_are_added_to_the_prompt(monkeypatch: pytest.MonkeyPatch):
    asked = [{"role": "system", "content": "s"}, {"role": "user", "content": "q"}]
    assert ImageFlags().add_images(asked) is asked and ImageFlags().add_images("x") == "x"
    assert ImageFlags(image_files=["a", "b"]).add_images(asked) == [asked[0], {**asked[1], "images": ["a", "b"]}]
    with pytest.raises(UsageError, match="images need a chat template"):
        ImageFlags(image_files=["a"]).add_images("x")
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(io.BytesIO(b"\x89PNG")))
    assert ImageFlags(image_files=["a", "-"]).list_sources() == ["a", b"\x89PNG"]
    with pytest.raises(UsageError, match="reads one image from stdin"):
        ImageFlags(image_files=["-", "-"]).list_sources()
    assert (
        ImageFlags(image_files=["-"]).takes_stdin
        and not ImageFlags(image_files=["a"]).takes_stdin
        and not ImageFlags().takes_stdin
    )
    with pytest.raises(UsageError, match="not available in `chat`, which reads prompts from stdin"):
        ImageFlags(image_files=["-"]).require_files()
    ImageFlags(image_files=["a"]).require_files()
    monkeypatch.setattr(sys, "stdin", None)
    with pytest.raises(UsageError, match="pipe the image, and give - only once"):
        ImageFlags(image_files=["-"]).list_sources()


def test_a_system_message_comes_from_text_or_file(tmp_path: Path):
    (tmp_path / "s").write_text("from a file")
    assert read_system_message(None, None) is None and read_system_message("x", None) == "x"
    assert read_system_message(None, str(tmp_path / "s")) == "from a file"
    with pytest.raises(UsageError, match="give either -sys or -sysf, not both"):
        read_system_message("x", str(tmp_path / "s"))


def test_diffusion_options_are_checked():
    def choices(max_tokens: int | None = None, ban: Any = None, **drawing: Any) -> Any:
        return SimpleNamespace(max_tokens=max_tokens, ban=ban, get_sampling=lambda: drawing)

    usual: Any = build_diffusion_options(choices(), DiffusionFlags())
    assert (usual.length, usual.epsilon, usual.block_length) == (PLACES, EPSILON, 0) == (128, 1e-3, 0)
    assert (
        build_diffusion_options(choices(-1), DiffusionFlags()).length == 128
        and build_diffusion_options(choices(7), DiffusionFlags()).length == 7
    )
    blocks = build_diffusion_options(
        choices(32, temperature=0.5, seed=3), DiffusionFlags(block_length=16, steps=8, has_noise=True)
    )
    assert (blocks.block_length, blocks.steps, blocks.temperature, blocks.seed, blocks.has_noise) == (
        16,
        8,
        0.5,
        3,
        True,
    )
    assert DiffusionFlags(visual=True).to_fields() == {}
    chosen = build_diffusion_options(
        choices(), DiffusionFlags(algorithm=0, guidance=0.0, block_length=0)
    )  # 0 is a choice, too
    assert (chosen.algorithm, chosen.epsilon, usual.algorithm) == (0, EPSILON, 4)
    with pytest.raises(UsageError, match="1 to 10000 steps"):
        build_diffusion_options(choices(), DiffusionFlags(steps=0))
    with pytest.raises(UsageError, match="cannot ban strings"):
        build_diffusion_options(choices(ban=["x"]), DiffusionFlags())
    with pytest.raises(UsageError, match="do not support min-p"):
        build_diffusion_options(choices(min_p=0.1, temperature=1.0), DiffusionFlags())


@pytest.mark.parametrize("row", CONFLICTS, ids=lambda row: row.option)
def test_conflicting_options_are_refused(row: OptionConflict):
    require_compatible({row.option: True} | dict.fromkeys(row.others, False))
    for other in row.others:
        require_compatible({other: True})
        with pytest.raises(UsageError, match=re.escape(row.message.format(row.option, other))):
            require_compatible({row.option: True, other: True})


def test_partial_characters_and_masks_are_shown_as_blanks():
    tokenizer = SimpleNamespace(end_ids={9}, decode=lambda ids: "".join(map(chr, ids)))
    opened: Any = SimpleNamespace(tokenizer=tokenizer)
    assert decode_with_blanks(opened, [72, 1, 105, 33, 9, 72], mask=1) == "H_i!"
    assert decode_with_blanks(opened, [1, 1], mask=1) == "__"


MODEL: Any = SimpleNamespace(
    file=1, path="p", arch="llama", format="Q8_0", device="CPU", engine=SimpleNamespace(get_disk_statistics=dict)
)


def test_the_report_of_an_answer_has_timings_and_speculation(capsys: pytest.CaptureFixture[str]):
    result = report.build_report(MODEL, [answer(tokens=[1, 2, 3])], False, 0.1, 2.0)
    assert result["timings"] == {"load_s": 0.1, "prefill_s": 0.5, "ttft_s": 0.6, "decode_s": 0.25, "total_s": 2.0,
                                "prefill_tps": 10.0, "decode_tps": 8.0}  # fmt: skip
    assert result["speculation"] == {"drafted": 6, "accepted": 2, "steps_saved": 2} and result["tokens"] == [1, 2, 3]
    report.print_stats(result)
    err = capsys.readouterr().err
    assert "prompt: 9 tokens, 4 cached, in 0.50 s (10.0 per second), model loaded in 0.10 s\n" in err
    assert "answer: 3 tokens in 0.25 s (8.0 per second), first after 0.60 s, finish: stop, seed: 7" in err
    assert "drafted: 6 tokens, 2 accepted" in err
    card: Any = SimpleNamespace(**{**vars(MODEL), "device": "H100"})
    plain = report.build_single_report(card, answer(drafted=0, cached_tokens=0, prefill_s=0.0, decode_s=0.0), 0.1, 2.0)
    assert plain["timings"]["prefill_tps"] == plain["timings"]["decode_tps"] == 0 and "tokens" not in plain
    report.print_stats(plain)
    err = capsys.readouterr().err
    assert (
        "known" not in err
        and "guessed" not in err
        and "loaded in 0.10 s on H100" in err
        and "prompt: 9 tokens in 0.00 s, " in err
    )


def test_the_report_of_several_answers_has_seeds_and_totals(capsys: pytest.CaptureFixture[str]):
    answers: Any = [SimpleNamespace(text="a", thinking="", logprob=-1.0, finish_reason="stop", tokens=[1, 2], seed=5),
                    SimpleNamespace(text="b", thinking="h", logprob=-2.0, finish_reason="length", tokens=[3],
                    seed=None)]  # fmt: skip
    result = report.build_report(MODEL, answers, True, 0.5, 2.0)
    assert [each.get("seed") for each in result["answers"]] == [5, None] and "seed" not in result["answers"][1]
    assert result["timings"] == {"load_s": 0.5, "total_s": 2.0}
    report.print_stats(result)
    assert "answers: 2 with 3 tokens in 1.50 s, model loaded in 0.50 s" in capsys.readouterr().err
    assert report.describe_model(SimpleNamespace(file=None, path="u", name="n")) == {"endpoint": "u", "name": "n"}


def test_outputs_replace_only_files_of_their_type(tmp_path: Path):
    path = str(tmp_path / "x")
    outputs.require_replaceable(path, lambda path: False, "a model", False)
    (tmp_path / "x").write_bytes(b"")
    outputs.require_replaceable(path, lambda path: False, "a model", False)  # empty, as mktemp makes it
    (tmp_path / "x").write_bytes(b"my notes")
    outputs.require_replaceable(path, lambda path: True, "a model", False)
    outputs.require_replaceable(path, outputs.is_model, "a model", True)
    for kind in (outputs.is_model, outputs.is_imatrix, outputs.is_logits_file, outputs.is_receipt, lambda path: False):
        with pytest.raises(UsageError, match="x: the file exists and is not a model; use --force to replace it"):
            outputs.require_replaceable(path, kind, "a model", False)


@pytest.mark.parametrize(("kind", "is_model"), [(None, True), ("model", True), ("imatrix", False), ("adapter", False)])
def test_models_are_recognized_by_their_metadata(tmp_path: Path, kind: str | None, is_model: bool):
    metadata = {} if kind is None else {"general.type": kind}
    write_gguf(tmp_path / "m.gguf", metadata, [OutputTensor.from_array("a", np.ones(4, np.float32))])
    assert outputs.is_model(str(tmp_path / "m.gguf")) == is_model


@pytest.mark.skipif(os.name != "posix", reason="modes of POSIX")
def test_created_folders_are_private(tmp_path: Path):
    assert create_private_folder(tmp_path / "a" / "b").stat().st_mode & 0o777 == 0o700
    create_private_folder(tmp_path / "a" / "b")
    (tmp_path / "file").write_text("")
    with pytest.raises(LocalllmError, match="cannot be created"):
        create_private_folder(tmp_path / "file" / "x")


@pytest.mark.parametrize(("text", "bytes_"), [
    ("3.5GB", 3_500_000_000), ("800m", 800_000_000), ("800 MB", 800_000_000), ("12k", 12_000), ("77", 77),
    ("1T", 10**12),
    ("5b", 5), ("OWN", 1000),
])  # fmt: skip
def test_sizes_are_parsed_in_units(text: str, bytes_: int):
    plan: Any = SimpleNamespace(nbytes=1000)
    assert parse_size(text)(plan) == bytes_


def test_invalid_sizes_and_bits_are_refused():
    for odd in ("", "GB", "3,5GB", "-1", "3XB", "own it", "1e9"):
        with pytest.raises(UsageError, match=r"^--size \S.*: the value must be a size, such as 45G, 3\.5GB or 800MB$"):
            parse_size(odd)
    jobs = [SimpleNamespace(output=SimpleNamespace(nbytes=700))]
    plan: Any = SimpleNamespace(nbytes=1000, weights=800, jobs=jobs)
    assert parse_bits(4.5)(plan) == 450 + 300 and parse_bits(1)(plan) == 400 and parse_bits(32)(plan) == 3500
    for odd_bits in (0.99, 32.1):
        with pytest.raises(UsageError, match="--bpw must be from 1 to 32"):
            parse_bits(odd_bits)


def test_formats_of_tensors_are_read_from_a_file(tmp_path: Path):
    path, source = (
        str(tmp_path / "plan.toml"),
        SimpleNamespace(tensors=[SimpleNamespace(name="a.b"), SimpleNamespace(name="c")]),
    )
    write_formats(path, {"a.b": "Q4_K", "c": "F16"})
    assert read_formats(path, source) == {"a.b": "Q4_K", "c": "F16"}
    (tmp_path / "plan.toml").write_text('"c" = "q8_0"\n')
    assert read_formats(path, source) == {"c": "Q8_0"}
    request = set_formats(QuantizeRequest(RECIPES["Q4_0"]), {"c": "Q8_0"})
    assert request.options.formats == {"c": "Q8_0"}
    for text, message in (
        ("c = ", "plan.toml: "),
        ('d = "F16"', "has no tensor d"),
        ('c = "Q99"', "Q99, for c, is not a tensor format"),
        ("c = 5", "5, for c"),
    ):
        (tmp_path / "plan.toml").write_text(text)
        with pytest.raises(UsageError, match=message):
            read_formats(path, source)


@pytest.mark.parametrize(("names", "model", "projector"), [
    (["m-Q4.gguf", "mmproj-m-f32.gguf", "mmproj-m-f16.gguf"], "m-Q4.gguf", "mmproj-m-f16.gguf"),
    (["a/mmproj-x.gguf"], "m.gguf", None), (["a/mmproj-x.gguf"], "a/m.gguf", "a/mmproj-x.gguf"),
    (["mmproj-other-f16.gguf", "mmproj-m-q8_0.gguf"], "m-Q4_K_M.gguf", "mmproj-m-q8_0.gguf"),
    (["mmproj.txt", "x.gguf"], "m.gguf", None), (["MMPROJ-M.GGUF"], "m.gguf", "MMPROJ-M.GGUF"),
])  # fmt: skip
def test_the_projector_with_the_models_name_is_chosen(names: list[str], model: str, projector: str | None):
    assert choose_projector(names, model) == projector


def test_only_large_files_are_prefaulted(monkeypatch: pytest.MonkeyPatch):
    small, large = np.zeros(8, np.uint8), np.zeros(16, np.uint8)
    tensors = {"a": SimpleNamespace(data=large[4:][::2]), "b": SimpleNamespace(data=small)}
    file: Any = SimpleNamespace(tensors=tensors, parts={"/large": ["a"], "/small": ["b"], "/empty": []})
    mapped = []
    monkeypatch.setattr(ahead, "MIN_BYTES", 16)
    monkeypatch.setattr(ahead.memory, "prefault", lambda *arguments: mapped.append(arguments))
    monkeypatch.setattr(ahead, "Thread", lambda target, args, daemon: SimpleNamespace(start=lambda: target(*args)))
    for can, expected in ((False, []), (True, [("/large", large.ctypes.data, 16, ahead.BYTES_PER_CALL)])):
        monkeypatch.setattr(ahead.memory, "can_prefault", lambda can=can: can)
        ahead.prefault(file)
        assert mapped == expected
