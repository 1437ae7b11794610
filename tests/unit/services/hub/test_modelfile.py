"""Test Modelfiles: what they contain, and what `create` makes of twelve usual kinds."""

import pytest

from localllm.errors import UsageError
from localllm.services.hub.go_templates import recognize_template, render_prompt
from localllm.services.hub.modelfile import Modelfile, parse_modelfile

CHATML = """{{ if .System }}<|im_start|>system
{{ .System }}<|im_end|>
{{ end }}{{ if .Prompt }}<|im_start|>user
{{ .Prompt }}<|im_end|>
{{ end }}<|im_start|>assistant
{{ .Response }}<|im_end|>"""
LLAMA3 = """{{- if .System }}<|start_header_id|>system<|end_header_id|>

{{ .System }}<|eot_id|>{{ end }}
{{- range .Messages }}<|start_header_id|>{{ .Role }}<|end_header_id|>

{{ .Content }}<|eot_id|>{{ end }}<|start_header_id|>assistant<|end_header_id|>

"""
GEMMA = """<start_of_turn>user
{{ if .System }}{{ .System }}

{{ end }}{{ .Prompt }}<end_of_turn>
<start_of_turn>model
{{ .Response }}<end_of_turn>"""
PHI3 = """{{ if .System }}<|system|>
{{ .System }}<|end|>
{{ end }}<|user|>
{{ .Prompt }}<|end|>
<|assistant|>
{{ .Response }}<|end|>"""
MISTRAL = "{{ if .System }}[INST] {{ .System }}\n\n{{ .Prompt }} [/INST]{{ else }}[INST] {{ .Prompt }} [/INST]{{ end }}"
MISTRAL_TOOLS = """{{- if .Messages }}
{{- range $index, $_ := .Messages }}
{{- if eq .Role "user" }}
{{- if $.Tools }}[AVAILABLE_TOOLS] {{ $.Tools }}[/AVAILABLE_TOOLS]{{ end }}[INST] {{ .Content }}[/INST]
{{- else if eq .Role "assistant" }}
{{- if .Content }} {{ .Content }}
{{- else if .ToolCalls }}[TOOL_CALLS] [{{ range .ToolCalls }}{{ .Function.Name }}{{ end }}]
{{- end }}</s>
{{- else if eq .Role "tool" }}[TOOL_RESULTS] {{ .Content }} [/TOOL_RESULTS]
{{- end }}
{{- end }}
{{- else }}[INST] {{ if .System }}{{ .System }}

{{ end }}{{ .Prompt }}[/INST]
{{- end }} {{ .Response }}</s>"""
TOOLS = """{{- if .Tools }}<|im_start|>system
You have functions for the weather.
{{- range .Tools }}
{{ . }}{{ end }}<|im_end|>
{{ end }}{{- range .Messages }}<|im_start|>{{ .Role }}
{{ .Content }}{{ if .ToolCalls }}
<tool_call>{{ range .ToolCalls }}call it{{ end }}</tool_call>{{ end }}<|im_end|>
{{ end }}<|im_start|>assistant
"""


def test_values_may_be_quoted_and_have_several_lines():
    text = '# a comment\nfrom base\nSYSTEM """One\n# two\n  three"""\nPARAMETER stop "a b"\nparameter STOP <|x|>\n'
    text += 'LICENSE "L"\n'
    content = parse_modelfile(text, "M")
    assert content == Modelfile(
        "base", parameters={"stop": ["a b", "<|x|>"]}, system="One\n# two\n  three", licenses=("L",)
    )


@pytest.mark.parametrize("text", ["", " two ", 'say "hi"', "a\n\nb", '"', "plain", "# no comment"])
def test_a_formatted_modelfile_reads_as_the_same(text: str):
    content = Modelfile(
        "base", "mmproj.gguf", {"stop": ["x", text or "y"], "temperature": 0.5, "num_ctx": 64}, text,
        ({"role": "user", "content": text}, {"role": "assistant", "content": "b\nc"}), ("a.gguf",), ("L\nM",), CHATML,
    )  # fmt: skip
    assert parse_modelfile(content.format(), "M") == content


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SYSTEM x", "a Modelfile must have one FROM with a model .found 0"),
        ("FROM a\nFROM b", "one FROM with a model .found 2"),
        ("FROM a\nTEMP 1", "M, line 2: unknown instruction 'TEMP'; available: FROM, PARAMETER"),
        ("FROM a\nPARAMETER heat 1", "M, line 2: unknown parameter 'heat'; available: num_ctx"),
        ("FROM a\nPARAMETER seed", "M, line 2: PARAMETER seed needs a value"),
        ("FROM a\nMESSAGE robot hi", "M, line 2: a MESSAGE must begin with system, user, assistant .found 'robot'"),
        ('FROM a\nSYSTEM """x\ny', 'M, line 2: the value has no closing """'),
        ('FROM a\nSYSTEM "x', "M, line 2: the value has no closing"),
    ],
)
def test_a_fault_is_told_with_its_line(text: str, message: str):
    with pytest.raises(UsageError, match=message):
        parse_modelfile(text, "M")


