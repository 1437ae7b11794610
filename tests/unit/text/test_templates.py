"""Test chat templates: their environment, system messages, refusals, and every released one."""

import hashlib
import json
import re
import subprocess
import sys
import time
from datetime import datetime
from types import SimpleNamespace

import pytest
from project import GOLDENS

from localllm.errors import ModelError, UsageError
from localllm.text import sandbox as limits
from localllm.text import sandbox as template_sandbox
from localllm.text.builtin_templates import BUILTIN_TEMPLATES
from localllm.text.messages import validate_messages
from localllm.text.templates import ChatTemplate, _describe_error, _to_hugging_face, _to_parts
from localllm.text.tokenizer import Tokenizer

CHATML, PLAIN = BUILTIN_TEMPLATES["chatml"], BUILTIN_TEMPLATES["plain"]
SYSTEM = {"role": "system", "content": "Be brief."}
USER = {"role": "user", "content": "Hi"}
ASSISTANT = {"role": "assistant", "content": "Hello"}
TURNS = "{% for message in messages %}[{{ message.role }}:{{ message.content }}]{% endfor %}"


def render(source: str, *messages: dict, **variables) -> str:
    return ChatTemplate(source, "<s>", "</s>").render(messages or [USER], **variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}", "<s>Hi</s>"),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{{ tools is defined }}{{ tools is none }}{{ documents is none }}{{ x is defined }}", "TrueTrueTrueFalse"),
        ("{% for tool in tools %}{{ tool }}{% endfor %}none", "none"),
        ("{{ strftime_now('%Y') }}", str(datetime.now().year)),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{{ ['aé😀', 'é'] | tojson(ensure_ascii=true) }}", '["a\\u00e9\\ud83d\\ude00", "\\u00e9"]'),
        ("{{ {'b': 1, 'a': 2} | tojson(sort_keys=true, separators=(',', ':')) }}", '{"a":2,"b":1}'),
        ("{% for i in range(9) %}{% if i == 1 %}{% continue %}{% endif %}{% if i == 3 %}{% break %}{% endif %}{{ i }}"
         "{% endfor %}", "02"),
        ("{% set ns = namespace(n=0) %}{% for i in range(3) %}{% set ns.n = ns.n + i %}{% endfor %}{{ ns.n }}", "3"),
        ("{% macro twice(x) %}{{ x ~ x }}{% endmacro %}{{ twice('a') ~ 1 ~ none }}", "aa1None"),
        ("  {% if true %}\n a\n  {% endif %}\n b\n", " a\n b"),
        ("{% generation %}{{ messages[0].content.upper() }}{% endgeneration %}", "HI"),
        ("{{ 'a,b'.split(',')[1].strip().startswith('b') }}", "True"),
        ("{% for k, v in {'x': 2}.items() %}{{ k }}{{ v * 2 }}{% endfor %}", "x4"),
        ("{% for m in messages recursive %}{{ loop.first }}{% else %}none{% endfor %}", "True"),
        ("{{ '-' * 3 + 'x' }}{{ 7 % 4 }}{{ 2 ** 3 }}", "---x38"),
        ("{{ [1, none, 'a'] | join('-') }}{{ {'b': 1, 2: 3} | join }}{{ 'xyz' | join('.') }}", "1-None-ab2x.y.z"),
        ("{{ '-'.join(['a', 'b'] | map('upper')) }}{{ '+'.join('cd') }}{{ namespace(a=1) }}", "A-Bc+d<namespace>"),
        ("{{ '%05.1f|%s' % (2.5, 'x') }}{{ '%s' | format(7) }}{{ 99999 * 99999 }}", "002.5|x79999800001"),
    ],
)  # fmt: skip
def test_templates_find_the_functions_they_expect(source: str, text: str):
    assert render(source) == text


def test_variables_reach_the_template():
    assert render("{% if enable_thinking %}think{% endif %}", enable_thinking=True) == "think"
    assert render("{{ add_generation_prompt }}", add_generation_prompt=False) == "False"


