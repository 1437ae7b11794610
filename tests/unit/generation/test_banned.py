"""Banned strings: an answer is what rejection at each banned string gives, with drafts, in batches and in streams."""

from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from fake_sequences import FakeSequences
from hypothesis import given, settings
from hypothesis import strategies as st
from step_costs import Free
from tiny_hybrid import write_tiny_hybrid

import localllm
from localllm.errors import LocalllmError, UsageError
from localllm.generation.banned import BannedStrings, match_string, spell_cases
from localllm.generation.options import GenerationOptions
from localllm.generation.request import PromptTask, Request
from localllm.generation.sampling.sampler import Sampler, SamplingOptions
from localllm.generation.scheduler import Scheduler
from localllm.generation.speculation import speculator
from tests.unit.generation.test_beam_search import PIECES, VOCAB, Letters, Row, random_table

PROMPT = "hello world, hello world, hello world, hello"


def generate_by_rejection(row: Row, prompt: list[int], bans: list[bytes], sampler: Sampler, most: int) -> list[int]:
    """Search the whole text after each token and resample from where a ban begins: the oracle."""
    ids, states, barred = list[int](), list[Sampler](), dict[int, set[int]]()
    while len(ids) < most:
        states[len(ids) :] = [sampler.copy()]
        allowed = np.ones(VOCAB, bool)
        allowed[list(barred.get(len(ids), ()))] = False
        if not allowed.any() or np.all(row((*prompt, *ids))[allowed] == -np.inf):
            return [-1]
        token = sampler.sample(row((*prompt, *ids)), allowed)
        if token == 0:
            return ids
        sampler.accept(token)
        ids.append(token)
        text = b"".join(PIECES[each] for each in ids).lower()
        places = [place for ban in bans if (place := text.find(ban.lower())) >= 0]
        if not places:
            continue
        number = next(n for n in range(len(ids)) if len(b"".join(PIECES[each] for each in ids[: n + 1])) > min(places))
        barred = {place: tokens for place, tokens in barred.items() if place <= number}
        barred.setdefault(number, set()).add(ids[number])
        sampler = states[number].copy()
        del ids[number:]
    return ids


