"""Test that all words of a message reach the prompt, even if a template cuts at reasoning tags."""

from pathlib import Path
from typing import Any

import pytest
from tiny_model import write_tiny_model

from localllm.generation.conversation import ChatFormat
from localllm.generation.reasoning import TagFormat
from localllm.text.templates import ChatTemplate, find_tags
from localllm.text.tokenizer import Tokenizer

CUTTING = (
    "{% for m in messages %}[{{ m.role }}]{% set c = m.content %}"
    "{% if '</think>' in c %}{% set c = c.split('</think>')[-1] %}{% endif %}{{ c }}{% endfor %}"
)
TEXTS = [
    "Write </think> and go on.", "First <think> opens, then </think> closes.", "It ends with </think>",
    "a</think>b<think>c</think>d", "Then [BEGIN FINAL RESPONSE] comes, then [/THINK].",
]  # fmt: skip
MARKS = ("<think>", "</think>")


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    return Tokenizer.from_file(write_tiny_model(tmp_path_factory.mktemp("m") / "tiny.gguf"))


@pytest.fixture(scope="module")
def released(shared: Path) -> dict[str, ChatTemplate]:
    """Return released templates that cut messages somewhere."""
    paths = sorted((shared / "templates").glob("*.jinja"))
    sources = {path.stem: path.read_text(encoding="utf-8") for path in paths}
    return {name: ChatTemplate(source) for name, source in sources.items() if find_tags(source).pattern != "(?!)"}


def prompt_of(tokenizer: Tokenizer, template: ChatTemplate, messages: list[dict[str, Any]]) -> str:
    thoughts = ChatFormat(template, tokenizer).thoughts
    marks = (thoughts.opens, thoughts.closes) if isinstance(thoughts, TagFormat) else None
    rendered = tokenizer.markers.render(template, messages, marks)
    return tokenizer.decode(tokenizer.encode_rendered(rendered), special=True)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("reasoning", [{}, {"reasoning_content": "Hm."}])
@pytest.mark.parametrize("role", ["assistant", "user"])
def test_all_words_of_a_message_reach_the_prompt_of_released_templates(
    released: dict[str, ChatTemplate], tokenizer: Tokenizer, text: str, reasoning: dict[str, str], role: str
):
    contents = {"user": "How?", "assistant": "So."} | {role: text}
    asked = [{"role": "user", "content": contents["user"]}]
    answered = {"role": "assistant", "content": contents["assistant"], **reasoning}
    assert len(released) >= 12
    for name, template in released.items():
        prompt = prompt_of(tokenizer, template, [*asked, answered, {"role": "user", "content": "Go on"}])
        assert text in prompt, name


def test_leading_reasoning_of_an_answer_is_cut_as_the_template_does(tokenizer: Tokenizer):
    template = ChatTemplate(CUTTING)
    answer = {"role": "assistant", "content": "<think>\nHm </think>\n\nYes, </think> ends it."}
    assert prompt_of(tokenizer, template, [answer]) == "[assistant]\n\nYes, </think> ends it."
    separated = {**answer, "reasoning_content": "Hm"}
    assert prompt_of(tokenizer, template, [separated]) == f"[assistant]{answer['content']}"
    assert prompt_of(tokenizer, template, [{**answer, "role": "user"}]) == f"[user]{answer['content']}"


def test_a_continued_answer_keeps_the_words_before_a_tag(tiny: str):
    import localllm

    with localllm.open(tiny, chat_template=CUTTING, cache=False) as model:
        messages = [{"role": "user", "content": "x"}, {"role": "assistant", "content": "Write </think> and"}]
        prompt = model.detokenize(model.chat(messages, max_tokens=1).prompt, special=True)
    assert prompt.endswith("[user]x[assistant]Write </think> and")


@pytest.mark.parametrize(
    ("source", "tags"),
    [
        ("{{ c.split('</think>')[0] }}", ["</think>"]), ('{{ c.partition("[/THINK]") }}', ["[/THINK]"]),
        ("{% if '<a>' in c %}x{% endif %}", ["<a>"]), ("{% set t = '</t>' %}{{ c.split(t)[-1] }}", ["</t>"]),
        ("{{ c | replace('</x>', '') }}", ["</x>"]), ("{{ c[c.find('◁/think▷'):] }}", ["◁/think▷"]),
        ("{{ c.split('\\n') }}{{ c.startswith('<tool_response>') }}{{ '<b>' + c }}", []),
    ],
)  # fmt: skip
def test_tags_at_which_a_template_cuts_are_found(source: str, tags: list[str]):
    assert find_tags(source).findall("<a> <b> </think> [/THINK] </t> </x> ◁/think▷ \n <tool_response>") == tags