def test_a_refused_system_message_moves_to_the_user_message():
    source = "{% if messages[0].role == 'system' %}{{ raise_exception('no system') }}{% endif %}" + TURNS
    assert render(source, SYSTEM, USER, ASSISTANT) == "[user:Be brief.\n\nHi][assistant:Hello]"
    assert render(source, SYSTEM) == "[user:Be brief.]"


def test_a_dropped_system_message_moves_to_the_user_message():
    source = "{% for m in messages if m.role != 'system' %}[{{ m.content }}]{% endfor %}"
    assert render(source, SYSTEM, USER) == "[Be brief.\n\nHi]"
    assert render(source, USER) == "[Hi]"


def test_a_rendered_system_message_stays():
    assert render(TURNS, SYSTEM, USER) == "[system:Be brief.][user:Hi]"


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "a\n{{ raise_exception('roles\nmust\x1b alternate') }}",
            r"refuses the conversation in line 2: roles must� alt",
        ),
        ("a\n\n{{ messages[0].content.nothing.more }}", "failed in line 3: .* has no attribute 'nothing'"),
        ("{{ 1 / 0 }}", "failed in line 1: division by zero"),
        ("{{ none * 2 }}", "failed in line 1: unsupported operand type"),
        ("{{ undefined_function() }}", "failed in line 1: 'undefined_function' is undefined"),
        ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "failed in line 1: maximum recursion depth"),
    ],
)
def test_template_failures_name_line_and_reason(source: str, message: str):
    with pytest.raises(ModelError, match=f"^the chat template {message}") as caught:
        render(source)
    assert str(caught.value).isprintable()


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("a\n{% if %}", "invalid in line 2: Expected an expression"),
        ("{% nonsense %}", "invalid in line 1: Encountered unknown tag 'nonsense'"),
        ("{% include 'x' %}" + "{{ " + "(" * 5000, "invalid"),
    ],
)
def test_invalid_templates_are_refused_at_once(source: str, message: str):
    with pytest.raises(ModelError, match=f"^the chat template is {message}"):
        ChatTemplate(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('true') }}",
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='system') }}",
        "{% include '/etc/passwd' %}",
        "{% import 'os' as os %}{{ os.name }}",
        "{{ (messages | map(attribute='__class__') | list)[0].__name__ }}",
    ],
)
def test_the_sandbox_refuses_unsafe_operations(source: str):
    with pytest.raises(ModelError, match=r"the chat template failed in line 1|unsafe"):
        render(source)


