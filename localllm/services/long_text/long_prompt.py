"""Fit prompts that exceed the context: truncate them by lines, or answer them in chunks.

A prompt is material (files, stdin) followed by a question; the question is never truncated.
"""

from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING

from localllm.errors import ContextError
from localllm.files.jsonl_file import JsonlFile, encode_line
from localllm.files.provenance import hash_beginning
from localllm.frozen import frozen
from localllm.services.records.lines import PromptBuilder, Record

if TYPE_CHECKING:
    from localllm.api import Model
    from localllm.generation.options import GenerationOptions

CUTS = ("head", "tail", "middle")
CHUNKS = "chunks"
RELEVANT = "relevant"  # see relevant_lines
ANSWER = 8  # an answer without a limit gets 1/ANSWER of the context
MAX_CHUNK, MIN_CHUNK = 4096, 64  # maximum and minimum tokens of a chunk
MAX_CHUNK_ANSWER = 400  # default limit of a chunk's answer, in tokens
NOTHING = "NOTHING"  # the answer from an irrelevant chunk
CHUNK_PROMPT = (
    "This is part {number} of {count} of a longer text:\n\n{part}\n\n{question}\n\n"
    f"Answer from this part alone. If it says nothing about that, write only the word {NOTHING}."
)
COMBINE_PROMPT = (
    "A long text was read in parts. This is what its parts say about the question below, in order:\n\n{answers}\n\n"
    "Answer the question from all of that, without mentioning parts: {question}"
)


