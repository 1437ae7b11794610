"""Test answers in an event loop: the same texts, which end when nobody awaits them any more."""

import asyncio

import pytest

import localllm
from localllm.errors import UsageError

MESSAGES = [{"role": "user", "content": "What is localllm?"}]


@pytest.fixture(scope="module")
def model():
    with localllm.open(localllm.builtin_model(), threads=1, cache=False) as opened:
        yield opened


def test_achat_streams_the_chunks_of_chat(model: localllm.Model):
    async def work() -> tuple[str, str]:
        answer = model.achat(MESSAGES, 12, temperature=0)
        with pytest.raises(AttributeError, match="the answer has no 'text' before generation starts"):
            _ = answer.text
        pieces = [piece async for piece in answer]
        assert [piece async for piece in answer] == []
        return "".join(pieces), answer.text

    expected = "".join(model.chat(MESSAGES, 12, temperature=0))
    assert asyncio.run(work()) == (expected, expected)


def test_concurrent_tasks_get_their_own_answers(model: localllm.Model):
    async def work() -> list[str]:
        prompts = [f"{number} and" for number in range(4)]
        answers = await asyncio.gather(*(model.acomplete(prompt, 6, temperature=0) for prompt in prompts))
        messages = await model.acomplete(MESSAGES, 4, temperature=0)
        return [answer.text for answer in (*answers, messages)]

    expected = ["".join(model.generate(f"{number} and", 6, temperature=0)) for number in range(4)]
    assert asyncio.run(work()) == [*expected, "".join(model.chat(MESSAGES, 4, temperature=0))]


def test_leaving_the_context_ends_the_answer(model: localllm.Model):
    async def work() -> str:
        async with model.achat(MESSAGES, 2000, ignore_eos=True) as answer:
            async for _ in answer:
                break
        assert answer.finish_reason == "interrupted" and answer.completion_tokens < 100
        async for _ in model.achat(MESSAGES, 2000, ignore_eos=True):
            break
        return (await model.acomplete(MESSAGES, 4, temperature=0)).text

    assert asyncio.run(work()) == "".join(model.chat(MESSAGES, 4, temperature=0))


def test_cancelling_a_task_ends_the_answer(model: localllm.Model):
    async def work() -> int:
        answer = model.achat(MESSAGES, 100_000, on_overflow="shift", ignore_eos=True)
        begun = asyncio.Event()

        async def read() -> None:
            async for _ in answer:
                begun.set()

        task = asyncio.create_task(read())
        await asyncio.wait_for(begun.wait(), 60)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task
        await answer.aclose()
        return answer.completion_tokens

    before = asyncio.run(work())
    assert 0 < before < 100_000


def test_errors_reach_the_awaiting_task(model: localllm.Model):
    async def work() -> None:
        with pytest.raises(UsageError):
            await model.acomplete([])
        stopped = model.achat(MESSAGES)
        stopped.stop()
        assert [piece async for piece in stopped] == []

    asyncio.run(work())
