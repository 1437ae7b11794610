"""Test the page's controls in headless Chromium: with the keyboard, by a screen reader, and what they do."""

from typing import Any

import pytest
from browser import CHROMIUM
from chat_page import SCRIPT, WIDTHS, Page, contents, save_session

from localllm.services import sessions
from tests.integration.test_serve import until

pytestmark = [pytest.mark.slow, pytest.mark.skipif(CHROMIUM is None, reason="needs Chromium")]

CONTROLS = {
    "button",
    "textbox",
    "searchbox",
    "combobox",
    "listbox",
    "spinbutton",
    "link",
    "checkbox",
    "DisclosureTriangle",
}
# Collects each text that the live region for answers gets.
LISTEN = """window.spoken = [];
const add = ({ addedNodes }) => addedNodes.forEach((node) => window.spoken.push(node.textContent));
new MutationObserver((records) => records.forEach(add)).observe($('spoken'), { childList: true })"""
ACTIVE = (
    """(({ id, className, tagName }) => tagName === 'BODY' ? '' : id || className || tagName)(document.activeElement)"""
)


def list_accessible(page: Page) -> list[dict[str, Any]]:
    """List the nodes of the accessibility tree: role, name and properties."""
    page.browser.call("Accessibility.enable")
    nodes = page.browser.call("Accessibility.getFullAXTree")["nodes"]
    return [
        {
            "role": node["role"]["value"],
            "name": node.get("name", {}).get("value", ""),
            **{each["name"]: each["value"].get("value") for each in node.get("properties", ())},
        }
        for node in nodes
        if not node["ignored"]
    ]


def set_field(page: Page, id: str, value: str) -> None:
    page.value(f"$('{id}').value = {value!r}; for (const name of ['input', 'change']) "
               f"$('{id}').dispatchEvent(new Event(name, {{ bubbles: true }}))")  # fmt: skip


@pytest.mark.parametrize("width", WIDTHS)
def test_every_control_has_a_role_and_a_name(page: Page, width: int):
    page.resize(width)
    page.reload()
    page.value("if ($('list').hidden) $('fold').click(); $('setup').click()")
    page.ask("code")
    page.ask("think")
    nodes = list_accessible(page)
    controls = [(node["role"], node["name"]) for node in nodes if node["role"] in CONTROLS]
    assert [role for role, name in controls if not name.strip()] == []
    named = {
        ("link", "Skip to the message"), ("combobox", "Model"), ("button", "Settings"), ("textbox", "System prompt"),
        ("spinbutton", "Temperature"), ("combobox", "Colours"), ("button", "Conversations"), ("button", "New"),
        ("searchbox", "Search"), ("listbox", "Conversation"), ("button", "Rename…"), ("button", "Delete…"),
        ("button", "Copy as Markdown"), ("button", "Copy code"), ("button", "Copy answer"),
        ("button", "Edit question: code"), ("textbox", "Message"), ("button", "Send"),
    }  # fmt: skip
    assert named <= set(controls)
    landmarks = {(node["role"], node["name"]) for node in nodes}
    assert {("banner", ""), ("navigation", "Conversations"), ("main", ""), ("form", "Question")} <= landmarks
    assert {("heading", "You"), ("heading", "Answer"), ("log", "Messages")} <= landmarks
    live = {
        (node["role"], node["name"]): node.get("live", "off") for node in nodes if node["role"] in ("log", "status")
    }
    assert live["log", "Messages"] == "off" and live["log", "New text of the answer"] == live["status", ""] == "polite"
    assert page.value("document.documentElement.scrollWidth") <= width


def test_a_screen_reader_gets_each_sentence_of_an_answer_once(page: Page):
    page.value(LISTEN)
    page.ask("sentences")
    page.until("window.spoken.length")
    spoken = page.value("window.spoken")
    assert "".join(spoken) == SCRIPT["sentences"] and len(spoken) == 4
    assert [text.strip() for text in spoken] == ["One is 1.5, roughly.", "Is it?", "Yes!", "And the rest"]
    assert page.status.startswith("The answer is complete: ")