@pytest.mark.parametrize(
    "source",
    [
        "{{ messages.__class__ }}",
        "{{ raise_exception.__globals__ }}",
        "{{ self.__init__.__globals__ }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{{ messages | attr('__class__') }}",
    ],
)
def test_the_sandbox_hides_internals(source: str):
    try:
        assert render(source) == ""
    except ModelError as error:
        assert "unsafe" in str(error) or "attributes and items" in str(error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{% if n %}{{ f(n - 1) }}{{ f(n - 1) }}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for i in range(1000) %}{{ 'x' * 1000000 }}{% endfor %}",
        "{{ 'x' * 1000000000000 }}",
        "{{ [1] * 1000000000 }}",
        "{{ 9 ** 9999 ** 9 }}",
        "{{ 'x'.ljust(1000000000000) }}",
        "{{ 'x' | center(1000000000000) }}",
        "{{ '%1000000000000d' % 1 }}",
        "{{ '%1000000000000d' | format(1) }}",
        "{{ '{:1000000000000}'.format(1) }}",
        "{{ range(1000000) }}",
        "{% set ns = namespace(x='x') %}{% for i in range(99) %}{% set ns.x = ns.x ~ ns.x %}{% endfor %}",
        "{% set ns = namespace(x=[1]) %}{% for i in range(99) %}{% set ns.x = ns.x + ns.x %}{% endfor %}",
        "{% set ns = namespace(x=9) %}{% for i in range(99) %}{% set ns.x = ns.x * ns.x %}{% endfor %}",
    ],
)
def test_hostile_templates_are_stopped(source: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(limits, "SECONDS", 0.3)
    started = time.process_time()
    with pytest.raises(ModelError, match=r"the chat template (was stopped|failed)"):
        render(source)
    assert time.process_time() - started < 3


@pytest.mark.parametrize(
    "value", ["", "abc", [], ["ab"] * 9, [[]] * 40, [[["x"]], ("y",)], {"key": ["value", None]}, {}, [True, -5, 1.5]]
)
def test_the_estimated_length_of_a_value_is_its_written_length(value: object):
    assert limits.estimate_length(value) >= len(str(value)) - 2  # but for the outermost brackets


def test_a_missing_template_falls_back_to_chatml_or_plain():
    def of(*pieces: str, template: str | None = None) -> ChatTemplate:
        tokenizer = SimpleNamespace(
            pieces=[*pieces], bos_id=None, eos_id=0, chat_template=template, end_texts=(), chat_templates={}
        )
        return ChatTemplate.from_tokenizer(tokenizer)

    assert of("<|im_start|>").source == CHATML
    assert of("a").source == PLAIN
    assert (of("a").stops, of("<|im_start|>").stops, of("a", template="x").stops) == (("\nUser:",), (), ())
    assert "no chat template: using 'plain'" in of("a").warning
    assert "using 'chatml'" in of("<|im_start|>").warning and of("a", template="x").warning is None
    assert of("a", template="x{{ eos_token }}{{ bos_token }}y").render([USER]) == "xay"
    assert of("<|im_start|>").render([SYSTEM, USER]) == (
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    text = "Be brief.\n\nUser: Hi\nAssistant: Hello\nUser: Hi\n"
    assert of("a").render([SYSTEM, USER, ASSISTANT, USER]) == text + "Assistant:"
    assert of("a").render([SYSTEM, USER, ASSISTANT, USER], add_generation_prompt=False) == text


# What transformers 5.23 renders of the released templates on 1 May 2026, 12:30: a text, of long ones the length and the
# beginning of their SHA-256, or null for an error; and the conversations with their variables.
GIVEN = json.loads((GOLDENS / "chat_renderings.json").read_text())


# Where the template drops the system message in front of a call's result; here the user's message has it.
KEPT_HERE = {("mistralai-Mistral-Nemo-Instruct-2407", "call")}


class FirstOfMay(datetime):
    @classmethod
    def now(cls, tz=None):
        return cls(2026, 5, 1, 12, 30)


def render_conversation(template: ChatTemplate, conversation: dict) -> str | None:
    try:
        text = template.render(conversation["messages"], **conversation["variables"])
    except ModelError:
        return None
    return text if len(text) <= 300 else f"{len(text)} {hashlib.sha256(text.encode()).hexdigest()[:32]}"


@pytest.mark.parametrize("name", GIVEN["renderings"])
def test_released_templates_render_as_in_transformers(shared, name: str, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(template_sandbox, "datetime", FirstOfMay)
    template = ChatTemplate((shared / "templates" / f"{name}.jinja").read_text(), "<s>", "</s>")
    for kind, expected in GIVEN["renderings"][name].items():
        conversation = GIVEN["conversations"][kind]
        text = render_conversation(template, conversation)
        if expected is None or (name, kind) in KEPT_HERE:  # what it refuses there may be written in another way here
            continue
        assert text == expected, kind


def test_a_system_message_is_kept_after_a_tool_result(shared):
    (name, kind) = next(iter(KEPT_HERE))
    template = ChatTemplate((shared / "templates" / f"{name}.jinja").read_text(), "<s>", "</s>")
    conversation = GIVEN["conversations"][kind]
    assert "[INST]Be brief.\n\nWhat is 2 < 3" in template.render(conversation["messages"], **conversation["variables"])


def test_there_are_48_released_templates(shared):
    assert {path.stem for path in (shared / "templates").glob("*.jinja")} == set(GIVEN["renderings"])
    assert len(GIVEN["renderings"]) == 48


# What llama.cpp's llama_chat_apply_template writes under each of its names (llama-cpp-python 0.3.36).
BUILTIN = json.loads((GOLDENS / "builtin_renderings.json").read_text())


def test_builtin_templates_have_llama_cpps_names():
    assert set(BUILTIN_TEMPLATES) == {*BUILTIN["renderings"], "plain"}


@pytest.mark.parametrize("name", BUILTIN["renderings"])
def test_builtin_templates_render_as_in_llama_cpp(name: str):
    for kind, expected in BUILTIN["renderings"][name].items():
        messages = BUILTIN["conversations"][kind]
        if name == "yandex" and messages[0]["role"] == "system":  # which it drops there
            expected = expected.replace("Hello", " Be brief. \n\nHello")
        text = render(BUILTIN_TEMPLATES[name], *messages, add_generation_prompt=kind != "all said")
        assert text == expected, kind


@pytest.mark.parametrize("name", BUILTIN_TEMPLATES)
def test_builtin_templates_accept_content_parts(name: str):
    parts = [{"type": "text", "text": "He"}, {"type": "text", "text": "llo"}]
    assert render(BUILTIN_TEMPLATES[name], USER | {"content": parts}) == render(
        BUILTIN_TEMPLATES[name], USER | {"content": "Hello"}
    )


def test_a_chosen_template_overrides_that_of_the_file():
    tokenizer = SimpleNamespace(
        pieces=["a"],
        bos_id=None,
        eos_id=None,
        chat_template="file",
        end_texts=(),
        chat_templates={"rag": "with documents"},
    )
    assert ChatTemplate.from_tokenizer(tokenizer, "llama3").source == BUILTIN_TEMPLATES["llama3"]
    assert ChatTemplate.from_tokenizer(tokenizer, "{{ 'mine' }}").render([USER]) == "mine"
    assert ChatTemplate.from_tokenizer(tokenizer).source == "file"
    assert ChatTemplate.from_tokenizer(tokenizer, "rag").source == "with documents"
    with pytest.raises(UsageError, match=r"unknown chat template 'llama9'; available: bailing, .*, zephyr"):
        ChatTemplate.from_tokenizer(tokenizer, "llama9")


def test_reasoning_has_all_its_names():
    source = "{{ messages[0].reasoning_content }}|{{ messages[0].thinking }}|{{ messages[0].reasoning }}"
    for name, last in (("reasoning_content", ""), ("thinking", ""), ("reasoning", "why")):
        assert render(source, {"role": "assistant", "content": "", name: "why"}) == f"why|why|{last}"


def test_a_template_that_may_drop_a_system_message_keeps_it():
    source = "{% for m in messages if m.role != 'system' or messages | length == 2 %}[{{ m.content }}]{% endfor %}"
    assert render(source, SYSTEM, USER) == "[Be brief.][Hi]"
    assert render(source, SYSTEM, USER, ASSISTANT, USER) == "[Hi][Hello][Hi]"


LLAMA = (
    "<s><|start_header_id|>system<|end_header_id|>\n\nCutting Knowledge Date: December 2023\nToday Date: 1 May 2026\n\n"
    "Be brief.<|eot_id|><|start_header_id|>user<|end_header_id|>\n\nHi<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\n"
)


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("meta-llama-Llama-3.2-3B-Instruct", LLAMA),
        ("google-gemma-2-2b-it", "<s><start_of_turn>user\nBe brief.\n\nHi<end_of_turn>\n<start_of_turn>model\n"),
        ("mistralai-Mistral-Nemo-Instruct-2407", "<s>[INST]Be brief.\n\nHi[/INST]"),
        ("Qwen-Qwen2.5-7B-Instruct", CHATML),
    ],
)
def test_well_known_templates_render_as_documented(shared, name: str, text: str):
    template = ChatTemplate((shared / "templates" / f"{name}.jinja").read_text(), "<s>", "</s>")
    expected = ChatTemplate(CHATML).render([SYSTEM, USER]) if text is CHATML else text
    assert template.render([SYSTEM, USER], date_string="1 May 2026") == expected


def test_the_template_of_smollm2_adds_its_system_message(shared):
    tokenizer = Tokenizer.from_file(shared / "models" / "smollm2-135m-instruct-q4_1.gguf")
    assert ChatTemplate.from_tokenizer(tokenizer).render([USER]) == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )


