"""Test multiple-choice tasks: llama-perplexity's files, selection, scores against formulas, the command."""

import json
import struct
from math import sqrt

import numpy as np
import pytest
from engines import open_engine

import localllm
from localllm.errors import UsageError
from localllm.files.choice_tasks import BinaryTaskFile, ChoiceTask, parse_hellaswag, parse_winogrande
from localllm.services.evaluation.choice_scores import ChoiceScore, TaskResult, plan_task, score_tasks, select_tasks
from localllm.services.evaluation.scores import compute_mcnemar_p_value, compute_wilson_interval

HELLASWAG = "hello world\n{}\nhello hello\nworld\nwor rld hello\nrld\n"
WINOGRANDE = '{}, hello _ {},world,"rld ""x""",{}'


def pack_text(text: str) -> bytes:
    return struct.pack("<I", len(text.encode())) + text.encode()


def pack_answers(answers: list[str], labels: list[int]) -> bytes:
    return b"".join(
        [struct.pack("<I", len(answers)), *map(pack_text, answers), struct.pack(f"<{len(labels)}I", *labels)]
    )


def pack_file(*tasks: tuple[str, list[str], list[int]]) -> bytes:
    bodies = [pack_text(question) + 2 * pack_answers(*answers) for question, *answers in tasks]
    starts = 4 + 4 * len(bodies) + np.cumsum([0, *map(len, bodies)])[:-1]
    return struct.pack(f"<{1 + len(bodies)}I", len(bodies), *starts) + b"".join(bodies)


# ---- files


def test_hellaswag_files_are_parsed():
    assert parse_hellaswag((HELLASWAG.format(2) + HELLASWAG.format(0)).encode() + b"\n", "x") == [
        ChoiceTask(
            tuple(f"hello world {end}" for end in ("hello hello", "world", "wor rld hello", "rld")), frozenset({at})
        )
        for at in (2, 0)
    ]


def test_winogrande_files_are_parsed():
    data = b'a,"Tom, he said, "_" lied.",Tom, the dog ,2\r\n7,"x, _ y",A,"B, C",1'
    assert parse_winogrande(data.replace(b'"_"', b"_"), "x") == [
        ChoiceTask(
            ("Tom, he said, Tom lied.", "Tom, he said,  the dog  lied."), frozenset({1}),
            ("Tom, he said, Tom", "Tom, he said,  the dog "),
        ),
        ChoiceTask(("x, A y", 'x, "B, C" y'), frozenset({0}), ("x, A", 'x, "B, C"')),
    ]  # fmt: skip


def test_binary_tasks_are_read_in_order_or_by_position():
    first, second = ("Wörter", ["a", "b"], [0, 1]), ("q", ["c", "d", "e"], [1, 0, 1])
    tasks = BinaryTaskFile(pack_file(first, second), "x")
    expected = [
        ChoiceTask(("Wörter a", "Wörter b"), frozenset({1})), ChoiceTask(("q c", "q d", "q e"), frozenset({0, 2}))
    ]  # fmt: skip
    assert [*tasks] == expected and [tasks[1], tasks[0]] == expected[::-1]


@pytest.mark.parametrize(
    ("parse", "data", "message"),
    [
        (parse_hellaswag, b"a\n0\nb\nc\n", "x: a HellaSwag task must have six lines"),
        (parse_hellaswag, HELLASWAG.format(4).encode(), r"x: line 2 must be the label of a task, 0 to 3 \(found '4'\)"),
        (parse_hellaswag, b"\xff", "x: not UTF-8 at byte 0"),
        (parse_winogrande, b"0,a _ b,c,d,1\n0,a _ b,c,1\n", "x: line 2 must be a Winogrande task"),
        (parse_winogrande, b"0,a b,c,d,1\n", "x: line 1 must be a Winogrande task"),
        (parse_winogrande, b"0,a _ b,c,d,3\n", "x: line 1 must be a Winogrande task"),
        (BinaryTaskFile, b"", "x: expected a file of multiple-choice tasks"),
        (BinaryTaskFile, b"text that is no such file", "x: expected a file of multiple-choice tasks"),
        (BinaryTaskFile, pack_file(("q", ["a"], [1]))[:-1], "x: cut off at byte .*, within task 1 of 1"),
        (BinaryTaskFile, pack_file(("q", ["a", ""], [1, 0])), "x: task 1 of 1 has an empty question or answer"),
        (
            BinaryTaskFile,
            pack_file(("q", ["a"] * 101, [1] * 101)),
            "x: damaged at byte 13: task 1 of 1 has 101 answers",
        ),
        (BinaryTaskFile, pack_file(("q", ["a"], [1])).replace(b"q", b"\xff"), "x: damaged at byte 12: .* is not UTF-8"),
    ],
)
def test_damaged_task_files_are_refused(parse, data: bytes, message: str):
    with pytest.raises(UsageError, match=f"^{message}"):
        list(parse(data, "x"))


