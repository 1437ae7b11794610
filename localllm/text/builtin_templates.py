"""Provide chat templates for files without one, under llama.cpp's names.

Most of them have a format for the messages of each role: {text} is the content, {trimmed} the content without
surrounding white space, {role} the role. Source: llm_chat_apply_template in llama.cpp's src/llama-chat.cpp; "plain" is
our own.
"""

import re
from collections.abc import Mapping

from localllm.errors import UsageError

# The text of a message: its content, or its joined parts.
_MACRO = (
    "{% macro said(message) %}{% if message.content is string %}{{ message.content }}"
    "{% else %}{% for part in message.content or [] %}{{ part.text }}{% endfor %}{% endif %}{% endmacro %}"
)
_EXPRESSIONS = {"{text}": "said(message)", "{trimmed}": "said(message).strip()", "{role}": "message.role"}


def _format_jinja(layout: str) -> str:
    """Convert a format to Jinja code.

    Line breaks go into string literals, where Jinja does not trim them.
    """
    parts = [part for part in re.split(r"(\{text\}|\{trimmed\}|\{role\})", layout) if part]
    return "".join(f"{{{{ {_EXPRESSIONS.get(part) or _quote_string(part)} }}}}" for part in parts)


def _quote_string(text: str) -> str:
    return "'" + text.replace("\\", "\\\\").replace("'", "\\'").replace("\n", "\\n") + "'"


def _make_template(
    prompt: str, others: str = "", roles: Mapping[str, str] | None = None, begin: str = "", before: str = ""
) -> str:
    """Build a template that writes each message in the format of its role.

    roles: formats by role. others: format of all other roles. prompt: beginning of an answer. begin: text before the
    conversation. before: Jinja code before every message.
    """
    formats = "".join(
        f"{{% if message.role == '{role}' %}}{_format_jinja(layout)}{{% else %}}"
        for role, layout in (roles or {}).items()
    )
    ends = "{% endif %}" * len(roles or {})
    loop = f"{{% for message in messages %}}{before}{formats}{_format_jinja(others)}{ends}{{% endfor %}}"
    end = f"{{% if add_generation_prompt %}}{_format_jinja(prompt)}{{% endif %}}" if prompt else ""
    return _MACRO + _format_jinja(begin) + loop + end


def _make_three_role_template(prompt: str, system: str, user: str, assistant: str, begin: str = "") -> str:
    return _make_template(prompt, "", {"system": system, "user": user, "assistant": assistant}, begin)


def _make_instruction_template(begin: str, again: str, system: str, user: str, assistant: str) -> str:
    """Build a template like Llama 2's or Mistral's, with an instruction block before every answer.

    begin, again: beginnings of the first block and of later ones.
    """
    answered = "loop.previtem.role not in ('system', 'user')"
    before = f"{{% if loop.first %}}{_format_jinja(begin)}{{% elif {answered} %}}{_format_jinja(again)}{{% endif %}}"
    return _make_template("", assistant, {"system": system, "user": user}, before=before)


def _make_llama2_template(system: str, content: str = "{text}", again: str = "[INST] ") -> str:
    return _make_instruction_template("[INST] ", again, system, f"{content} [/INST]", f"{content}</s>")


def _make_folding_template(prompt: str, user: str, assistant: str, content: str = "{text}") -> str:
    """Build a template that writes system messages into the user message after them."""
    keep = f"{{% set kept.text = kept.text ~ {_EXPRESSIONS[content]} %}}"
    give = "{{ kept.text ~ ('\\n\\n' if kept.text else '') }}{% set kept.text = '' %}"
    head, tail = user.split(content)
    return (
        f"{_MACRO}{{% set kept = namespace(text='') %}}{{% for message in messages %}}"
        f"{{% if message.role == 'system' %}}{keep}"
        f"{{% elif message.role == 'assistant' %}}{_format_jinja(assistant)}"
        f"{{% else %}}{_format_jinja(head)}{give}{_format_jinja(content + tail)}{{% endif %}}{{% endfor %}}"
        + (f"{{% if add_generation_prompt %}}{_format_jinja(prompt)}{{% endif %}}" if prompt else "")
    )


_BAILING_ROLE = "<role>{{ 'HUMAN' if message.role == 'user' else message.role.upper() }}</role>"
_GRANITE = _make_template(
    "<|start_of_role|>assistant<|end_of_role|>", "<|start_of_role|>{role}<|end_of_role|>{text}<|end_of_text|>\n"
)
_EXAONE = {
    "system": "[|system|]{trimmed}[|endofturn|]\n",
    "user": "[|user|]{trimmed}\n",
    "assistant": "[|assistant|]{trimmed}[|endofturn|]\n",
}
_KIMI = {role: f"<|im_{role}|>{role}<|im_middle|>{{text}}<|im_end|>" for role in ("system", "user", "assistant")}
_KIMI["tool"] = "<|im_system|>tool<|im_middle|>{text}<|im_end|>"
_PANGU_NAMES = {"system": "系统", "user": "用户", "assistant": "助手", "tool": "工具", "function": "方法"}
_PANGU = {role: f"[unused9]{name}：{{text}}[unused10]" for role, name in _PANGU_NAMES.items()}