@frozen
class ContextBudget:
    """The tokens available for material in the context.

    Attributes:
        tokens: for material, in addition to the question.  count: counts the tokens of a string.
    """

    tokens: int
    count: Callable[[str], int]

    @classmethod
    def compute(
        cls, model: "Model", question: str, system: str | None, options: "GenerationOptions", raw: bool
    ) -> "ContextBudget":
        """Compute the tokens that a question and its answer leave of the context. Raises ContextError if too few."""
        count = model.session.count
        if raw:
            prompt_tokens = count(question) + 2
        else:
            instruction = [] if system is None else [{"role": "system", "content": system}]
            prompt_tokens = len(
                model.session.encode_chat([*instruction, {"role": "user", "content": f"\n\n{question}"}])
            )
        answer = min(options.max_tokens or model.context, model.context // ANSWER)
        room = model.context - prompt_tokens - answer - 8
        if room < MIN_CHUNK:
            raise ContextError(
                f"the question leaves no room for the material in a context of {model.context} tokens; shorten it"
            )
        return cls(room, count)

    def fits(self, text: str) -> bool:
        """Return whether a string fits; count its tokens only if its length allows that."""
        return len(text) <= 16 * self.tokens and self.count(text) <= self.tokens


def truncate_material(material: str, method: str, room: ContextBudget) -> tuple[str, str]:
    """Truncate material to the lines that fit; return it and a note for the user.

    method: keep the "head" or "tail", or remove the "middle".
    """
    lines = material.splitlines(keepends=True)
    head = tail = 0
    room_left = room.tokens - 24  # for the marker in the middle
    if method != "tail":
        head, left_of_head = count_fitting(lines, room_left // 2 if method == "middle" else room_left, room.count)
        room_left = room_left - room_left // 2 + left_of_head if method == "middle" else room_left
    if method != "head":
        tail, _ = count_fitting(
            lines[: head - 1 if head else None : -1] if method == "middle" else lines[::-1], room_left, room.count
        )
    if not (head or tail):
        part = room.tokens  # a single line that is too long; a token has at least one byte
        part_kept = material[-part:] if method == "tail" else material[:part]
        return part_kept, f"reads {len(part_kept)} of {len(material)} characters"
    gap = len(lines) - head - tail
    mark = f"[... {gap} lines left out ...]\n" if method == "middle" else ""
    text = "".join([*lines[:head], mark, *lines[len(lines) - tail :]])
    return text.removesuffix("\n"), f"reads {head + tail} of {len(lines)} lines"


def count_fitting(lines: Sequence[str], room: int, count: Callable[[str], int]) -> tuple[int, int]:
    """Return how many leading lines fit, and the tokens that remain of `room`."""
    for number, line in enumerate(lines):
        tokens = count(line) + 1
        if tokens > room:
            return number, room
        room -= tokens
    return len(lines), room


def split_chunks(material: str, room: int, count: Callable[[str], int]) -> Iterator[str]:
    """Split material at lines into chunks of at most `room` tokens; split longer lines, too."""
    part, tokens_left = list[str](), room
    for line in split_lines(material, room, count):
        tokens = count(line) + 1
        if tokens > tokens_left and part:
            yield "".join(part)
            part, tokens_left = [], room
        part.append(line)
        tokens_left -= tokens
    if part:
        yield "".join(part)


def split_lines(material: str, room: int, count: Callable[[str], int]) -> Iterator[str]:
    """Yield the lines of a text; split lines of more than `room` tokens after every room / 2 characters."""
    for line in material.splitlines(keepends=True):
        if len(line) < room or count(line) < room:
            yield line
        else:
            yield from (line[start : start + room // 2] for start in range(0, len(line), max(1, room // 2)))


class ChunkAnswers:
    """Answers a question from each chunk of a long text, in a batch; later runs reuse saved answers."""

    def __init__(
        self,
        model: "Model",
        question: str,
        system: str | None,
        options: "GenerationOptions",
        path: Callable[[str], str],
        show: Callable[[int, int], object],
    ):
        """Set up the question.

        path: returns the path of the answers' file for a hash.  show: called with the count of finished and of all
        chunks.
        """
        from dataclasses import replace

        self._model, self._question, self._path, self._show = model, question, path, show
        self._prompts = PromptBuilder(system=system)
        self._options = replace(
            options, max_tokens=options.max_tokens or MAX_CHUNK_ANSWER, on_progress=None, constraint=None
        )
        self.files = list[str]()

    def answer_chunks(self, parts: Sequence[str]) -> str:
        """Return the answers from the relevant chunks, one paragraph each."""
        records = [
            Record(
                number,
                CHUNK_PROMPT.format(number=number, count=len(parts), part=part.strip("\n"), question=self._question),
            )
            for number, part in enumerate(parts, 1)
        ]
        answers = self._generate_answers(records)
        useful = [
            text for text in (answers[record.id] for record in records) if text.strip(" .*\n\"'").upper() != NOTHING
        ]
        return "\n\n".join(text.strip() for text in useful) or "The text says nothing about that."

    def _generate_answers(self, records: list[Record]) -> dict[object, str]:
        """Return the answers by record. Raises LocalllmError for the first chunk that fails."""
        from localllm.services.records.map import MapJob, RecordMapping, select_unfinished

        job = MapJob(self._model.path, self._prompts, self._options)
        key = hash_beginning(
            repr([record.input for record in records]).encode() + repr(job.compute_digests(job.path)).encode()
        )
        file = self._path(f"{key}{hash_beginning(''.join(str(record.input) for record in records).encode()[-65536:])}")
        self.files.append(file)
        with JsonlFile(file) as out:
            outputs = {each["id"]: str(each["output"]) for each in out.records if "error" not in each}
            mapping = RecordMapping(self._model, job, select_unfinished(records, out.records))
            self._show(len(outputs), len(records))
            for record, result in mapping:
                if "error" in result:
                    raise ContextError(f"chunk {record.id} of {len(records)}: {result['error']}")
                out.write(encode_line({"id": record.id, "output": result["output"]}))
                outputs[record.id] = str(result["output"])
                self._show(len(outputs), len(records))
        return outputs


def condense(material: str, question: str, room: ContextBudget, answers: ChunkAnswers) -> str:
    """Return a prompt with the question and the chunks' answers, condensed in further rounds until it fits.

    Raises ContextError if the answers do not get shorter.
    """
    size = max(MIN_CHUNK, min(room.tokens - room.count(CHUNK_PROMPT), MAX_CHUNK))
    while True:
        parts = [*split_chunks(material, size, room.count)]
        combined = answers.answer_chunks(parts)
        prompt = COMBINE_PROMPT.format(answers=combined, question=question)
        if room.fits(prompt):
            return prompt
        if len(combined) > 0.9 * len(material):
            raise ContextError("the chunks' answers are as long as the text itself: limit them with -n")
        material = combined
