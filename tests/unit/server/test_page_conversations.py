"""Test the page in headless Chromium: no question, answer or draft is lost or put in the wrong conversation."""

from typing import Any

import pytest
from browser import CHROMIUM
from chat_page import SCRIPT, WIDTHS, Page, contents, save_session

from localllm.files.gguf.file import GGUFFile
from localllm.services import sessions
from tests.integration.test_serve import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]


def hold(page: Page, model: str = "first") -> Any:
    """Open a model and block its runs; return the gate."""
    page.served.chat("warm", model=model)
    gate = page.served.model(model).engine.gate
    gate.clear()
    return gate


@pytest.mark.parametrize("is_begun", [False, True])
def test_an_answer_goes_into_the_conversation_of_its_question(page: Page, is_begun: bool):
    save_session("C1", "one", "ONE")
    save_session("C2", "two", "TWO")
    page.reload()
    page.choose("C2")
    page.until_shown("two", "TWO")
    gate = hold(page)
    page.send("rivers")
    if is_begun:
        page.until("$('log').children.length === 3")
    page.choose("C1")
    page.until_shown("one", "ONE")
    assert page.value("$('stop').hidden && !$('send').hidden") and page.status == ""
    gate.set()
    until(lambda: contents("C2") == ["two", "TWO", "rivers", SCRIPT["rivers"]])
    assert contents("C1") == ["one", "ONE"] and page.articles == ["one", "ONE"] and page.status == ""
    page.ask("three")
    until(lambda: contents("C1") == ["one", "ONE", "three", "THREE"])
    page.choose("C2")
    page.until_shown("two", "TWO", "rivers", SCRIPT["rivers"])


def test_two_answers_stream_at_once_and_stop_ends_the_visible_one(page: Page):
    gate = hold(page)
    page.send("long")
    page.click("fresh")
    assert page.articles == [] and page.value("$('stop').hidden")
    page.send("rivers")
    page.until("!$('stop').hidden")
    page.click("stop")
    page.until("$('status').textContent === 'Stopped.' && $('text').value === 'rivers'")
    gate.set()
    until(lambda: sessions.list_names() == ["long"])
    page.choose("long")
    page.until_shown("long", SCRIPT["long"])
    page.choose("rivers (not saved)")
    page.until("$('text').value === 'rivers'")


def test_a_conversation_is_saved_after_every_answer(page: Page):
    page.ask("rivers")
    until(lambda: contents("rivers") == ["rivers", SCRIPT["rivers"]])
    page.ask("more?")
    until(lambda: len(contents("rivers")) == 4)
    page.click("fresh")
    page.ask("rivers")
    until(lambda: sorted(sessions.list_names()) == ["rivers", "rivers 2"])
    assert len(contents("rivers")) == 4 and len(contents("rivers 2")) == 2
    page.reload()
    page.until_shown("rivers", SCRIPT["rivers"])


def test_an_existing_name_is_refused_and_not_overwritten(page: Page):
    save_session("D1", "gold", "GOLD")
    page.ask("silver")
    until(lambda: "silver" in sessions.list_names())
    page.save_as("D1")
    page.until("$('status').textContent.includes('D1')")
    assert page.status == "There is a conversation “D1” already; choose another name."
    assert contents("D1") == ["gold", "GOLD"] and contents("silver") == ["silver", "SILVER"]
    page.save_as("D2")
    until(lambda: sorted(sessions.list_names()) == ["D1", "D2"])
    page.ask("more")
    until(lambda: contents("D2") == ["silver", "SILVER", "more", "MORE"])


def test_a_name_taken_during_an_answer_is_not_overwritten(page: Page):
    gate = hold(page)
    page.send("silver")
    page.save_as("D1")
    page.until("$('status').textContent.includes('after its answer')")
    save_session("D1", "gold", "GOLD")
    gate.set()
    page.until("$('sessions').value === 'D1 2'")
    assert contents("D1") == ["gold", "GOLD"] and contents("D1 2") == ["silver", "SILVER"]
    assert page.status == "“D1” exists already; this is saved as “D1 2”."


def test_a_name_given_while_an_answer_is_being_saved_is_used(page: Page):
    page.value(
        "window.fetch = ((old) => async (path, ...more) => { if (path === 'sessions/silver' && !window.go) "
        "await new Promise((resolve) => { window.go = resolve; }); return old(path, ...more); })(window.fetch)"
    )
    page.ask("silver")
    page.until("Boolean(window.go)")
    page.save_as("D1")
    page.until("current.wish === 'D1'")
    page.value("window.go()")
    page.until("$('sessions').value === 'D1'")
    assert sessions.list_names() == ["D1"] and contents("D1") == ["silver", "SILVER"]


def test_a_name_given_at_the_end_of_a_save_is_asked_for_once(page: Page):
    page.value(
        "window.bodies = []; window.fetch = ((old) => async (path, options = {}) => { if (options.method === 'PATCH') "
        "window.bodies.push(options.body); if (path === 'sessions' && current.name && !window.go) "
        "await new Promise((resolve) => { window.go = resolve; }); return old(path, options); })(window.fetch)"
    )
    page.ask("silver")
    page.until("Boolean(window.go)")  # saved, and the list of names is being fetched
    page.value("current.wish = 'D1'; current.saving = current.saving.then(() => move(current)); 0")
    page.value("window.go()")
    page.until("$('sessions').value === 'D1'")
    page.value("current.saving.then(() => move(current))")
    assert page.value("window.bodies.join()") == '{"name":"D1"}' and sessions.list_names() == ["D1"]


