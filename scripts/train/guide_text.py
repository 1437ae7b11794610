"""Compose the training text of the built-in model: conversations about the topics of guide/topics.toml.

Everything is drawn from one seeded random generator, so that the text is the same on every machine. A question is a
pattern of its topic in a random frame ("how do i …", "what is …"), with fillers before and after it, dropped words,
typing errors and varied case and punctuation, as people write.
"""

from __future__ import annotations

import math
import random
import re
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROUNDS = ((1, 120_000), (2, 40_000))  # seed and number of conversations of each round of training
LATER_SEED = 2  # the first round that has the patterns of guide/wordings_later.toml, too

PIECE = r"[()|]|\{\w+\}|[^()|{}]+"  # a token of a pattern
PATTERNS_PER_FRAME = {"ask": 1, "tasks": 2, "things": 4, "flags": 6, "commands": 6, "problems": 2}
MORE_ANSWER = "That is all I know about it. localllm --help and the README say more."

HELD_OUT = sorted(Path(__file__).parent.glob("guide_questions*.toml"))
FILLERS = frozenset(
    re.findall(r"\w+", "the a an my some this that please just so and then here localllm from with in on for")
)

ARTICLES = ("the", "a", "an", "my", "some", "this", "please", "just")
STARTS = "b c d f g h k l m n p r s t v w z br ch cl st tr th sh"  # of syllables of invented words
ENDS = "n r s t l m d k er ing ion y"
STOP_WORDS = (
    "the a an my some this please just what is whats how do i to can you does it of for in with me if when are there "
    "tell want would like need explain about that be will should at on and so"
)


@dataclass(frozen=True)
class Topic:
    """A topic of guide/topics.toml, which explains the fields."""

    answers: str | list[str]
    ask: str = ""
    tasks: str = ""
    things: str = ""
    flags: str = ""
    commands: str = ""
    problems: str = ""
    example: str = ""
    default: str = ""
    weight: float = 1.0
    chatter: bool = False


def load(name: str) -> dict[str, Any]:
    """Read a data file of guide/."""
    return tomllib.loads((Path(__file__).parent / "guide" / f"{name}.toml").read_text("utf-8"))


TOPICS = {name: Topic(**fields) for name, fields in load("topics").items()}
LANGUAGE = load("language")
WORDINGS, LATER = load("wordings"), load("wordings_later")  # {topic: {kind: patterns}}
SYNONYMS, SHORTHAND, FOREIGN_ANSWER = LANGUAGE["synonyms"], LANGUAGE["shorthand"], LANGUAGE["foreign_answer"]


@dataclass(frozen=True)
class Conversation:
    """A system prompt ("" for none) and the turns, pairs of question and answer."""

    system: str
    turns: tuple[tuple[str, str], ...]


def topic_lines(name: str, later: bool = True) -> list[tuple[str, str]]:
    """Return the (kind, pattern) pairs of a topic, some kinds several times; later: with those of round 2."""
    lines = []
    for kind, copies in PATTERNS_PER_FRAME.items():
        more = [WORDINGS.get(name, {}).get(kind, ""), LATER.get(name, {}).get(kind, "") if later else ""]
        text = "\n".join([getattr(TOPICS[name], kind), *more])
        patterns = [line.strip() for line in text.splitlines() if line.strip()]
        lines += [(kind, pattern) for pattern in patterns] * copies
    return lines


def answers_of(topic: Topic) -> tuple[str, ...]:
    """Return the answers of a topic, of which one is drawn."""
    return (topic.answers,) if isinstance(topic.answers, str) else tuple(topic.answers)