def test_importing_the_tokenizer_does_not_import_jinja():
    program = "import sys, localllm.text.tokenizer; print('jinja2' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", program], capture_output=True, text=True).stdout == "False\n"


@pytest.mark.parametrize(("messages", "problem"), [
    *((value, 'messages must be a list, [{"role": "user", "content": ...}], not ' + type(value).__name__)
      for value in ("Hi", USER, b"")),
    ([{"content": "Hi"}], "a message must be {\"role\": ..., \"content\": ...}, not {'content': 'Hi'}"),
    ([USER, 5], 'a message must be {"role": ..., "content": ...}, not 5'),
    ([{"role": "user", "content": 0}], "the content of a message must be a string (found int)"),
    ([{"role": "assistant", "content": 5}], "the content of a message must be a string (found int)"),
    ([{"role": "user", "content": [5]}], 'a content part must be {"type": "text", "text": ...}, not 5'),
    ([{"role": "user", "content": [{"type": "x" * 41}]}],
     f"a content part must be of type text, not '{'x' * 40}'"),
    ([{"role": "user", "content": [{"type": 5, "text": "Hi"}]}], 'a content part must be '
     "{\"type\": \"text\", \"text\": ...}, not {'type': 5, 'text': 'Hi'}"),
    ([{"role": "user", "content": [[5] * 99]}],
     'a content part must be {"type": "text", "text": ...}' + f", not {[5] * 99}"[:100]),
    ([{"role": "user", "content": [{"type": "text"}]}], "a content part of type 'text' must have a string as its text, "
    "not None"),
    ([{"role": "user", "content": [{"type": "text", "text": [5] * 99}]}],
     f"a content part of type 'text' must have a string as its text, not {[5] * 99}"[:100]),
])  # fmt: skip
def test_invalid_conversations_are_refused(messages, problem: str):
    with pytest.raises(UsageError, match=f"^{re.escape(problem)}$"):
        validate_messages(messages)


