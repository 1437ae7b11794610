"""Validate conversations from programs and files, and rearrange them for restrictive templates.

Some templates allow only one system message, or only alternating roles. No text is duplicated or lost: system messages
are merged into the leading one or into a user message, and consecutive messages of one role into one.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from localllm.errors import UsageError

Message = dict[str, Any]  # {"role": "system", "user" or "assistant", "content": its text}

# Other programs' names of roles, and those of templates.
ROLES = {
    "system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool",
    "function": "tool",
}  # fmt: skip


def require_messages(messages: Sequence[Message]) -> list[Message]:
    """Return messages as a list. Raises UsageError for a single text or message."""
    if isinstance(messages, str | bytes | Mapping):
        raise UsageError(
            f'messages must be a list, [{{"role": "user", "content": ...}}], not {type(messages).__name__}'
        )
    return [*messages]


def validate_messages(messages: Sequence[Message]) -> list[Message]:
    """Return validated messages, each content converted to a string. Raises UsageError.

    Parts as in OpenAI's API, [{"type": "text", "text": ...}], are joined by newlines, as in llama.cpp. A missing
    content becomes "", an assistant's None, because templates may treat None and "" differently. Roles and calls of
    OpenAI's legacy APIs are converted to the current ones.
    """
    return [_validate_message(message) for message in require_messages(messages)]


def _validate_message(message: object) -> Message:
    if not isinstance(message, dict) or not isinstance(message.get("role"), str):
        raise UsageError('a message must be {"role": ..., "content": ...}' + f", not {message!r}")
    modern: Message = convert_legacy_fields(message)
    role, content = modern["role"], modern.get("content")
    if content is None:
        return {**modern, "content": None if role == "assistant" else ""}
    if isinstance(content, str):
        return modern
    if isinstance(content, list):
        return {**modern, "content": "\n".join(map(_get_part_text, content))}
    raise UsageError(f"the content of a message must be a string (found {type(content).__name__})")


def convert_legacy_fields(message: Message) -> Message:
    """Convert roles and fields of OpenAI's legacy APIs to the current ones.

    `function_call` becomes the only entry of tool_calls; `refusal` becomes the content if that is empty. A call and its
    result, which only the function's name connects, get an id derived from that name.
    """
    role = message.get("role")
    fields = {key: value for key, value in message.items() if key not in ("function_call", "refusal")}
    fields["role"] = ROLES.get(role, role) if isinstance(role, str) else role
    call, refusal = message.get("function_call"), message.get("refusal")
    if isinstance(call, dict) and not message.get("tool_calls"):
        fields["tool_calls"] = [{"id": make_short_id(str(call.get("name"))), "type": "function", "function": call}]
    if isinstance(refusal, str) and not message.get("content"):
        fields["content"] = refusal
    if role == "function":
        fields["tool_call_id"] = make_short_id(str(message.get("name")))
    return fields


def make_short_id(text: str) -> str:
    """Derive a call id of nine letters and digits from a string, as some templates require."""
    return hashlib.sha256(text.encode(errors="replace")).hexdigest()[:9]


def _get_part_text(part: object) -> str:
    """Return the text of a content part. Raises UsageError."""
    if isinstance(part, str):
        return part
    if not isinstance(part, dict) or not isinstance(part.get("type"), str):
        raise UsageError('a content part must be {"type": "text", "text": ...}' + f", not {part!r}"[:100])
    if part["type"] not in ("text", "refusal"):
        raise UsageError(f"a content part must be of type text, not {part['type'][:40]!r}")
    text = part.get(part["type"])
    if not isinstance(text, str):
        raise UsageError(f"a content part of type {part['type']!r} must have a string as its text, not {text!r}"[:100])
    return text


BETWEEN, LAST = "between", "last"  # positions of a system message after the leading ones
ALONE, ANSWERED = "alone", "answered"  # conversations with only system messages, and with an answer at the end
NO_ANSWER = " "  # content of an inserted answer, since Ministral's template refuses an empty one

KeepsSystem = Callable[[int, str], bool]


def iter_arrangements(messages: Sequence[Message], keeps_system: KeepsSystem) -> Iterator[Sequence[Message]]:
    """Yield arrangements of a conversation, the most similar to the original first.

    keeps_system: tells which positions of system messages the template renders, see ChatTemplate.keeps_system.
    """
    if not messages:
        return
    latest = arrange_systems(messages, keeps_system)
    yield latest
    if (single := split_calls(latest)) != latest:
        yield single
    for change in (
        fill_contents,
        shorten_ids,
        merge_neighbours,
        alternate_roles,
        move_systems_first,
        alternate_roles,
        ensure_user,
    ):
        previous, latest = latest, change(latest)
        if latest != previous:
            yield latest
    if (single := split_calls(latest)) != latest:
        yield single


def make_system_probe(at_head: int, later: str) -> tuple[list[Message], list[str]]:
    """Build a conversation with system messages at these positions.

    Returns it with the contents of its system messages, which are unique. Arguments as in ChatTemplate.keeps_system.
    """
    texts_of_marks = {"user": "Hi", "assistant": "Hello"}
    following = {"": [], BETWEEN: ["assistant", "system", "user"], LAST: ["system"], ANSWERED: ["assistant"]}
    roles = ["system"] * at_head + (["user", *following[later]] if later != ALONE else [])
    marks = [f"xyzzy{place}" for place in range(len(roles))]
    probe = [{"role": role, "content": texts_of_marks.get(role, mark)} for role, mark in zip(roles, marks, strict=True)]
    return probe, [message["content"] for message in probe if message["role"] == "system"]


def arrange_systems(messages: Sequence[Message], keeps_system: KeepsSystem) -> Sequence[Message]:
    """Return the conversation with system messages only where the template keeps them."""
    count = count_leading_systems(messages)
    head, turns = list(messages[:count]), list(messages[count:])
    if not count and not any(is_system(message) for message in turns):
        return messages
    if not turns:
        return messages if keeps_system(count, ALONE) else move_systems_to_users(messages)
    if not keeps_system(1, ""):
        return move_systems_to_users(messages)
    if count and turns[-1]["role"] in ("assistant", "tool") and not keeps_system(1, ANSWERED):
        head, turns = [], move_systems_to_latest(head, turns)
    if len(head) > 1 and not keeps_system(count, ""):
        head = [join_messages(head)]
    places = {
        LAST if has_only_systems_left(turns, place) else BETWEEN
        for place, message in enumerate(turns)
        if is_system(message)
    }
    if all(keeps_system(min(len(head), 1), place) for place in places):
        return [*head, *turns] if len(head) != count else messages
    return move_systems_first([*head, *turns])


def move_systems_first(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with all system messages joined at its beginning."""
    count = count_leading_systems(messages)
    leading, moved = move_systems(messages[count:])
    return [*([join_messages([*messages[:count], *leading])] if leading else messages[:count]), *moved]