def test_the_status_says_states_and_counts_no_tokens(page: Page):
    page.value("window.states = []; new MutationObserver(() => window.states.push($('status').textContent))"
               ".observe($('status'), { childList: true })")  # fmt: skip
    page.ask("think")
    page.until("window.states.length >= 4")
    *states, last = page.value("window.states")
    assert states == ["Reading the prompt…", "Thinking…", "Answering…"] and last.startswith("The answer is complete")


@pytest.mark.parametrize("width", WIDTHS)
def test_tab_reaches_every_control_in_reading_order_and_leaves_the_page(page: Page, width: int):
    page.resize(width)
    page.reload()
    page.ask("code")
    page.until("$('attach').hidden")  # whether the model sees is known now
    page.value("$('setup').click(); if ($('list').hidden) $('fold').click(); $('text').focus()")  # fmt: skip
    for _ in range(2):  # the first round begins at the message, and ends in the browser's own controls
        focused = list[str]()
        while not focused or (focused[-1] and len(focused) < 40):
            page.browser.press("Tab", code=9)
            focused.append(page.value(ACTIVE))
    assert focused == [
        "skip", "model", "setup", "system", "temperature", "theme", "fold", "fresh", "search", "sessions", "keep",
        "remove", "export", "log", "small", "small", "small", "PRE", "text", "send", "",
    ]  # fmt: skip


def test_the_focus_stays_with_the_reader_when_an_answer_ends(page: Page):
    page.ask("code")
    page.send("long")
    page.value("$('log').focus()")
    page.until("document.querySelectorAll('article').length === 4 && !$('send').hidden")
    assert page.value("document.activeElement.id") == "log"
    page.send("long")
    page.until("!$('stop').hidden")
    page.value("$('stop').focus(); $('stop').click()")
    page.until("!$('send').hidden")
    assert page.value("document.activeElement.id") == "text"


def test_an_unfolded_part_and_its_focus_survive_new_tokens(page: Page):
    page.served.chat("warm", model="first")
    gate = page.served.model("first").engine.gate
    page.send("long thoughts")
    page.until("Boolean(document.querySelector('details'))")
    gate.clear()
    page.value("document.querySelector('summary').focus(); document.querySelector('summary').click(); "
               "window.fold = document.querySelector('details')")  # fmt: skip
    gate.set()
    page.until("$('send').hidden === false")
    assert page.value("window.fold.isConnected && window.fold.open && document.activeElement.tagName") == "SUMMARY"
    assert page.articles == ["long thoughts", "Done."]


def test_a_conversation_is_renamed_where_it_is_saved(page: Page):
    save_session("C1", "one", "ONE")
    save_session("C2", "two", "TWO")
    page.reload()
    page.choose("C1")
    page.until_shown("one", "ONE")
    page.save_as("C2")
    page.until("$('status').textContent.includes('already')")
    page.save_as("C3")
    page.until("$('status').textContent === 'Renamed to “C3”.'")
    assert contents("C3") == ["one", "ONE"] and sorted(sessions.list_names()) == ["C2", "C3"]
    assert page.value("document.title") == "C3 – localllm"
    page.ask("more")
    until(lambda: contents("C3") == ["one", "ONE", "more", "MORE"])


def test_a_conversation_is_deleted_only_after_a_question(page: Page):
    save_session("C1", "one", "ONE")
    page.reload()
    page.choose("C1")
    page.until_shown("one", "ONE")
    page.value("window.confirm = (text) => { window.asked = text; return false; }")
    page.click("remove")
    assert page.value("window.asked") == "Delete “C1”? It cannot be restored." and contents("C1")
    page.value("window.confirm = () => true")
    save_session("C1", "one", "ONE", "there", "THERE")
    page.click("remove")
    page.until("$('status').textContent.includes('changed elsewhere; nothing was deleted')")
    assert len(contents("C1")) == 4
    page.reload()
    page.until_shown("one", "ONE", "there", "THERE")
    page.value("window.confirm = () => true")
    page.click("remove")
    page.until("$('status').textContent === '“C1” is deleted.'")
    assert sessions.list_names() == [] and page.articles == []
    page.reload()
    assert page.value("[...$('sessions').options].map((each) => each.textContent).join()") == "(new)"


