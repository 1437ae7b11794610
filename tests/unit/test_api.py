"""Test the public Python API: names, types, and refused arguments."""

import importlib.util
import os
import pickle
import pydoc
import subprocess
import sys
from collections.abc import Callable
from copy import deepcopy
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from project import ROOT

import localllm
from localllm import api
from localllm.generation import logprobs
from localllm.generation.model_methods import AnswerArguments, ChatArguments, SamplingArguments, gather_options
from localllm.generation.options import GenerationOptions
from localllm.generation.request import Completion
from localllm.generation.sampling.options import SamplingOptions

NAMES = ["ContextError", "LocalllmError", "MemoryLimitError", "Model", "ModelError", "Tokenizer", "UsageError",
         "__version__", "builtin_model", "open"]  # fmt: skip


def test_dir_lists_the_public_names_only():
    code = "import localllm; print(*dir(localllm))"
    done = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.stdout.split() == NAMES == sorted(localllm.__all__)


def test_help_describes_the_public_names():
    text = pydoc.render_doc(localllm, renderer=pydoc.plaintext)
    assert "\n    open(path: " in text and "class Model(" in text and "class Tokenizer(" in text
    assert "import_module" not in text and "TYPE_CHECKING" not in text


def test_a_missing_name_raises_attribute_error():
    with pytest.raises(AttributeError, match="module 'localllm' has no attribute 'nosuch'"):
        localllm.nosuch  # noqa: B018


@pytest.fixture(scope="module")
def model(tiny: str):
    with localllm.open(tiny, threads=1, context=256, cache=False) as opened:
        yield opened


def test_a_missing_attribute_of_an_answer_raises(model: localllm.Model):
    with pytest.raises(AttributeError, match=r"^'Generation' object has no attribute 'nosuch'$"):
        model.generate("Hi", 1).nosuch  # noqa: B018


def test_signatures_list_the_options():
    assert set(SamplingArguments.__annotations__) == set(SamplingOptions.__dataclass_fields__)
    others = set(AnswerArguments.__annotations__) - set(SamplingArguments.__annotations__)
    constraints = {"schema", "grammar", "regex", "json_whitespace", "additional_properties", "logprobs"}
    assert "tools" in ChatArguments.__annotations__
    assert others - constraints <= set(GenerationOptions.__dataclass_fields__) and constraints <= others


def test_an_unknown_argument_is_refused():
    with pytest.raises(localllm.UsageError, match=r"^there is no option 'temprature'; did you mean 'temperature'[?]$"):
        gather_options(None, (), {"temprature": 0})  # type: ignore[typeddict-unknown-key]


SNIPPET = """
import localllm
from localllm import api

model = localllm.open("model.gguf")
answer = model.chat([{"role": "user", "content": "Hi"}], max_tokens=3, temperature=0, seed=1, stop=["."])
text: str = answer.text + answer.finish_reason
"""
WRONG = [
    ('model.generate("Hi", temprature=0)', '"temprature"'),
    ('model.map(["Hi"], top_kk=1)', '"top_kk"'),
    ('model.generate("Hi", temperature="hot")', "incompatible type"),
    ("answer.nosuch", '"Generation" has no attribute "nosuch"'),
    ("localllm.nosuch", 'Module has no attribute "nosuch"'),
    ("localllm.Any", "has no attribute"),
]


@pytest.mark.sampled
@pytest.mark.slow(12)
@pytest.mark.skipif(importlib.util.find_spec("mypy") is None, reason="mypy is not installed")
def test_type_checkers_find_wrong_arguments(tmp_path: Path):
    file = tmp_path / "program.py"
    file.write_text(SNIPPET + "\n".join(code for code, _ in WRONG) + "\n", encoding="utf-8")
    command = [sys.executable, "-m", "mypy", "--strict", "--follow-imports", "silent", "--ignore-missing-imports"]
    command += ["--cache-dir", str(tmp_path / "cache"), str(file)]
    done = subprocess.run(
        command, cwd=tmp_path, env={**os.environ, "MYPYPATH": str(ROOT)}, capture_output=True, text=True, timeout=300
    )
    first = SNIPPET.count("\n") + 1
    reports = [line for line in done.stdout.splitlines() if ": error: " in line and "program.py" in line]
    for number, (code, message) in enumerate(WRONG):
        assert any(f":{first + number}: " in line and message in line for line in reports), (code, done.stdout)
    assert len({line.split(":")[1] for line in reports}) == len(WRONG), done.stdout