def test_text_parts_are_joined():
    calls = {"role": "assistant", "content": None}
    assert validate_messages([USER, calls]) == [USER, calls] and validate_messages(()) == []
    parts = {"role": "user", "content": ["a", {"type": "text", "text": "b"}], "name": "x"}
    assert (
        validate_messages([parts]) == [{"role": "user", "content": "a\nb", "name": "x"}] and parts["content"][0] == "a"
    )


def test_a_template_that_refuses_strings_gets_parts():
    source = "{# type #}{% if messages[0].content is string %}X{% endif %}{{ messages[0].content[0].text }}"
    assert render(source.replace("X", "{{ raise_exception('parts') }}")) == render(source) == "Hi"
    assert render("{# type #}{{ messages[0].content }}") == "Hi"


@pytest.mark.parametrize(("message", "reason"), [
    ("a\n  b ", "a b"), ("x" * 300, "x" * 200), ("", "ValueError"), ("a\x1bb\u202ec", "a\ufffdb\ufffdc"),
])  # fmt: skip
def test_reasons_are_short_lines(message: str, reason: str):
    assert _describe_error(ValueError(message)) == reason


@pytest.mark.parametrize(("message", "read"), [
    ({"content": None, "x": 1}, {"x": 1}), ({"content": ""}, {"content": ""}),
    *(({name: "a"}, {name: "a", "thinking": "a", "reasoning_content": "a"})
      for name in ("reasoning_content", "thinking", "reasoning")),
    ({"reasoning": "a", "thinking": "b"}, {"reasoning": "a", "thinking": "b", "reasoning_content": "b"}),
    ({"thinking": "a", "reasoning_content": "b"}, {"thinking": "a", "reasoning_content": "b"}),
])  # fmt: skip
def test_messages_are_passed_as_hugging_face_does(message: dict, read: dict):
    assert _to_hugging_face(message) == read


def test_contents_are_converted_to_parts():
    parts = {"role": "user", "content": [{"type": "text", "text": "Hi"}]}
    assert _to_parts(USER) == parts and _to_parts(parts) == parts and _to_parts({"role": "user"}) == {"role": "user"}
