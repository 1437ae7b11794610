"""Test localllm run with a prompt beyond the context: cut by lines, or asked part by part."""

import json
import math
from pathlib import Path
from textwrap import fill
from types import SimpleNamespace

import pytest

import localllm
from localllm.errors import ContextError
from localllm.generation.options import GenerationOptions
from localllm.services.long_text import relevant_lines
from localllm.services.long_text.long_prompt import (
    MAX_CHUNK_ANSWER,
    NOTHING,
    ChunkAnswers,
    ContextBudget,
    condense,
    split_chunks,
    truncate_material,
)
from localllm.services.long_text.relevant_lines import (
    LONG,
    LineSegment,
    find_lines,
    pick_lines,
    score_lines,
    split_lines,
    split_sentences,
    subtract_medians,
)

WORDS = ContextBudget(40, lambda text: len(text.split()))
LINES = [f"line {number} of it" for number in range(100)]
TEXT = "\n".join(LINES) + "\n"
ASK = "-p", "When does the ferry leave?", "--temp", 0, "-n", 4, "-c", 600


@pytest.fixture
def long(tmp_path: Path, monkeypatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    (tmp_path / "long.txt").write_text("".join(f"{number} The ferry leaves at nine.\n" for number in range(400)))
    return tmp_path / "long.txt"


def last_question(tmp_path: Path) -> str:
    return json.loads((tmp_path / "localllm" / "last-answer.jsonl").read_text().splitlines()[1])["content"]


def test_cutting_keeps_whole_lines():
    head, note = truncate_material(TEXT, "head", WORDS)
    assert head.split("\n") == LINES[:3] and note == "reads 3 of 100 lines"
    assert truncate_material(TEXT, "tail", WORDS)[0].split("\n") == LINES[-3:]
    first, mark, last = truncate_material(TEXT, "middle", ContextBudget(70, WORDS.count))[0].partition(
        "[... 91 lines left out ...]\n"
    )
    assert mark and (first.split("\n")[:-1], last.split("\n")) == (LINES[:4], LINES[-5:])


@pytest.mark.parametrize("how", ["head", "tail", "middle"])
@pytest.mark.parametrize("room", [30, 41, 70, 333, 480])
def test_the_cut_text_fits(how: str, room: int):
    text, _ = truncate_material(TEXT, how, ContextBudget(room, WORDS.count))
    assert WORDS.count(text) <= room and text
    kept = [line for line in text.split("\n") if line.startswith("line")]
    assert kept == [line for line in LINES if line in kept]


@pytest.mark.parametrize(("how", "kept"), [("head", "0123"), ("tail", "6789"), ("middle", "0123")])
def test_a_single_long_line_is_cut_by_characters(how: str, kept: str):
    assert truncate_material("0123456789", how, ContextBudget(4, len)) == (kept, "reads 4 of 10 characters")


def test_chunks_cover_the_whole_text():
    parts = [*split_chunks(TEXT, 21, WORDS.count)]
    assert "".join(parts) == TEXT and len(parts) == 25
    assert "".join(split_chunks("x" * 1000 + "\ny", 64, len)) == "x" * 1000 + "\ny"
    assert max(len(part) for part in split_chunks("x" * 1000, 64, len)) <= 64


class Answers(ChunkAnswers):
    """Part answers that repeat a share of their lines."""

    def __init__(self, size: float):
        self.rounds, self._size = list[int](), size

    def answer_chunks(self, parts) -> str:
        self.rounds.append(len(parts))
        return "\n".join(LINES[: int(sum(part.count("\n") for part in parts) * self._size)])


def test_answers_are_condensed_until_they_fit():
    answers, room = Answers(0.5), ContextBudget(170, WORDS.count)
    prompt = condense(TEXT, "Which?", room, answers)
    assert room.fits(prompt) and prompt.endswith("without mentioning parts: Which?") and len(answers.rounds) > 1
    with pytest.raises(ContextError, match="as long as the text itself: limit them with -n"):
        condense(TEXT, "Which?", room, Answers(1))


@pytest.mark.parametrize("how", ["head", "tail", "middle"])
def test_run_prefills_the_part_that_fits(cli, long: Path, how: str):
    code, out, err = cli("run", "-f", long, *ASK, "--on-overflow", how)
    prompt, lines = last_question(long.parent), long.read_text().splitlines()
    assert code == 0 and out and "the prompt exceeds the context of 600 tokens: reads " in err
    assert prompt.endswith("\n\nWhen does the ferry leave?")
    assert prompt.startswith(lines[0]) == (how != "tail") and (lines[-1] in prompt) == (how != "head")
    assert (" lines left out ...]" in prompt) == (how == "middle")


def test_a_prompt_that_fits_is_not_cut(cli, long: Path):
    long.write_text("short\n")
    assert cli("run", "-f", long, *ASK, "--on-overflow", "chunks")[2].count("\n") == 1  # that no model was named
    assert last_question(long.parent) == "short\n\nWhen does the ferry leave?"


def test_each_chunk_is_asked_and_then_their_answers(cli, long: Path, monkeypatch):
    lines = list[str]()
    monkeypatch.setattr("localllm.cli.long_prompt.ProgressLine.show", lambda self, text: lines.append(text))
    code, out, err = cli("run", "-f", long, *ASK, "--on-overflow", "chunks")
    assert code == 0 and out and "the prompt exceeds the context: asking the question of its " in err
    assert last_question(long.parent).startswith("A long text was read in parts.")
    count = err.split("asking the question of its ")[1].split()[0]
    assert f"1 of {count} chunks answered" in lines
    assert [*(long.parent / "cache").rglob("*.jsonl")] == []


def test_chunks_without_an_answer_are_dropped(monkeypatch):
    texts = {1: "At nine.", 2: NOTHING, 3: "nothing.", 4: " At ten."}
    monkeypatch.setattr(
        ChunkAnswers, "_generate_answers", lambda self, records: {each.id: texts[each.id] for each in records}
    )
    answers = object.__new__(ChunkAnswers)
    answers._question = "When?"
    assert answers.answer_chunks(["a", "b", "c", "d"]) == "At nine.\n\nAt ten."


@pytest.mark.parametrize(("wanted", "limit"), [(None, MAX_CHUNK_ANSWER), (7, 7)])
def test_the_answer_of_a_chunk_has_a_default_limit(wanted: int | None, limit: int):
    answers = ChunkAnswers(SimpleNamespace(), "When?", None, GenerationOptions(max_tokens=wanted), str, print)
    assert answers._options.max_tokens == limit


def test_an_interrupted_command_resumes(cli, long: Path, monkeypatch):
    """Keep the chunks' answers until there is a final one."""
    from localllm.cli import long_prompt

    def interrupted(*arguments: object):
        raise ContextError("the computer is switched off")

    monkeypatch.setattr(long_prompt, "condense", lambda *given: (real(*given), interrupted()))
    real = condense
    code, _, err = cli("run", "-f", long, *ASK, "--on-overflow", "chunks")
    count = int(err.split("asking the question of its ")[1].split()[0])
    monkeypatch.setattr(long_prompt, "condense", real)
    assert code == 4 and math.isfinite(count)
    code, out, err = cli("run", "-f", long, *ASK, "--on-overflow", "chunks")
    assert code == 0 and out and f"asking the question of its {count} chunks, {count} of them already answered" in err


def test_scoring_lines_in_a_batch_matches_scoring_them_as_one_text(monkeypatch):
    monkeypatch.setattr(relevant_lines, "LINES", 5)
    monkeypatch.setattr(relevant_lines, "WARM", 2)
    monkeypatch.setattr(relevant_lines, "subtract_medians", list)
    lines = [f"The ferry {word} at nine." for word in ("leaves", "stays", "sinks", "waits", "turns", "rests")]
    builtin = localllm.open(localllm.builtin_model())
    scores, encode = score_lines(builtin, "When?", lines), builtin.tokenizer.encode
    asked = builtin.session.encode_chat([{"role": "user", "content": relevant_lines.ASK.format(question="When?")}])
    yes, no = (encode(text, bos=False) for text in (relevant_lines.YES, relevant_lines.NO))
    common = next(at for at, (one, other) in enumerate(zip(yes, no, strict=False)) if one != other)
    for order in ([0, 1, 0, 1, 2, 3, 4], [3, 4, 5]):
        ids, ends = [*asked], []
        for number in order:
            ids += [*encode(lines[number], bos=False), *no[:common]]
            ends.append(len(ids) - 1)
            ids += no[common:]
        sequence = builtin.engine.sequence()
        rows = sequence.append(ids, "all")
        expected = [rows[end][yes[common]] - rows[end][no[common]] for end in ends[2:]]
        assert [scores[number] for number in order[2:]] == pytest.approx(expected, abs=0.2)
        sequence.close()
    builtin.close()


def test_batches_of_lines_hold_each_line_once():
    parts = [*relevant_lines.split_segments([10] * 300, 1000)]
    assert [at for part in parts for at in part.own] == [*range(300)]
    assert all(10 * len([*part.before, *part.own]) <= 1000 for part in parts)
    assert parts[0].before == range(16) and parts[1].before == range(parts[1].own.start - 16, parts[1].own.start)
    assert [*relevant_lines.split_segments([300, 300], 400)] == [
        LineSegment(range(0), range(1)),
        LineSegment(range(1, 1), range(1, 2)),
    ]
    with pytest.raises(ContextError, match="a line of 500 tokens does not fit"):
        [*relevant_lines.split_segments([500], 400)]


def test_lines_that_stand_out_are_picked():
    odds = [-at / 10 + 2 * (at == 20) for at in range(40)]  # falling, as the model is used to "no"
    assert max(range(40), key=subtract_medians(odds).__getitem__) == 20 and subtract_medians([3.0]) == [0.0]
    scores = [0.0, 5.0, 1.0, 4.0, 3.0]
    assert pick_lines(LINES[:5], scores, 1000, WORDS.count) == [1, 3, 4]
    assert pick_lines(LINES[:5], scores, 10, WORDS.count) == [1, 3]


def test_similar_lines_are_scored_once(monkeypatch):
    """Score a few samples of a template, and all its lines if these disagree."""
    read = list[list[str]]()

    def scored(model: object, question: str, lines: list[str], show: object) -> list[float]:
        read.append(lines)
        return [5.0 * ("FATAL" in line or " 99" in line) for line in lines]

    monkeypatch.setattr(relevant_lines, "score_lines", scored)
    log = [f"2026-01-01 job {at % 90} done" for at in range(900)]
    log[500] = log[501] = "2026-01-01 FATAL: no space"
    model = SimpleNamespace(session=SimpleNamespace(count=WORDS.count))
    picked, count = find_lines(model, "Faults?", log, 1000)
    assert picked == ["2026-01-01 FATAL: no space  [and 1 more like this]"]
    assert len(read) == 1 and count == len(read[0]) < 10
    rooms = [f"room {at} costs {at % 100} francs" for at in range(700)]
    picked, count = find_lines(model, "Which are dear?", rooms, 1000)
    assert picked == [f"room {at} costs 99 francs" for at in range(99, 700, 100)] and count == 700


def test_wrapped_prose_is_scored_by_sentences():
    """Keep a fact together across a line break."""
    sentences = [f"On the {word} day the old ship lay at the quay of Brest and waited." for word in ["first", "last"]]
    text = "\n\n".join(fill(" ".join(sentences), 50) for _ in range(20))
    assert split_lines(text) == sentences * 20
    log = "".join(f"web{at} GET /cart 200\n{chr(10) * (at % 9 == 0)}" for at in range(100))
    assert split_lines(log) == [line for line in log.splitlines() if line]
    assert split_sentences("Yes. No. " + sentences[0]) == ["Yes. No. " + sentences[0]]


def test_long_lines_are_cut_before_scoring():
    assert split_lines("a\n\n b\n") == ["a", " b"]
    sentences = "The ferry leaves at nine. " * 40
    assert len(split_lines(sentences)) == 40
    assert [len(line) for line in split_lines("x" * (LONG + 1))] == [LONG, 1]


def test_run_prefills_relevant_lines_only(cli, long: Path):
    code, out, err = cli("run", "-f", long, *ASK, "--on-overflow", "relevant")
    assert code == 0 and out and "the prompt exceeds the context: scoring its 400 lines" in err
    assert " of 400 lines" in err.splitlines()[-1] and last_question(long.parent).endswith(
        "\n\nWhen does the ferry leave?"
    )
    *picked, blank, _ = last_question(long.parent).split("\n")
    assert (
        blank == "" and picked and {each.partition("  [and ")[0] for each in picked} <= {*long.read_text().splitlines()}
    )


@pytest.mark.parametrize(
    ("words", "problem"),
    [
        (
            ("run", "-p", "Hi", "--raw", "--on-overflow", "chunks"),
            "needs a question in a chat template: leave out --raw",
        ),
        (
            ("run", "-p", "Hi", "--raw", "--on-overflow", "relevant"),
            "relevant needs a question in a chat template: leave out --raw",
        ),
        (("chat", "-p", "Hi", "--on-overflow", "head"), "--on-overflow head is available with `localllm run` only"),
        (
            ("run", "-p", "Hi " * 400, "-f", "LONG", "-c", 300, "--on-overflow", "head"),
            "the question leaves no room for the material",
        ),
    ],
)
def test_conflicting_overflow_options_are_refused(cli, long: Path, words: tuple[object, ...], problem: str):
    code, out, err = cli(*(long if word == "LONG" else word for word in words))
    assert code in (2, 4) and out == "" and problem in err