# ---- which tasks


def test_tasks_are_drawn_as_by_libstdcpp():
    """Compare with a C++ program using std::mt19937(1), compiled by g++ 12."""
    tasks = [ChoiceTask((str(number),), frozenset()) for number in range(20)]
    drawn = [8, 19, 13, 17, 0, 2, 6, 18, 3, 5, 1, 10, 7, 11, 12, 15, 9, 16, 14, 4]
    assert [number for number, _ in select_tasks("hellaswag", tasks, 400)] == drawn
    assert [number for number, _ in select_tasks("hellaswag", tasks, 3)] == drawn[:3]
    assert [number for number, _ in select_tasks("winogrande", tasks, 7)] == [8, 18, 12, 15, 0, 1, 4]
    assert select_tasks("multiple-choice", tasks, 20) == [*enumerate(tasks)]


# ---- scores


def exact_logprobs(path: str, ids: list[int]) -> np.ndarray:
    """Return the log probability of each token but the first by plain NumPy: float64 [len(ids) - 1]."""
    logits = open_engine(path, backend="reference").forward(ids, 0, "all").astype(np.float64)
    return np.array([row[token] - np.log(np.exp(row).sum()) for row, token in zip(logits, ids[1:], strict=False)])


def test_scores_equal_their_formulas(tiny: str):
    tasks = [
        *parse_hellaswag(HELLASWAG.format(1).encode(), "x"),
        ChoiceTask(("rld world", "hello wor"), frozenset({0})),
    ]
    tasks += parse_winogrande(b"0,hello wor _ hello world hello world,rld,hello hello,1\n", "x")
    with localllm.open(tiny, cache=False) as model:
        results = [*score_tasks(model, [*enumerate(tasks)])]
        encode = lambda text: model.tokenizer.encode(text, bos=True)  # noqa: E731
        for task, result in zip(tasks, results, strict=True):
            texts = [encode(text) for text in task.texts]
            common = next(at for at, ids in enumerate(zip(*texts, strict=False)) if len({*ids}) > 1)
            starts, last = [common] * len(texts), None
            if task.stems:
                starts, last = [len(encode(stem)) for stem in task.stems], -1
                assert all(len(ids) - common > 3 for ids in texts)
            means = [
                exact_logprobs(tiny, ids)[max(at, 1) - 1 : last].mean() for at, ids in zip(starts, texts, strict=True)
            ]
            np.testing.assert_allclose(result.scores, means, rtol=1e-3)
            assert result.chosen == np.argmax(means) and result.is_correct == (result.chosen in task.correct)


def test_a_text_of_one_token_without_bos_is_refused(tiny: str):
    with (
        localllm.open(tiny, cache=False) as model,
        pytest.raises(UsageError, match="has only one token, which a model without a BOS token cannot score"),
    ):
        list(score_tasks(model, [(0, ChoiceTask(("rld world", "hello"), frozenset({0})))]))


def test_a_name_at_the_end_is_scored_as_by_llama_cpp(tiny: str):
    """Predict the second name's first token from the end of the first text: see mean_logprobs."""
    (task,) = parse_winogrande(b"0,hello world _,hello,rld hello,1\n", "x")
    with localllm.open(tiny, cache=False) as model:
        plan = plan_task(task, model.tokenizer)
        (result,) = score_tasks(model, [(0, task)])
    (prompt, texts) = plan.prompts[0]
    assert plan.extra and texts[2] == [*texts[0], texts[1][0]]
    first, second, odd = (exact_logprobs(tiny, [*prompt, *text])[len(prompt) - 1 :] for text in texts)
    second = [odd[-1], *second[1:]]
    expected = [np.mean(each[:-1] if len(each) > 1 else each) for each in (first, second)]
    np.testing.assert_allclose(result.scores, expected, rtol=1e-3)