@pytest.mark.parametrize(
    ("template", "name"),
    [(CHATML, "chatml"), (LLAMA3, "llama3"), (GEMMA, "gemma"), (PHI3, "phi3"), (MISTRAL, "mistral-v3"),
     (TOOLS, "chatml"), ("chatml", "chatml")],
)  # fmt: skip
def test_usual_templates_are_recognized(template: str, name: str):
    assert recognize_template(template, None, "M")[0] == name


def test_a_template_with_the_marks_of_the_models_own_is_the_models_own():
    own = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>{% endfor %}"
    assert recognize_template(CHATML, own, "M")[0] is None and recognize_template(TOOLS, own, "M")[0] is None


ZEPHYR = "<|system|>\n{{ .System }}</s>\n<|user|>\n{{ .Prompt }}</s>\n<|assistant|>\n"
ALPACA = "{{ .System }}\n\n### Instruction:\n{{ .Prompt }}\n\n### Response:\n"
RANGE = "{{ range .Messages }}<|im_start|>{{ .Role }}\n{{ .Content }}<|im_end|>\n{{ end }}"
SYSTEM_TURN = "<start_of_turn>system\n{{ .System }}<end_of_turn>\n" + GEMMA.replace("{{ .System }} ", "")


@pytest.mark.parametrize(
    ("template", "difference"),
    [
        (CHATML, "which writes the same"),
        (TOOLS, "which has the same marks"),
        (MISTRAL_TOOLS, "which writes the same"),
        (RANGE, "which has the same marks"),
        (ALPACA, r"which writes other white space: 'SYSTEM### Instruction:\nPROMPT\n### Response:' instead of "
         r"'SYSTEM\n\n### Instruction:\nPROMPT\n\n### Response:'"),
    ],
)  # fmt: skip
def test_a_replacement_that_writes_another_prompt_is_told(template: str, difference: str):
    assert recognize_template(template, None, "M")[1] == difference


@pytest.mark.parametrize(("template", "name"), [(ZEPHYR, "zephyr"), (SYSTEM_TURN, "gemma")])
def test_a_template_that_only_resembles_a_builtin_one_is_refused_by_its_name(template: str, name: str):
    with pytest.raises(UsageError, match=f"M: TEMPLATE resembles the built-in '{name}', which writes '.* instead of"):
        recognize_template(template, None, "M")


def test_an_end_of_text_token_of_the_vocabulary_is_not_compared():
    own = "{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}{{ eos_token }}\n{% endfor %}<|assistant|><|user|>"
    own = own.replace("<|user|>", "{# <|user|> <|system|> #}")
    assert recognize_template(ZEPHYR, own, "M") == (None, "which writes the same")


@pytest.mark.parametrize(
    ("template", "prompt"),
    [
        ("{{ if and .System (not .Tools) }}{{ .System }}:{{ end }} {{- .Prompt }}!{{ .Response }}?", "SYSTEM:PROMPT!"),
        ("{{ if .Messages }}a{{ else if .First }}b{{ else }}c{{ end }}{{ $.Prompt }}", "bPROMPT"),
        ("{{ if .Tools }}a{{ else }}c{{ end }}{{ range .Messages }}{{ .Role }}{{ end }}", "c"),
        ("{{ .Prompt }}{{ end }}", None),
        ("{{ json .Prompt }}", None),
    ],
)
def test_a_prompt_is_rendered_as_templates_in_gos_syntax_do(template: str, prompt: str | None):
    assert render_prompt(template) == prompt


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ .Prompt }}", "M: TEMPLATE does not use the control tokens of a known chat format"),
        (
            "<|odd|>{{ .Prompt }}<|even|>",
            "M: TEMPLATE has control tokens of an unknown chat format: <.even.>, <.odd.>",
        ),
        (
            CHATML.replace("{{ .System }}", "Talk like a pirate. {{ .System }}"),
            "contains the text 'Talk like a pirate",
        ),
    ],
)
def test_other_templates_are_refused_by_their_marks_or_words(template: str, message: str):
    with pytest.raises(UsageError, match=message):
        recognize_template(template, None, "M")