BUILTIN_TEMPLATES: dict[str, str] = {
    "bailing": _make_template("<role>ASSISTANT</role>", "{text}", before=_BAILING_ROLE),
    "bailing-think": _make_template("<role>ASSISTANT</role><think>", "{text}", before=_BAILING_ROLE),
    "bailing2": _make_template("<role>ASSISTANT</role>", "{text}<|role_end|>",
        before="{% if loop.first and message.role != 'system' %}"
        f"{_format_jinja('<role>SYSTEM</role>detailed thinking off<|role_end|>')}{{% endif %}}{_BAILING_ROLE}"),
    "chatglm3": _make_template("<|assistant|>", "<|{role}|>\n {text}", begin="[gMASK]sop"),
    "chatglm4": _make_template("<|assistant|>\n", "<|{role}|>\n{text}", begin="[gMASK]<sop>"),
    "chatml": _make_template("<|im_start|>assistant\n", "<|im_start|>{role}\n{text}<|im_end|>\n"),
    "command-r": _make_three_role_template("<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|SYSTEM_TOKEN|>{trimmed}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|USER_TOKEN|>{trimmed}<|END_OF_TURN_TOKEN|>",
        "<|START_OF_TURN_TOKEN|><|CHATBOT_TOKEN|>{trimmed}<|END_OF_TURN_TOKEN|>"),
    "deepseek": _make_three_role_template("### Response:\n", "{text}", "### Instruction:\n{text}\n",
    "### Response:\n{text}\n<|EOT|>\n"),
    "deepseek-ocr": _make_template("", "{text}"),
    "deepseek2": _make_three_role_template("Assistant:", "{text}\n\n", "User: {text}\n\n",
    "Assistant: {text}<｜end▁of▁sentence｜>"),
    "deepseek3": _make_three_role_template("<｜Assistant｜>", "{text}\n\n", "<｜User｜>{text}",
        "<｜Assistant｜>{text}<｜end▁of▁sentence｜>"),
    "exaone-moe": _make_template("<|assistant|>\n", "<|{role}|>\n{trimmed}<|endofturn|>\n"),
    "exaone3": _make_template("[|assistant|]", "", _EXAONE),
    "exaone4": _make_template("[|assistant|]", "", {**_EXAONE, "tool": "[|tool|]{trimmed}[|endofturn|]\n"}),
    "falcon3": _make_template("<|assistant|>\n", "<|{role}|>\n{text}\n"),
    "gemma": _make_folding_template("<start_of_turn>model\n", "<start_of_turn>{role}\n{trimmed}<end_of_turn>\n",
        "<start_of_turn>model\n{trimmed}<end_of_turn>\n", content="{trimmed}"),
    "gigachat": _make_three_role_template("assistant<|role_sep|>", "{text}<|message_sep|>",
        "user<|role_sep|>{text}<|message_sep|>available functions<|role_sep|>[]<|message_sep|>",
        "assistant<|role_sep|>{text}<|message_sep|>", begin="<s>"),
    "glmedge": _make_template("<|assistant|>", "<|{role}|>\n{text}"),
    "gpt-oss": _make_template("<|start|>assistant", "<|start|>{role}<|message|>{text}<|end|>",
        {"assistant": "<|start|>assistant<|message|>{text}<|return|>"}),
    "granite": _GRANITE,
    "granite-4.0": _GRANITE,
    "granite-4.1": _GRANITE,
    "grok-2": _make_three_role_template("Assistant:", "System: {trimmed}<|separator|>\n\n",
    "Human: {trimmed}<|separator|>\n\n",
        "Assistant: {text}<|separator|>\n\n"),
    "hunyuan-dense": _make_three_role_template("", "{text}<｜hy_place▁holder▁no▁3｜>",
    "<｜hy_User｜>{text}<｜hy_Assistant｜>",
        "<｜hy_Assistant｜>{text}<｜hy_place▁holder▁no▁2｜>"),
    "hunyuan-moe": _make_template("", "<|startoftext|>{text}<|extra_0|>",
        {"system": "<|startoftext|>{text}<|extra_4|>", "assistant": "{text}<|eos|>"}),
    "hunyuan-vl": _make_template("", "{text}<｜hy_User｜>",
        {"system": "{text}<｜hy_place▁holder▁no▁3｜>", "assistant": "{text}<｜hy_Assistant｜>"},
        begin="<｜hy_begin▁of▁sentence｜>"),
    "kimi-k2": _make_template("<|im_assistant|>assistant<|im_middle|>", "{text}<|im_end|>", _KIMI),
    "llama2": _make_llama2_template("{text}\n"),
    "llama2-sys": _make_llama2_template("<<SYS>>\n{text}\n<</SYS>>\n\n"),
    "llama2-sys-bos": _make_llama2_template("<<SYS>>\n{text}\n<</SYS>>\n\n", again="<s>[INST] "),
    "llama2-sys-strip": _make_llama2_template("<<SYS>>\n{trimmed}\n<</SYS>>\n\n", content="{trimmed}"),
    "llama3": _make_template("<|start_header_id|>assistant<|end_header_id|>\n\n",
        "<|start_header_id|>{role}<|end_header_id|>\n\n{trimmed}<|eot_id|>"),
    "llama4": _make_template("<|header_start|>assistant<|header_end|>\n\n",
        "<|header_start|>{role}<|header_end|>\n\n{trimmed}<|eot|>"),
    "megrez": _make_template("<|role_start|>assistant<|role_end|>",
    "<|role_start|>{role}<|role_end|>{text}<|turn_end|>"),
    "minicpm": _make_template("", "{trimmed}", {"user": "<用户>{trimmed}<AI>"}),
    "mistral-v1": _make_instruction_template(" [INST] ", " [INST] ", "{text}\n\n", "{text} [/INST]", " {text}</s>"),
    "mistral-v3": _make_instruction_template("[INST] ", "[INST] ", "{text}\n\n", "{text}[/INST]", " {trimmed}</s>"),
    "mistral-v3-tekken": _make_instruction_template("[INST]", "[INST]", "{text}\n\n", "{text}[/INST]", "{text}</s>"),
    "mistral-v7": _make_template("", " {text}</s>",
        {"system": "[SYSTEM_PROMPT] {text}[/SYSTEM_PROMPT]", "user": "[INST] {text}[/INST]"}),
    "mistral-v7-tekken": _make_template("", "{text}</s>",
        {"system": "[SYSTEM_PROMPT]{text}[/SYSTEM_PROMPT]", "user": "[INST]{text}[/INST]"}),
    "monarch": _make_template("<s>assistant\n", "{role}\n{text}</s>\n", before="{% if not loop.first %}<s>{% endif %}"),
    "openchat": _make_template("GPT4 Correct Assistant:", ": {text}<|end_of_turn|>",
    {"system": "{text}<|end_of_turn|>"},
        before="{% if message.role != 'system' %}GPT4 Correct {{ message.role.capitalize() }}{% endif %}"),
    "orion": _make_folding_template("", "Human: {text}\n\nAssistant: </s>", "{text}</s>"),
    "pangu-embedded": _make_template("[unused9]助手：", "", _PANGU,
        before="{% if loop.first and message.role != 'system' %}[unused9]系统：[unused10]{% endif %}"),
    "phi3": _make_template("<|assistant|>\n", "<|{role}|>\n{text}<|end|>\n"),
    "phi4": _make_template("<|im_start|>assistant<|im_sep|>", "<|im_start|>{role}<|im_sep|>{text}<|im_end|>"),
    "plain": _make_template("Assistant:", "{text}\n", {"system": "{text}\n\n"},
        before="{% if message.role != 'system' %}{{ message.role.capitalize() }}: {% endif %}"),
    "rwkv-world": _make_three_role_template("", "System: {trimmed}\n\n", "User: {trimmed}\n\n",
    "Assistant: {trimmed}\n\n")
    + "{% if messages and messages[-1].role == 'user' %}Assistant:{% endif %}",
    "seed_oss": _make_template("<seed:bos>assistant\n", "<seed:bos>{role}\n{text}<seed:eos>",
        {"assistant": "<seed:bos>assistant\n{trimmed}<seed:eos>"}),
    "smolvlm": _make_template("Assistant:", "Assistant: {text}<end_of_utterance>\n",
        {"system": "{text}\n\n", "user": "User: {text}<end_of_utterance>\n"}, begin="<|im_start|>"),
    "solar-open": _make_template("<|begin|>assistant", "<|begin|>{role}<|content|>{text}<|end|>"),
    "vicuna": _make_three_role_template("ASSISTANT:", "{text}\n\n", "USER: {text}\n", "ASSISTANT: {text}</s>\n"),
    "vicuna-orca": _make_three_role_template("ASSISTANT:", "SYSTEM: {text}\n", "USER: {text}\n",
    "ASSISTANT: {text}</s>\n"),
    "yandex": _make_three_role_template(" Ассистент:[SEP]", "", " Пользователь: {text}\n\n", " Ассистент: {text}\n\n"),
    "zephyr": _make_template("<|assistant|>\n", "<|{role}|>\n{text}<|endoftext|>\n"),
}  # fmt: skip


def choose_template(choice: str) -> str:
    """Return the source of a built-in template, or `choice` itself if it is Jinja code. Raises UsageError."""
    if choice in BUILTIN_TEMPLATES:
        return BUILTIN_TEMPLATES[choice]
    if "{%" in choice or "{{" in choice:
        return choice
    raise UsageError(f"unknown chat template {choice[:40]!r}; available: {', '.join(BUILTIN_TEMPLATES)}")
