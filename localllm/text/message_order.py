"""Other ways to write a conversation down, for templates that know one system message, or roles that take turns.

Nothing is said twice and nothing is lost: texts of system messages go to the leading one or to a user's message, and
neighbours of one role become one message.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import Any

from localllm.text.marker_escaping import Message
from localllm.text.messages import short_id

BETWEEN, LAST = "between", "last"  # where a later system message is
ALONE, ANSWERED = "alone", "answered"  # there are no others; an answer is the last message
NO_ANSWER = " "  # where a turn is missing: Ministral refuses an answer that says nothing at all

KeepsSystem = Callable[[int, str], bool]


def arrangements(messages: Sequence[Message], keeps_system: KeepsSystem) -> Iterator[Sequence[Message]]:
    """Yield ways to write a conversation, the nearest to it first.

    keeps_system: whether the template keeps all system messages of a conversation, see ChatTemplate.keeps_system.
    """
    if not messages:
        return
    latest = place_systems(messages, keeps_system)
    yield latest
    for change in (fill_contents, shorten_ids, merge_neighbours, take_turns, lead_systems, take_turns, ensure_user):
        before, latest = latest, change(latest)
        if latest != before:
            yield latest


def system_probe(at_head: int, later: str) -> tuple[list[Message], list[str]]:
    """Return a conversation that has system messages in such places, and the marks that their texts are."""
    said = {"user": "Hi", "assistant": "Hello"}
    behind = {"": [], BETWEEN: ["assistant", "system", "user"], LAST: ["system"], ANSWERED: ["assistant"]}
    roles = ["system"] * at_head + (["user", *behind[later]] if later != ALONE else [])
    marks = [f"xyzzy{place}" for place in range(len(roles))]
    probe = [{"role": role, "content": said.get(role, mark)} for role, mark in zip(roles, marks, strict=True)]
    return probe, [message["content"] for message in probe if message["role"] == "system"]


def place_systems(messages: Sequence[Message], keeps_system: KeepsSystem) -> Sequence[Message]:
    """Return the conversation with system messages only where the template keeps them."""
    count = count_head(messages)
    head, rest = list(messages[:count]), list(messages[count:])
    if not count and not any(is_system(message) for message in rest):
        return messages
    if not rest:
        return messages if keeps_system(count, ALONE) else without_systems(messages)
    if not keeps_system(1, ""):
        return without_systems(messages)
    if count and rest[-1]["role"] in ("assistant", "tool") and not keeps_system(1, ANSWERED):
        head, rest = [], tell_latest_user(head, rest)
    if len(head) > 1 and not keeps_system(count, ""):
        head = [join(head)]
    places = {LAST if is_last(rest, place) else BETWEEN for place, message in enumerate(rest) if is_system(message)}
    if all(keeps_system(min(len(head), 1), place) for place in places):
        return [*head, *rest] if len(head) != count else messages
    return lead_systems([*head, *rest])


def lead_systems(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with system messages in front of all others only."""
    count = count_head(messages)
    leading, moved = move_to_users(messages[count:])
    return [*([join([*messages[:count], *leading])] if leading else messages[:count]), *moved]


def tell_latest_user(head: Sequence[Message], rest: Sequence[Message]) -> list[Message]:
    """Return a conversation with system messages in front of its latest user's: where Mistral's templates put them.

    They do so only where that is the last message of all; behind an answer or a result they drop them.
    """
    place = next((place for place in reversed(range(len(rest))) if rest[place]["role"] == "user"), None)
    if place is None:
        return [{**join(head), "role": "user"}, *rest]
    asked = {**rest[place], "content": joined([*texts(head), rest[place]["content"]])}
    return [*rest[:place], asked, *rest[place + 1 :]]


