#!/usr/bin/env python3
"""Record what transformers makes of chat templates, for test_templates.py in tests/goldens/ and tests/unit/text/.

    VENV/bin/python scripts/record/record_templates.py            those of our own, in tests/support/templates
    VENV/bin/python scripts/record/record_templates.py --released FOLDER

VENV is a virtual environment with transformers (recorded: 5.23.0). It is always 1 May 2026, 12:30. Recorded are texts
by template and conversation, null where the template or Jinja refuses; of long texts of released templates the length
and the beginning of the SHA-256. The conversations are those of tests/goldens/chat_renderings.json, for our own some
more.
"""

import argparse
import hashlib
import json
from datetime import datetime
from pathlib import Path

from jinja2 import TemplateError
from tokenizers import Tokenizer, models
from transformers import PreTrainedTokenizerFast
from transformers.utils import chat_template_utils

TESTS = Path(__file__).resolve().parents[2] / "tests"
GOLDENS, SUPPORT = TESTS / "goldens", TESTS / "support"
OWN, RELEASED = GOLDENS / "template_renderings.json", GOLDENS / "chat_renderings.json"
USER = {"role": "user", "content": 'What is 2 < 3 & "é"?'}


def call(number: int, **arguments) -> dict:
    function = {"name": f"tool_{number}", "arguments": arguments}
    return {"id": f"call{number:05}", "type": "function", "function": function}


def tool(name: str, **properties) -> dict:
    parameters = {"type": "object", "properties": properties, "required": [*properties][:1]}
    function = {"name": name, "description": f"What {name} does.", "parameters": parameters}
    return {"type": "function", "function": function}


CALLED = [
    USER,
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [call(1, city="Zürich", days=2), call(2, deep={"x": [True, None]})],
    },
    {"role": "tool", "tool_call_id": "call00001", "name": "tool_1", "content": "sun"},
    {"role": "tool", "tool_call_id": "call00002", "name": "tool_2", "content": "[1]"},
]
DEEP = tool(
    "tool_2",
    deep={"type": "object", "properties": {"x": {"type": ["Array", "null"], "description": "one\ntwo"}}},
    b={"type": "integer"},
    a={"description": "no type"},
)
MORE = {
    "two calls": {"messages": CALLED, "variables": {"tools": [tool("tool_1", city={"type": "string"}), DEEP]}},
    "an answer to no call": {"messages": [*CALLED[:3], CALLED[3] | {"tool_call_id": "call00009"}], "variables": {}},
    "thought between calls": {
        "messages": [
            CALLED[0],
            {**CALLED[1], "reasoning_content": "Ask for both."},
            *CALLED[2:],
            {"role": "assistant", "content": "Sun.", "reasoning_content": "Both came.\n"},
        ],
        "variables": {"add_generation_prompt": False},
    },
    "documents": {
        "messages": [{"role": "system", "content": " Be brief.\n"}, USER],
        "variables": {"documents": [{"title": "A", "text": "é"}, {"id": 3, "title": "B", "text": "x\ny"}]},
    },
    "a date": {"messages": [USER], "variables": {"date_string": "2 Jan 2027"}},
    "kept thoughts": {
        "messages": [
            USER,
            {"role": "assistant", "content": "\n<think>\nCompare.\n</think>\n\nTrue."},
            {"role": "user", "content": [{"type": "image"}, {"type": "text", "text": "And <b>?"}]},
        ],
        "variables": {"keep_thoughts": True, "enable_thinking": False},
    },
    "an unknown part": {"messages": [{"role": "user", "content": [{"type": "sound"}]}], "variables": {}},
    "an unknown role": {"messages": [USER, {"role": "critic", "content": " no "}], "variables": {}},
}


class FirstOfMay(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz=None):
        return cls(2026, 5, 1, 12, 30)


def rendered(source: str, messages: list[dict], variables: dict) -> str | None:
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=Tokenizer(models.BPE()), bos_token="<s>", eos_token="</s>")
    given = {"add_generation_prompt": True, **variables}
    try:
        return tokenizer.apply_chat_template(messages, chat_template=source, tokenize=False, **given)
    except (TemplateError, TypeError, ValueError, AttributeError) as error:
        print(f"    {type(error).__name__}: {error}")
        return None


def recorded(folder: Path, conversations: dict) -> dict[str, dict[str, str | None]]:
    renderings = {}
    for path in sorted(folder.glob("*.jinja")):
        print(path.stem)
        texts = renderings[path.stem] = {}
        for kind, conversation in conversations.items():
            texts[kind] = rendered(path.read_text(), conversation["messages"], conversation["variables"])
    return renderings


def short(text: str | None) -> str | None:
    if text is None or len(text) <= 300:
        return text
    return f"{len(text)} {hashlib.sha256(text.encode()).hexdigest()[:32]}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--released", type=Path, metavar="FOLDER", help="of templates of models")
    folder = parser.parse_args().released
    chat_template_utils.datetime = FirstOfMay
    released = json.loads(RELEASED.read_text())
    if folder:
        renderings = recorded(folder, released["conversations"])
        released["renderings"] = {
            name: {kind: short(text) for kind, text in texts.items()} for name, texts in renderings.items()
        }
        RELEASED.write_text(json.dumps(released, ensure_ascii=False, separators=(",", ":")) + "\n")
    else:
        renderings = recorded(SUPPORT / "templates", released["conversations"] | MORE)
        OWN.write_text(
            json.dumps({"conversations": MORE, "renderings": renderings}, indent=1, ensure_ascii=False) + "\n"
        )


if __name__ == "__main__":
    main()