def test_one_text_is_embedded_as_one_vector(model: localllm.Model):
    one, several = model.embed("hello", pooling="mean"), model.embed(["hello", "you"], pooling="mean")
    assert one.ndim == 1 and several.shape == (2, len(one)) and (one == several[0]).all()
    assert model.embed([], pooling="mean").shape[0] == 0


@pytest.mark.parametrize("prompts", ["hi", b"hi", {"role": "user", "content": "Hi"}, 7])
def test_map_refuses_anything_but_a_list_at_once(model: localllm.Model, prompts: Any):
    with pytest.raises(localllm.UsageError, match=r"^prompts must be a list, not (str|bytes|dict|int)$"):
        model.map(prompts, 2)


@pytest.mark.parametrize("copy", [pickle.dumps, deepcopy])
def test_a_model_cannot_be_copied(model: localllm.Model, copy: Callable[[object], object]):
    with pytest.raises(TypeError, match=r"call localllm\.open\('.*tiny.*\.gguf'\)$"):
        copy(model)


def test_a_context_beyond_the_trained_one_warns(model: localllm.Model):
    trained = model.trained_context
    with localllm.open(model.path, threads=1, context=trained, cache=False) as opened:
        assert opened.warnings == []
    message = f"the context of {trained + 1} tokens exceeds the model's training context, {trained}; answers"
    with pytest.warns(UserWarning, match=message):
        opened = localllm.open(model.path, threads=1, context=trained + 1, cache=False)
    with opened:
        assert len(opened.warnings) == 1


def test_deprecated_names_still_work(monkeypatch: pytest.MonkeyPatch):
    seen = list[object]()

    def opened(path: object, **options: object) -> SimpleNamespace:
        seen.append(options)
        return SimpleNamespace(warnings=(), session=SimpleNamespace())

    with monkeypatch.context() as patched:
        patched.setattr(api, "open_model", opened)
        with pytest.warns(DeprecationWarning, match="the argument uploading was renamed to on_upload"):
            localllm.open(localllm.builtin_model(), uploading=print)  # type: ignore[call-arg]
    assert seen == [{"on_upload": print}]
    with localllm.open(localllm.builtin_model(), threads=1, cache=False) as model:
        with pytest.warns(DeprecationWarning, match=r"Model\.sight was renamed to Model\.vision"):
            assert model.sight is model.vision
        with pytest.warns(DeprecationWarning, match=r"Model\.fills was renamed to Model\.is_diffusion"):
            assert model.fills is model.is_diffusion is False
        with pytest.raises(AttributeError, match="'Model' object has no attribute 'nosuch'"):
            _ = model.nosuch
        tokenizer, session, end = model.tokenizer, model.session, "<|im_end|>"
        with pytest.warns(DeprecationWarning, match=r"Tokenizer\.fragments was renamed to Tokenizer\.split_special"):
            assert tokenizer.fragments(f"a{end}") == tokenizer.split_special(f"a{end}")
        with pytest.warns(DeprecationWarning, match=r"Tokenizer\.special_id was renamed to Tokenizer\.get_special_id"):
            assert tokenizer.special_id(end) == tokenizer.get_special_id(end) is not None
        for old, new in (("hold", "park"), ("go_on", "continue_with"), ("answers_one_text", "is_single_turn")):
            with pytest.warns(DeprecationWarning, match=rf"Session\.{old} was renamed to Session\.{new}"):
                assert getattr(session, old) == getattr(session, new)
    with pytest.warns(DeprecationWarning, match="prompt_logprobs was renamed to compute_prompt_logprobs"):
        assert logprobs.prompt_logprobs is logprobs.compute_prompt_logprobs
    assert hasattr(Completion, "known") and not hasattr(logprobs, "nosuch")