def without_systems(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with the texts of all system messages in users' messages."""
    leading, moved = move_to_users(messages)
    for text in reversed(leading):
        place = next((place for place, message in enumerate(moved) if message["role"] == "user"), None)
        if place is None:
            moved.insert(0, {**text, "role": "user"})
        else:
            moved[place] = {**moved[place], "content": joined([text["content"], moved[place]["content"]])}
    return moved


def ensure_user(messages: Sequence[Message]) -> Sequence[Message]:
    """Return the conversation with its system messages as a user's where no user says anything."""
    return messages if any(message["role"] == "user" for message in messages) else without_systems(messages)


def move_to_users(messages: Sequence[Message]) -> tuple[list[Message], list[Message]]:
    """Return the system messages that no user's message takes, and the others with the texts of the rest.

    A text goes to the user's message that follows it, or becomes one at the end, or goes to the latest one before it.
    """
    leading, moved, waiting = list[Message](), list[Message](), list[Message]()
    for place, message in enumerate(messages):
        if not is_system(message):
            if waiting and message["role"] == "user":
                message = {**message, "content": joined([*texts(waiting), message["content"]])}
                waiting = []
            moved.append(message)
            continue
        following = next((each["role"] for each in messages[place:] if not is_system(each)), None)
        earlier = next((back for back in reversed(range(len(moved))) if moved[back]["role"] == "user"), None)
        if following == "user":
            waiting.append(message)
        elif following is None and (not moved or moved[-1]["role"] == "assistant"):
            moved.append({**message, "role": "user"})
        elif earlier is not None:
            moved[earlier] = {**moved[earlier], "content": joined([moved[earlier]["content"], message["content"]])}
        else:
            leading.append(message)
    return leading, moved


def fill_contents(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with an empty text as every content that is None or not there."""
    return [message if message.get("content") is not None else {**message, "content": ""} for message in messages]


def shorten_ids(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with ids of calls that all have nine letters and digits, as Mistral's have to."""

    def short(id: Any) -> Any:
        return short_id(id) if isinstance(id, str) and not (len(id) == 9 and id.isalnum()) else id

    found = list[Message]()
    for message in messages:
        if message.get("tool_calls"):
            message = {
                **message,
                "tool_calls": [{**call, "id": short(call.get("id"))} for call in message["tool_calls"]],
            }
        if "tool_call_id" in message:
            message = {**message, "tool_call_id": short(message["tool_call_id"])}
        found.append(message)
    return found


def merge_neighbours(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with users' messages in a row as one, and answers in a row as one."""
    merged = list[Message]()
    for message in messages:
        if merged and message["role"] == merged[-1]["role"] and message["role"] != "tool":
            merged[-1] = join([merged[-1], message])
        else:
            merged.append(message)
    return merged


def take_turns(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with users and answers in turn, which a user begins.

    An answer that says nothing goes away; one that nobody asked for follows a message that says nothing, and so does a
    user behind the result of a call.
    """
    kept = [message for message in messages if not is_empty_answer(message) or message is messages[-1]]
    turns = list[Message]()
    for message in merge_neighbours(kept):
        before = turns[-1]["role"] if turns else "system"
        if message["role"] == "assistant" and before == "system":
            turns.append({"role": "user", "content": ""})
        if message["role"] == "user" and before == "tool":
            turns.append({"role": "assistant", "content": NO_ANSWER})
        turns.append(message)
    return turns


def join(messages: Sequence[Message]) -> Message:
    """Return messages of one role as one: contents, thoughts and calls, each in their order."""
    together: Message = {}
    for message in messages:
        together |= message
    together["content"] = joined(texts(messages))
    for name in ("reasoning_content", "reasoning", "thinking"):
        if any(message.get(name) for message in messages):
            together[name] = joined([message.get(name) for message in messages])
    if calls := [call for message in messages for call in message.get("tool_calls") or ()]:
        together["tool_calls"] = calls
    return together


def joined(contents: Sequence[Any]) -> Any:
    """Return contents as one, texts or lists of parts."""
    said = [content for content in contents if content]
    if all(isinstance(content, str) for content in said):
        return "\n\n".join(said)
    return [
        part
        for content in said
        for part in ([{"type": "text", "text": content}] if isinstance(content, str) else content)
    ]


def texts(messages: Sequence[Message]) -> list[Any]:
    return [message.get("content") for message in messages]


def count_head(messages: Sequence[Message]) -> int:
    """Return how many system messages there are in front of all others."""
    return next((place for place, message in enumerate(messages) if not is_system(message)), len(messages))


def is_system(message: Message) -> bool:
    return message["role"] == "system"


def is_last(messages: Sequence[Message], place: int) -> bool:
    """Return whether nothing but system messages follows."""
    return all(is_system(message) for message in messages[place:])


def is_empty_answer(message: Message) -> bool:
    return message["role"] == "assistant" and not (message.get("content") or message.get("tool_calls"))
