"""Test that lines differing only in times, ids and numbers form one template, except for outliers."""

import random

import pytest

from localllm.services.long_text.relevant_lines import (
    EXTREME,
    FEW,
    LineTemplate,
    group_by_template,
    mask_variables,
    strip_time,
)

DRAW = random.Random(5)
LATENCIES = [f"2026-05-04T00:{at // 60:02}:{at % 60:02}Z done in {20 + DRAW.randint(0, 300)} ms" for at in range(900)]


def samples(lines: list[str], question: str = "") -> list[str]:
    return [lines[number] for each in group_by_template(lines, question) for number in each.samples]


def test_a_template_is_sampled_a_few_times():
    (template,) = group_by_template(LATENCIES)
    numbers = [int(LATENCIES[at].split()[-2]) for at in template.samples]
    assert template.lines == [*range(900)] and len(numbers) <= 3
    assert {min(numbers), max(numbers)} == {20, 320}


def test_an_outlier_is_kept_as_its_own_line():
    lines = [*LATENCIES]
    lines[444] = "2026-05-04T12:00:00Z done in 98123 ms"
    assert [each for each in group_by_template(lines) if each.lines == [444]] == [LineTemplate([444], [444])]


def test_the_farthest_of_many_outliers_are_kept():
    lines = [*LATENCIES, *(f"2026-05-05 done in {90_000 + at} ms" for at in range(50))]
    alone = [lines[each.lines[0]] for each in group_by_template(lines) if len(each.lines) == 1]
    assert alone == [f"2026-05-05 done in {90_000 + at} ms" for at in range(50 - EXTREME, 50)]


def test_each_of_few_values_is_kept():
    lines = [f"web{at % 3} GET /{at} {(200, 304, 500)[at % 7 // 3]}" for at in range(700)]
    read = samples(lines)
    assert {(each[:4], each[-3:]) for each in read} == {
        (f"web{at % 3}", str((200, 304, 500)[at % 7 // 3])) for at in range(21)
    }
    assert len(read) < 40
    assert len(samples([f"row {at}" for at in range(FEW)])) == FEW


def test_mask_keeps_values_that_the_question_names():
    lines = [f"user {at} signed in from 10.0.0.{at % 200}" for at in range(600)]
    assert "user 417 signed in from 10.0.0.17" not in samples(lines)
    assert "user 417 signed in from 10.0.0.17" in samples(lines, "What did user 417 do?")
    assert sum("10.0.0.9" in each[-8:] for each in samples(lines, "Who came from 10.0.0.9?")) >= 1


@pytest.mark.parametrize(
    "other", ["2026-11-28 14:00:01,5 [ffee0123] 10.1.2.3 ok", "1999-01-02 03:04:05.123 [0a1b2c3d4e] 192.168.0.1 ok"]
)
def test_mask_replaces_times_and_ids(other: str):
    assert mask_variables(other, set()) == mask_variables("2026-11-28 14:00:00 [deadbeef01] 8.8.8.8 ok", set())


def test_mask_keeps_words_and_bare_numbers():
    assert len(group_by_template([f"{at}" for at in range(100)])) == 100
    assert len(group_by_template(["job backup finished", "job backup failed", "job backup finished"])) == 2
    assert group_by_template([]) == []


def test_a_leading_time_is_dropped():
    assert strip_time("Nov 28 14:00:01 web1 sshd: hello") == "web1 sshd: hello"
    assert strip_time("2026-11-28T14:00:01.5Z INFO hello") == "INFO hello"
    assert strip_time("2026-11-28") == "2026-11-28" and strip_time("in 2026-11-28 x") == "in 2026-11-28 x"