@settings(max_examples=40, deadline=None)
@given(
    prompts=st.lists(st.lists(st.integers(2, VOCAB - 1), min_size=1, max_size=12), min_size=1, max_size=3),
    bans=st.lists(
        st.sampled_from(["ab", "A", "ba", "b c", " c c", "é", "abab", "é a", "bbbb"]), min_size=1, max_size=3
    ),
    seed=st.integers(0, 10**6),
    temperature=st.sampled_from([0.0, 1.0]),
    penalty=st.sampled_from([1.0, 1.5]),
    most=st.sampled_from([1, 4, 30]),
)
def test_banned_strings_give_what_rejection_gives(
    prompts, bans, seed: int, temperature: float, penalty: float, most: int
):
    """Verify every draft at once, since a step of several tokens costs the same in this engine."""
    row = random_table(seed, ending=-1.0)
    sampling = SamplingOptions(
        temperature=temperature, repeat_penalty=penalty, seed=seed, samplers="penalties;temperature"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(speculator, "StepCostModel", Free)
        asked = [
            Request(PromptTask(p, Letters().stream(), GenerationOptions(most, sampling=sampling, ban=bans)))
            for p in prompts
        ]
        with closing(Scheduler(FakeSequences(VOCAB, row), Letters(), asked)) as batch:
            for _ in batch:
                pass
    for prompt, one in zip(prompts, asked, strict=True):
        sampler = Sampler(sampling, VOCAB)
        sampler.read(prompt)
        expected = generate_by_rejection(row, prompt, [ban.encode() for ban in bans], sampler, most)
        if expected == [-1]:
            assert isinstance(one.error, LocalllmError)
        else:
            (answer,) = one.answers
            assert answer.tokens == expected
            text = b"".join(PIECES[token] for token in expected).decode(errors="replace")
            assert answer.text == text
            assert not any(ban.lower() in text.lower() for ban in bans)


@pytest.fixture(scope="module", params=["llama", "hybrid"])
def model(request: Any, tiny: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[localllm.Model]:
    """Open a model; that with recurrent layers cannot rewind to any position."""
    path = tiny if request.param == "llama" else write_tiny_hybrid(tmp_path_factory.mktemp("ban") / "h.gguf")
    with localllm.open(path, threads=1, context=256, cache=False) as opened:
        yield opened


def find_frequent_string(model: localllm.Model, **options: Any) -> tuple[list[int], str]:
    """Return an answer's tokens, and a string within it that spans two tokens."""
    answer = model.generate(PROMPT, 40, temperature=0, **options)
    list(answer)
    tokens = answer.tokens
    texts = [model.tokenizer.decode(tokens[n : n + 2]) for n in range(5, 30)]
    return tokens, next(text for text in texts if len(text) > 1 and "\ufffd" not in text)


def test_an_answer_rewinds_to_where_a_banned_string_begins(model: localllm.Model):
    plain, text = find_frequent_string(model)
    token_lists = list[list[int]]()
    for speculate in ("off", "ngram"):
        answer = model.generate(PROMPT, 40, temperature=0, ban=[text.upper()], speculate=speculate, logprobs=True)
        seen = ""
        for part in answer:
            seen += part
            assert answer.text == seen
        assert seen == model.tokenizer.decode(answer.tokens) and text.lower() not in seen.lower()
        assert [each.chosen.token for each in answer.logprobs] == answer.tokens
        token_lists.append(answer.tokens)
    assert token_lists[0] == token_lists[1] != plain and len(token_lists[0]) > 10
    again = model.generate(PROMPT, 40, temperature=0, ban=text)
    assert "".join(again) == model.tokenizer.decode(token_lists[0]), (
        "one text is a list of one; its case does not matter"
    )
    assert find_frequent_string(model)[0] == plain, "what was undone is in no cache"


def test_each_of_several_answers_avoids_the_banned_strings(model: localllm.Model):
    options: dict[str, Any] = {"seed": 3, "temperature": 1.5, "ban": ["e", "a"]}
    several = model.candidates(PROMPT, n=3, max_tokens=20, **options)
    for answer in several:
        assert not {"a", "e"} & {*answer.text.lower()}
        alone = model.generate(PROMPT, 20, **(options | {"seed": answer.seed}))
        list(alone)
        assert alone.tokens == answer.tokens


def test_a_constraint_holds_beside_banned_strings(model: localllm.Model):
    asked = model.generate("?", grammar='root ::= "yes" | "no" | "maybe"', ban=["YES", "no"])
    assert "".join(asked) == "maybe"
    with pytest.raises(LocalllmError, match="the constraint allows only banned strings to follow"):
        list(model.generate("?", grammar='root ::= "yes" | "no"', ban=["yes", "n"]))


def test_a_possible_beginning_of_a_banned_string_is_held_back():
    pieces = {1: b"He", 2: b" sa", 3: b"id", 4: b"t", 5: b"\xe2", 6: b"\x80", 7: b"\x94", 8: b"\x93", 9: b""}

    class Tokens:
        def token_bytes(self, token: int, special: bool) -> bytes:
            return pieces[token]

    def push(banned: BannedStrings, *tokens: int) -> list[int | None]:
        """Return for each token how many are held, or where the answer rewinds to."""
        seen = list[int | None]()
        for token in tokens:
            back = banned.push(token, token, np.zeros(1), [])
            seen.append(-back.before if back else len(banned.held) - len(banned.release()))
        return seen

    banned_strings = BannedStrings([" said", "—"], Tokens())
    assert push(banned_strings, 1, 2, 4, 2, 3) == [0, 1, 0, 1, -2] and banned_strings.barred_tokens == {2}
    assert push(banned_strings, 1) == [0] and not banned_strings.barred_tokens, "the place is behind it now"
    assert push(banned_strings, 5, 6, 8, 5, 6, 7) == [1, 2, 0, 1, 2, -5], "it goes back to the first byte of the dash"
    assert push(banned_strings, 2, 9, 3) == [1, 2, -2], "a control token has no text"
    assert match_string(b"STRASSE", 0, spell_cases("straße")) and match_string("Ä".encode(), 0, spell_cases("ä"))


def test_invalid_bans_are_refused(model: localllm.Model):
    for wrong, message in (([""], "ban must not be empty"), ([3], "ban"), (3, "ban must be a list of strings")):
        with pytest.raises(UsageError, match=message):
            model.generate("?", ban=wrong)
    with pytest.raises(UsageError, match="ban cannot be combined with beams"):
        model.candidates("?", n=1, beams=2, ban=["x"])


def test_a_draft_model_respects_banned_strings(tiny: str, tmp_path: Path):
    with localllm.open(tiny, threads=1, context=256, cache=False) as model:
        _, text = find_frequent_string(model)
        answer = model.generate(PROMPT, 40, temperature=0, ban=[text, text[0]])
        plain = "".join(answer)
        with localllm.open(tiny, threads=1, context=256, cache=False) as small:
            guessed = model.generate(PROMPT, 40, temperature=0, ban=[text, text[0]], speculate=small)
            assert "".join(guessed) == plain and guessed.tokens == answer.tokens


def test_run_avoids_banned_strings(cli, tiny: str):
    words = ["run", tiny, "--raw", "-p", PROMPT, "-n", "30", "--temp", "0", "--no-cache"]
    code, plain, _ = cli(*words)
    text = plain.strip()[4:6]
    code, out, _ = cli(*words, "--ban", text.swapcase())
    assert code == 0 and text.strip() and text.lower() not in out.lower()


def test_the_sampler_is_copied_only_before_tokens_that_may_begin_a_ban(
    model: localllm.Model, monkeypatch: pytest.MonkeyPatch
):
    copies = list[int]()
    monkeypatch.setattr(Sampler, "copy", lambda self: copies.append(1) or copy_sampler(self))
    answer = model.generate(PROMPT, 40, temperature=0, ban=["\ufdd0"])
    list(answer)
    assert len(answer.tokens) == 40 and not copies


copy_sampler = Sampler.copy
CONTRADICTIONS = [
    {"schema": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}},
    {"grammar": 'root ::= " "* "city" " "*'},
    {"regex": r"\s*city\s*"},
]


@pytest.mark.parametrize("form", CONTRADICTIONS)
def test_a_ban_that_contradicts_the_constraint_raises(model: localllm.Model, form: dict[str, Any]):
    """Stop free white space from going on until the limit."""
    with pytest.raises(UsageError, match="the constraint allows only banned strings to follow"):
        list(model.generate(PROMPT, 100, temperature=1000, seed=1, ban=["city"], **form))