class Grammar:
    """Expands patterns at random; each pattern is parsed once."""

    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.macros = LANGUAGE["macros"] | LANGUAGE["foreign"]
        self.words, self.starts, self.ends = LANGUAGE["words"].split(), STARTS.split(), [*ENDS.split(), "", "", ""]
        self.parsed: dict[str, list] = {}

    def expand(self, pattern: str) -> str:
        """Return a random expansion of a pattern."""
        if pattern not in self.parsed:
            self.parsed[pattern] = self._parse(iter(re.findall(PIECE, pattern)))
        return re.sub(" +", " ", self._expand(self.parsed[pattern])).strip()

    def _parse(self, pieces: Iterator[str]) -> list:
        """Return the alternatives up to the closing bracket, each a list of strings and lists of alternatives."""
        alternatives: list[list] = [[]]
        for piece in pieces:
            if piece == ")":
                break
            if piece == "|":
                alternatives.append([])
            elif piece == "(":
                alternatives[-1].append(self._parse(pieces))
            elif piece.startswith("{") and piece[1:-1] in self.macros:
                alternatives[-1].append(self._parse(iter(re.findall(PIECE, self.macros[piece[1:-1]]))))
            else:
                alternatives[-1].append(piece)
        return alternatives

    def _expand(self, alternatives: list) -> str:
        words = []
        for piece in self.rng.choice(alternatives):
            if isinstance(piece, list):
                words.append(self._expand(piece))
            elif piece == "{word}":
                words.append(self.rng.choice(self.words) if self.rng.random() < 0.6 else self.invented_word())
            elif piece == "{gibberish}":
                words.append(self.invented_word() if self.rng.random() < 0.6 else self.mashed_keys())
            else:
                words.append(piece)
        return "".join(words)

    def invented_word(self) -> str:
        """Return an invented word, so that the model learns to recognize words that it does not know."""
        syllables = range(self.rng.randint(1, 3))
        parts = [self.rng.choice(self.starts) + self.rng.choice("aeiou") for _ in syllables]
        return "".join(parts) + self.rng.choice(self.ends)

    def mashed_keys(self) -> str:
        """Return random letters."""
        return "".join(self.rng.choices("qwertzuiopasdfghjklyxcvbnm", k=self.rng.randint(2, 8)))