def test_a_conversation_continued_elsewhere_is_not_overwritten(page: Page):
    save_session("C1", "one", "ONE")
    page.reload()
    page.choose("C1")
    page.until_shown("one", "ONE")
    save_session("C1", "one", "ONE", "there", "THERE")
    page.ask("here")
    until(lambda: "C1 2" in sessions.list_names())
    assert contents("C1") == ["one", "ONE", "there", "THERE"]
    assert contents("C1 2") == ["one", "ONE", "here", "HERE"]
    page.until("$('sessions').value === 'C1 2'")
    assert page.status == "“C1” was changed elsewhere; this is saved as “C1 2”."


def test_a_reload_during_an_answer_keeps_question_and_answer(page: Page):
    gate = hold(page)
    page.send("rivers")
    page.until("!$('stop').hidden")
    page.reload()
    assert (page.articles, page.value("$('text').value")) == ([], "rivers")
    gate.set()
    page.browser.press("Enter", "\r", 13)
    page.until_shown("rivers", SCRIPT["rivers"])
    until(lambda: len(sessions.list_names()) == 1)
    page.value("window.fetch = ((old) => (path, ...more) => path.startsWith('sessions/') ? new Promise(() => {}) : "
               "old(path, ...more))(window.fetch)")  # fmt: skip
    page.ask("think")  # its saving never ends
    page.reload()
    until(lambda: contents("rivers") == ["rivers", SCRIPT["rivers"], "think", "It is four."])
    assert page.articles[2:] == ["think", "It is four."]


def test_drafts_stay_with_their_conversations(page: Page):
    save_session("C1", "one", "ONE")
    page.reload()
    page.type("a new question")
    page.choose("C1")
    page.until_shown("one", "ONE")
    assert page.value("$('text').value") == ""
    page.type("a second question")
    page.reload()
    page.until_shown("one", "ONE")
    assert page.value("$('text').value") == "a second question"
    page.value("sessionStorage.removeItem('current')")  # another tab, after this one was closed
    page.value("window.addEventListener('pagehide', () => sessionStorage.removeItem('current'))")
    page.reload()
    page.choose("a new question (not saved)")
    assert page.value("$('text').value") == "a new question"
    page.choose("C1")
    page.until("$('text').value === 'a second question'")


def test_a_conversation_has_its_own_model(page: Page, tmp_path: Any):
    page.value("$('model').value = 'second', $('model').dispatchEvent(new Event('change'))")
    page.ask("rivers")
    until(lambda: sessions.list_names() == ["rivers"])
    with GGUFFile.open(str(tmp_path / "b.gguf")) as file:
        assert sessions.read_session("rivers").model == sessions.describe_model(file)
    page.click("fresh")
    page.value("$('model').value = 'first', $('model').dispatchEvent(new Event('change'))")
    page.ask("hello")
    page.reload()
    assert page.value("$('model').value") == "first"
    page.choose("rivers")
    page.until("$('model').value === 'second'")
    page.ask("more")
    until(lambda: len(contents("rivers")) == 4)
    assert sessions.read_session("rivers").messages[-1]["model"] == "second"
    page.value("$('model').value = 'first', $('model').dispatchEvent(new Event('change'))")
    page.ask("third")
    until(lambda: len(contents("rivers")) == 6)
    with GGUFFile.open(str(tmp_path / "a.gguf")) as file:
        assert sessions.read_session("rivers").model == sessions.describe_model(file), "the file names who answered"


def test_an_unserved_model_is_not_replaced_silently(page: Page):
    with sessions.SessionFile("old") as file:
        file.chat.model = sessions.SessionModel("gone", "/gone.gguf", "0123456789abcdef")
        file.write([{"role": "user", "content": "one"}, {"role": "assistant", "content": "ONE"}])
    page.reload()
    page.choose("old")
    page.until_shown("one", "ONE")
    page.send("two")
    assert page.status == "gone is not served here; choose another model."
    assert page.value("$('text').value") == "two" and page.articles == ["one", "ONE"]


def test_a_failed_question_returns_to_its_text_field(page: Page):
    page.value("window.fetch = () => Promise.reject(new TypeError('no net'))")
    page.send("rivers")
    page.until("$('status').textContent === 'no net'")
    assert page.articles == [] and page.value("$('text').value") == "rivers" and sessions.list_names() == []


@pytest.mark.parametrize("width", WIDTHS)
def test_code_blocks_have_one_background_and_fit(page: Page, width: int):
    page.resize(width)
    page.ask("code")
    ground = "getComputedStyle(document.querySelector('{}')).backgroundColor"
    clear = "rgba(0, 0, 0, 0)"
    assert page.value(ground.format("figure pre code")) == clear != page.value(ground.format(".said > code"))
    assert page.value("document.documentElement.scrollWidth") <= width