def test_search_finds_conversations_by_their_words(page: Page):
    save_session("C1", "Which rivers?", "The Rhine")
    save_session("C2", "two", "TWO")
    page.reload()
    page.type("a draft about mountains")
    names = "[...$('sessions').options].map((each) => each.textContent).join()"
    for query, expected in (("RHINE rivers", "C1"), ("mountains", "a draft about mountains (not saved)"), ("c2", "C2")):
        set_field(page, "search", query)
        page.until(f"{names} === {expected!r}")
        page.until("$('matches').textContent === '1 conversation'")
    set_field(page, "search", "")
    page.until("$('sessions').options.length === 3 && $('matches').textContent === ''")


def test_system_prompt_and_temperature_are_sent_and_saved_with_the_conversation(page: Page):
    page.value("window.bodies = []; window.fetch = ((old) => (path, options = {}) => { if (path.includes('chat')) "
               "window.bodies.push(JSON.parse(options.body)); return old(path, options); })(window.fetch)")  # fmt: skip
    set_field(page, "system", "Be brief.")
    set_field(page, "temperature", "0.25")
    page.reload()
    assert page.value("[$('system').value, $('temperature').value]") == ["Be brief.", "0.25"]
    page.value("window.bodies = []; window.fetch = ((old) => (path, options = {}) => { if (path.includes('chat')) "
               "window.bodies.push(JSON.parse(options.body)); return old(path, options); })(window.fetch)")  # fmt: skip
    page.send("rivers")
    page.until("$('log').children.length === 3 && !$('send').hidden")
    body = page.value("window.bodies[0]")
    assert body["temperature"] == 0.25 and body["messages"][0] == {"role": "system", "content": "Be brief."}
    until(lambda: contents("rivers") == ["Be brief.", "rivers", SCRIPT["rivers"]])
    assert sessions.read_session("rivers").settings == {"temperature": 0.25}
    set_field(page, "system", "Be polite.")
    set_field(page, "temperature", "")
    until(lambda: contents("rivers")[0] == "Be polite." and not sessions.read_session("rivers").settings)
    page.click("fresh")
    assert page.value("[$('system').value, $('temperature').value]") == ["", ""]
    page.choose("rivers")
    page.until("$('system').value === 'Be polite.'")
    assert page.articles == ["Be polite.", "rivers", SCRIPT["rivers"]]


@pytest.mark.parametrize("is_secure", [True, False])
def test_a_conversation_is_copied_as_markdown(page: Page, is_secure: bool):
    set_field(page, "system", "Be brief.")
    page.send("code")
    page.until("document.querySelectorAll('article').length === 3 && !$('send').hidden")
    if is_secure:
        page.value("navigator.clipboard.writeText = async (text) => { window.copied = text; }")
    else:
        page.value("Object.defineProperty(navigator, 'clipboard', { value: undefined }); document.execCommand = () => "
                   "{ window.copied = document.activeElement.value; return true; }")  # fmt: skip
    until(lambda: bool(sessions.list_names()))
    page.value("$('export').focus()")
    page.click("export")
    page.until("$('status').textContent === 'Conversation copied.'")
    expected = ["# code", "## System prompt", "Be brief.", "## You", "code", "## Answer", SCRIPT["code"]]
    assert page.value("window.copied") == "\n\n".join(expected) + "\n"
    assert page.value("document.activeElement.id") == "export"
    page.value("document.querySelector('[aria-label=\"Copy answer\"]').click()")
    page.until("$('status').textContent === 'Answer copied.'")
    assert page.value("window.copied") == SCRIPT["code"]


def test_colours_can_be_chosen_and_stay(page: Page):
    ground = "getComputedStyle(document.body).backgroundColor"
    for theme, colour in (("dark", "rgb(18, 18, 18)"), ("light", "rgb(255, 255, 255)")):
        set_field(page, "theme", theme)
        assert page.value(ground) == colour
        page.reload()
        assert page.value(ground) == colour and page.value("$('theme').value") == theme
    set_field(page, "theme", "")
    page.browser.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": "dark"}])
    assert page.value(ground) == "rgb(18, 18, 18)"
    page.browser.call("Emulation.setEmulatedMedia", features=[])