class Composer:
    """Draws conversations."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        self.grammar = Grammar(self.rng)
        self.stop_words = set(STOP_WORDS.split())
        self.names = list(TOPICS)
        self.frames = {
            kind: [line.strip() for line in frames.strip().splitlines()] for kind, frames in LANGUAGE["frames"].items()
        }
        self.foreign_lines = LANGUAGE["foreign_questions"].strip().splitlines()
        self.lines = {name: topic_lines(name, later=seed >= LATER_SEED) for name in TOPICS}
        self.weights = [TOPICS[name].weight * math.sqrt(len(set(self.lines[name])) + 4) for name in self.names]
        self.held_out = held_out()

    def conversation(self, single: bool) -> Conversation:
        """Draw a conversation of 1 to 10 turns, mostly 1; single: one turn, without a system prompt."""
        length = 1 if single else self.rng.choices((1, 2, 3, 4, 6, 10), (82, 10, 4, 2, 1.2, 0.8))[0]
        turns: list[tuple[str, str]] = []
        topic: Topic | None = None
        while len(turns) < length:
            if turns and self.rng.random() < 0.35:
                turns.append(self.follow_up(topic, turns[-1][1]))
            else:
                topic, turn = self.first_turn()
                while core(turn[0]) in self.held_out:
                    topic, turn = self.first_turn()
                turns.append(turn)
        system = self.grammar.expand(LANGUAGE["system"]) if not single and self.rng.random() < 0.12 else ""
        return Conversation(system, tuple(turns))

    def first_turn(self) -> tuple[Topic | None, tuple[str, str]]:
        """Draw a question that needs no context, and its answer; the topic is None for other subjects."""
        if self.rng.random() < 0.11:
            question = self.grammar.expand(self.rng.choice(self.foreign_lines))
            return None, (self.disguise(question, chatter=True), FOREIGN_ANSWER)
        name = self.rng.choices(self.names, self.weights)[0]
        topic = TOPICS[name]
        kind, pattern = self.rng.choice(self.lines[name])
        frame = self.rng.choice(self.frames[kind]).replace("{}", pattern)
        question = self.disguise(self.grammar.expand(frame), topic.chatter)
        return topic, (question, self.rng.choice(answers_of(topic)))

    def follow_up(self, topic: Topic | None, previous: str) -> tuple[str, str]:
        """Draw a question about the previous answer, and its answer."""
        choices = [(LANGUAGE["more"], MORE_ANSWER), (LANGUAGE["again"], previous)]
        if topic:
            choices += [(LANGUAGE["example"], topic.example or MORE_ANSWER)] * (4 if topic.example else 1)
            choices += [(LANGUAGE["default"], topic.default)] * (4 if topic.default else 0)
        pattern, answer = self.rng.choice(choices)
        return self.punctuate(self.misspell(self.grammar.expand(pattern), 0.1)), answer

    def disguise(self, question: str, chatter: bool) -> str:
        """Vary a question: fillers, synonyms, shorthand, dropped words, typing errors, punctuation."""
        rng = self.rng
        if not chatter and rng.random() < 0.4:
            question = self.exchange_words(question)
        if rng.random() < 0.3:
            question = self.grammar.expand(LANGUAGE["before"] + " ") + " " + question
        if not chatter and rng.random() < 0.2:
            question += " " + self.grammar.expand(LANGUAGE["after_localllm"])
        if rng.random() < 0.2:
            question += self.grammar.expand(LANGUAGE["after"]).join(" " if question[-1:].isalnum() else ("", ""))
        if rng.random() < 0.15:
            question = self.shorten(question)
        if rng.random() < 0.5:
            question = re.sub(r"\b(what|that|it|who|how|where)s\b", r"\1's", question)
            question = re.sub(r"\b(do|does|is|was|wo|ca|should|could|did|has|have)nt\b", r"\1n't", question)
            question = re.sub(r"\bi(m|ve|d)\b", r"i'\1", question)
        if rng.random() < 0.25:
            question = self.drop_words(question, keywords=not chatter and rng.random() < 0.3)
        return self.punctuate(self.misspell(question, 0.15))

    def exchange_words(self, text: str) -> str:
        """Replace some words by synonyms."""
        words = text.split(" ")
        return " ".join(
            self.rng.choice(SYNONYMS[word]) if word in SYNONYMS and self.rng.random() < 0.4 else word for word in words
        )

    def shorten(self, text: str) -> str:
        """Abbreviate common phrases as people type them in a hurry."""
        for phrase, forms in SHORTHAND.items():
            if self.rng.random() < 0.6:
                text = re.sub(rf"\b{phrase}\b", self.rng.choice(forms), text)
        return text

    def drop_words(self, text: str, keywords: bool) -> str:
        """Drop the articles or one word, or keep only the keywords."""
        words = text.split()
        if keywords:
            kept = [word for word in words if word.strip(",.:?") not in self.stop_words]
            return " ".join(kept) if len(kept) > 1 else text
        if self.rng.random() < 0.6:
            kept = [word for word in words if word not in ARTICLES]
        else:
            lost = self.rng.randrange(len(words)) if len(words) > 4 else -1
            kept = [word for index, word in enumerate(words) if index != lost]
        return " ".join(kept) or text

    def misspell(self, text: str, probability: float) -> str:
        """Swap, drop, double or replace one or two letters, with this probability."""
        if self.rng.random() >= probability:
            return text
        for _ in range(self.rng.randint(1, 2)):
            places = [index for index in range(1, len(text)) if text[index - 1 : index + 1].isalpha()]
            if len(places) < 4:
                break
            at = self.rng.choice(places)
            a, b = text[at - 1], text[at]
            pair = self.rng.choice((b + a, a, a + b + b, a + self.rng.choice("etaoinsrhl")))
            text = text[: at - 1] + pair + text[at + 1 :]
        return text

    def punctuate(self, text: str) -> str:
        """Vary the case and the final punctuation mark."""
        style = self.rng.random()
        if style < 0.42:
            text = re.sub(r"(^|[.?!] )([a-z])", lambda match: match[1] + match[2].upper(), text)
            text = re.sub(r"\bi\b(?!')", "I", text) if self.rng.random() < 0.8 else text
        elif style < 0.45:
            text = text.upper()
        text = re.sub(r" ([,.:])(?= |$)", r"\1", text).strip()
        if text[-1:].isalnum():
            text += self.rng.choices(("?", "", ".", "??", "!", " ?", "..."), (52, 36, 5, 2, 3, 1, 1))[0]
        return text


def conversations(seed: int, count: int) -> Iterator[Conversation]:
    """Draw the training text, always the same for a seed and a count; the first third is single questions."""
    composer = Composer(seed)
    return (composer.conversation(single=index < count // 3) for index in range(count))


def normalize(question: str) -> str:
    """Return a question's words in lower case, to compare questions."""
    return " ".join(re.findall(r"[a-z0-9]+", question.lower()))


def core(question: str) -> frozenset[str]:
    """Return a question's words without fillers; questions with the same words are near copies."""
    words = re.sub(r"\b(what|where|who|how|it|that) ?s\b", r"\1 is", normalize(question))
    return frozenset(words.split()) - FILLERS


def held_out() -> set[frozenset[str]]:
    """Return the cores of all questions that score the model, which the training text leaves out."""
    return {core(each["ask"]) for path in HELD_OUT for each in tomllib.loads(path.read_text("utf-8"))["question"]}


def training_questions() -> set[str]:
    """Return all questions of the training text, normalized."""
    return {
        normalize(question)
        for seed, count in ROUNDS
        for conversation in conversations(seed, count)
        for question, _ in conversation.turns
    }