def move_systems_to_latest(head: Sequence[Message], turns: Sequence[Message]) -> list[Message]:
    """Move system messages into the last user message, as Mistral's templates do.

    The templates do so themselves only if the last message is a user's; after an answer or a tool result they drop
    system messages.
    """
    index = next((index for index in reversed(range(len(turns))) if turns[index]["role"] == "user"), None)
    if index is None:
        return [{**join_messages(head), "role": "user"}, *turns]
    return [*turns[:index], extend_content(turns[index], before=get_contents(head)), *turns[index + 1 :]]


def move_systems_to_users(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with all system messages moved into user messages."""
    leading, moved = move_systems(messages)
    for text in reversed(leading):
        place = next((place for place, message in enumerate(moved) if message["role"] == "user"), None)
        if place is None:
            moved.insert(0, {**text, "role": "user"})
        else:
            moved[place] = extend_content(moved[place], before=[text["content"]])
    return moved


def ensure_user(messages: Sequence[Message]) -> Sequence[Message]:
    """Turn the system messages of a conversation without user messages into a user message."""
    return messages if any(message["role"] == "user" for message in messages) else move_systems_to_users(messages)


def move_systems(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Move system messages into user messages; return those that remain, and all other messages.

    A system message goes into the user message directly after it, becomes a user message after an answer at the end of
    the conversation, and otherwise goes into the latest user message before it. If there is none, it remains.
    """
    leading, moved, waiting = list[Message](), list[Message](), list[Message]()
    for place, message in enumerate(messages):
        if not is_system(message):
            if waiting and message["role"] == "user":
                message, waiting = extend_content(message, before=get_contents(waiting)), []
            moved.append(message)
            continue
        following = next((each["role"] for each in messages[place:] if not is_system(each)), None)
        user_place = next((back for back in reversed(range(len(moved))) if moved[back]["role"] == "user"), None)
        if following == "user":
            waiting.append(message)
        elif following is None and (not moved or moved[-1]["role"] == "assistant"):
            moved.append({**message, "role": "user"})
        elif user_place is not None:
            moved[user_place] = extend_content(moved[user_place], after=[message["content"]])
        else:
            leading.append(message)
    return leading, moved


def fill_contents(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with "" for contents that are None or missing."""
    return [message if message.get("content") is not None else {**message, "content": ""} for message in messages]


def split_calls(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with one tool call per message, each before its result, as Llama 3 requires."""
    split, place = list[Message](), 0
    while place < len(messages):
        message = messages[place]
        calls = message.get("tool_calls") or ()
        end = next((at for at in range(place + 1, len(messages)) if messages[at]["role"] != "tool"), len(messages))
        results, place = list(messages[place + 1 : end]), place + 1
        if len(calls) < 2:
            split.append(message)
            continue
        place = end
        for number, call in enumerate(calls):
            head = message if number == 0 else {"role": message["role"], "content": ""}
            call_results = [result for result in results if result.get("tool_call_id") == call.get("id")]
            split += [{**head, "tool_calls": [call]}, *call_results]
            results = [result for result in results if result not in call_results]
        split += results
    return split


def shorten_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with call ids of nine letters and digits, as Mistral's templates require."""

    def short(id: object) -> object:
        return make_short_id(id) if isinstance(id, str) and not (len(id) == 9 and id.isalnum()) else id

    ids = list[Message]()
    for message in messages:
        if calls := message.get("tool_calls"):
            message = {**message, "tool_calls": [{**call, "id": short(call.get("id"))} for call in calls]}
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": short(message["tool_call_id"])}
        ids.append(message)
    return ids


def merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Join consecutive messages of one role, except tool results."""
    merged = list[Message]()
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] and message["role"] != "tool":
            merged[-1] = join_messages([merged[-1], message])
        else:
            merged.append(message)
    return merged


def alternate_roles(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with alternating roles, beginning with a user.

    Empty answers are dropped. An empty user message is inserted before an answer at the beginning, and an empty answer
    between a tool result and a user message.
    """
    kept_messages = [message for message in messages if not is_empty_answer(message) or message is messages[-1]]
    turns = list[Message]()
    for message in merge_neighbours(kept_messages):
        previous_role = turns[-1]["role"] if turns else "system"
        if message["role"] == "assistant" and previous_role == "system":
            turns.append({"role": "user", "content": ""})
        if message["role"] == "user" and previous_role == "tool":
            turns.append({"role": "assistant", "content": NO_ANSWER})
        turns.append(message)
    return turns


def join_messages(messages: Sequence[Message]) -> Message:
    """Join the contents, reasoning and calls of messages of one role."""
    together: Message = {}
    for message in messages:
        together |= message
    together["content"] = join_contents(get_contents(messages))
    for name in ("reasoning_content", "reasoning", "thinking"):
        if any(message.get(name) for message in messages):
            together[name] = join_contents([message.get(name) for message in messages])
    if calls := [call for message in messages for call in message.get("tool_calls") or ()]:
        together["tool_calls"] = calls
    return together


def join_contents(contents: Sequence[object]) -> str | list[object]:
    """Join contents, strings or lists of parts: to a string if all are strings, else to a list of parts."""
    strings = [content for content in contents if isinstance(content, str) and content]
    lists = [content for content in contents if isinstance(content, list) and content]
    if not lists:
        return "\n\n".join(strings)
    as_lists = ([{"type": "text", "text": each}] if isinstance(each, str) else each for each in contents if each)
    return [part for content in as_lists if isinstance(content, list) for part in content]


def extend_content(message: Message, before: Sequence[object] = (), after: Sequence[object] = ()) -> Message:
    """Return a copy of a message with contents added before and after its own."""
    return {**message, "content": join_contents([*before, message["content"], *after])}


def get_contents(messages: Sequence[Message]) -> list[object]:
    return [message.get("content") for message in messages]


def count_leading_systems(messages: Sequence[Message]) -> int:
    """Count the system messages at the beginning."""
    return next((place for place, message in enumerate(messages) if not is_system(message)), len(messages))


def is_system(message: Message) -> bool:
    result: bool = message["role"] == "system"
    return result


def has_only_systems_left(messages: Sequence[Message], place: int) -> bool:
    """Return whether all messages from `place` on are system messages."""
    return all(is_system(message) for message in messages[place:])


def is_empty_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not (message.get("content") or message.get("tool_calls"))