def test_accuracy_has_standard_error_and_wilson_interval():
    results = [TaskResult(0, [0.0] * 4, 0, True), TaskResult(1, [0.0] * 2, 1, False), TaskResult(2, [0.0] * 2, 0, True)]
    score = ChoiceScore("multiple-choice", tuple(results))
    assert (score.correct, score.accuracy, score.chance) == (2, 2 / 3, 3 / 8)
    assert score.estimate_error(score.accuracy) == pytest.approx(sqrt(2 / 9 / 2))
    assert compute_wilson_interval(81, 263) == pytest.approx((0.2553, 0.3662), abs=5e-5)  # Newcombe 1998, table I
    assert compute_wilson_interval(0, 20) == pytest.approx((0.0, 0.1611), abs=5e-5)
    assert compute_wilson_interval(0, 0) == (0.0, 1.0)
    assert (
        compute_mcnemar_p_value(0, 5) == pytest.approx(2 / 32)
        and compute_mcnemar_p_value(3, 3) == 1.0
        and compute_mcnemar_p_value(8, 2) == pytest.approx(112 / 1024)
    )
    assert compute_mcnemar_p_value(2000, 2100) == pytest.approx(
        0.122065, abs=1e-6
    )  # 2 ** 4100 is too large for a float


# ---- the command


def test_perplexity_scores_hellaswag_winogrande_and_binary_tasks(tiny: str, tmp_path, cli):
    (tmp_path / "h").write_text(HELLASWAG.format(1) + HELLASWAG.format(3))
    (tmp_path / "w").write_text("0,hello wor _ hello world hello,rld,hello hello,1\n")
    (tmp_path / "b").write_bytes(pack_file(("hello", ["world", "rld rld"], [0, 1]), ("wor", ["rld", "hello"], [1, 1])))
    code, out, _ = cli("perplexity", tiny, tmp_path / "h", "--hellaswag", "--json")
    facts = json.loads(out)
    assert code == 0 and facts["tasks"] == 2 and {result["task"] for result in facts["results"]} == {0, 1}
    assert facts["correct"] == sum(result["is_correct"] for result in facts["results"]) <= 1
    code, out, _ = cli("perplexity", "-m", tiny, "-f", tmp_path / "h", "--hellaswag", "--hellaswag-tasks", 2)
    low, high = (100 * bound for bound in compute_wilson_interval(facts["correct"], 2))
    assert out == f"HellaSwag = {50 * facts['correct']:.8f}% [{low:.4f}%, {high:.4f}%] (2 tasks)\n"
    code, out, _ = cli("perplexity", tiny, tmp_path / "w", "--winogrande")
    assert out in (f"Winogrande = {share} ± 0.0000 (1 task)\n" for share in ("0.0000", "100.0000"))
    code, out, _ = cli("perplexity", "-m", tiny, "-bf", tmp_path / "b", "--multiple-choice")
    assert out.splitlines()[0].endswith("(2 tasks)") and out.splitlines()[1] == "random chance = 50.0000 ± 50.0000"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        ("x --hellaswag --winogrande", "give either --hellaswag or --winogrande, not both"),
        ("x --winogrande-tasks 5", "--winogrande-tasks needs --winogrande"),
        ("x --winogrande --winogrande-tasks -5", "--winogrande-tasks must be 0 or greater, not -5"),
        (
            "x --hellaswag --chunks 2",
            "--hellaswag scores tasks instead of chunks: leave out --chunks, --save-logits, "
            "--kl-divergence, --base and --per-token",
        ),
        ("--hellaswag", "TEXT is missing: give a file of HellaSwag tasks"),
        ("missing --multiple-choice", "missing: cannot be read: No such file or directory"),
    ],
)
def test_invalid_command_lines_of_tasks_are_refused(tiny: str, words: str, message: str, cli):
    assert cli("perplexity", tiny, *words.split()) == (2, "", f"localllm: error: {message}\n")


def test_a_task_beyond_the_context_is_refused(tiny: str, tmp_path, cli):
    (tmp_path / "h").write_text(HELLASWAG.format(1))
    code, out, error = cli("perplexity", tiny, tmp_path / "h", "--hellaswag", "-c", 5)
    assert (code, out) == (4, "") and error.count("\n") == 1
