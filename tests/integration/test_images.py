"""Test images from the command line to the answer: `run --image`, messages, chats, and refusals."""

import base64
import gc
import json
import shutil
from collections import OrderedDict
from contextlib import closing
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from engines import bound
from models import write
from models.projectors import PROJECTORS, projector, seeing, write_projector
from PIL import Image
from pooled import acquire

import localllm
from localllm.engine.image_tokens import cuts_image, find_last_end
from localllm.engine.runs import RunPlan
from localllm.errors import ContextError, LocalllmError, ModelError, UsageError
from localllm.files.models_folder import find_projector
from localllm.generation.chunked_prefill import prefill_prompt, split_around_images
from tests.goldens.test_logits import nmse
from tests.unit.engine.test_vision_encoder import picture

FAMILIES = "gemma3", "idefics3", "llava", "llava16", "qwen25vl", "qwen3vl", "lfm2", "mistral3", "internvl"


@pytest.fixture(scope="module")
def models(tmp_path_factory) -> Path:
    """Make a folder per family with a model, its projector and two images."""
    folder = tmp_path_factory.mktemp("seeing")
    for name in FAMILIES:
        (folder / name).mkdir()
        write(seeing(name, seed=5 if name in ("gemma3", "lfm2") else 0, context=2048), folder / name / "tiny.gguf")
        write_projector(projector(name), folder / name / "mmproj-tiny-F32.gguf")
    picture((131, 90), 1).save(folder / "one.png")
    picture((60, 200), 2).save(folder / "two.jpg")
    return folder


@pytest.fixture
def opened(models):
    with localllm.open(models / "gemma3" / "tiny.gguf", threads=2, cache=False) as model:
        yield model


@pytest.fixture
def call(cli):
    """Return a function that runs the program: exit code, stdout, stderr."""
    return lambda *arguments, stdin=b"": cli(*map(str, arguments), stdin=stdin)


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILIES)
def test_run_answers_depend_on_the_image_only(models, call, name):
    answers, path = [], models / name / "tiny.gguf"
    for image in (models / "one.png", models / "two.jpg", "-"):
        more, stdin = ["--temp", 0, "-n", 12, "-t", 2, "--no-cache"], (models / "one.png").read_bytes()
        code, out, err = call("run", path, "-p", "What?", "--image", image, *more, stdin=stdin if image == "-" else b"")
        assert code == 0 and "error" not in err
        answers.append(out)
    assert answers[0] == answers[2] != answers[1]


def test_images_precede_the_text_between_their_markers(models, opened):
    one, two = models / "one.png", models / "two.jpg"
    prompt = opened.session.encode_chat([{"role": "user", "content": "What?", "images": [one, two]}])
    begin, end = (opened.tokenizer.get_special_id(mark) for mark in ("<start_of_image>", "<end_of_image>"))
    images = [token for token in prompt if token < 0]
    assert len(images) == 8 and len(set(images)) == 8
    places = [place for place, token in enumerate(prompt) if token in (begin, end)]
    assert [prompt[place] for place in places] == [begin, end, begin, end]
    assert opened.tokenizer.decode(prompt[places[3] + 1 :], special=True).startswith("What?<|im_end|>")
    parts = [{"type": "image", "image": one}, {"type": "image", "image": two}, {"type": "text", "text": "What?"}]
    assert opened.session.encode_chat([{"role": "user", "content": parts}]) == prompt
    assert opened.vision.encoder.encoded == 2


def test_image_markers_in_a_text_stay_text(models, opened):
    message = {"role": "user", "content": "a \ufdd1 <start_of_image> b", "images": [models / "one.png"]}
    prompt = opened.session.encode_chat([message])
    assert sum(token < 0 for token in prompt) == 4
    assert prompt.count(opened.tokenizer.get_special_id("<start_of_image>")) == 1
    assert "\ufdd1" not in opened.tokenizer.decode([token for token in prompt if token >= 0], special=True)


def test_a_conversation_encodes_an_image_once(models, opened):
    """Prefill only the second question's own tokens."""
    session = opened.session
    first = session.ask("What?", images=[models / "one.png"])
    assert "".join(first) is not None
    assert first.cached_tokens == 0
    second = session.ask("And now?")
    list(second)
    assert second.cached_tokens >= first.prompt_tokens - 1
    assert opened.vision.encoder.encoded == 1
    assert session.undo() == "And now?" and session.undo() == "What?"
    again = session.ask("What?", images=[models / "two.jpg"])
    list(again)
    assert again.cached_tokens < first.prompt_tokens and opened.vision.encoder.encoded == 2


def test_a_continued_conversation_equals_one_prefilled_anew(models, opened):
    from localllm.generation.options import GenerationOptions
    from localllm.generation.sampling.options import SamplingOptions

    greedy = GenerationOptions(10, sampling=SamplingOptions(temperature=0))
    session = opened.session
    list(session.ask("What?", greedy, [models / "one.png"]))
    answer = session.ask("And this?", greedy, [models / "two.jpg"])
    list(answer)
    messages = session.messages[:-1]
    with localllm.open(opened.path, threads=2, cache=False) as other:
        fresh = other.session.chat(messages, greedy)
        list(fresh)
    assert fresh.tokens == answer.tokens and fresh.prompt == answer.prompt


@pytest.mark.parametrize("before", [0, 40, 450])
@pytest.mark.parametrize("name", ["gemma3", "qwen25vl", "mistral3"])
def test_another_question_encodes_and_prefills_no_image_again(tmp_path, name, before):
    """Prefill only the question, to the same bits, also where an image crosses the end of a run."""
    write(seeing(name, context=4096), tmp_path / "tiny.gguf")
    write_projector(projector(name, **({"side": 336} if name == "gemma3" else {})), tmp_path / "mmproj.gguf")
    one, two = picture((640, 480), 1), picture((320, 480), 2)

    def asked(question: str, *images: object) -> list[dict]:
        parts = [{"type": "image", "image": image} for image in images]
        parts = [{"type": "text", "text": "Look. " * before}, *parts, {"type": "text", "text": question}]
        return [{"role": "user", "content": parts}]

    def logits(model, prompt) -> tuple[int, np.ndarray]:
        """Return the number of prefilled tokens, and the next logits."""
        with acquire(model.session.cache, prompt) as begun:
            held = len(begun.sequence.tokens)
            return len(prompt) - held, prefill_prompt(begun.sequence, prompt, None)

    with localllm.open(tmp_path / "tiny.gguf", threads=2, cache=False) as model:
        first = model.chat(asked("What is it? " * 20, one, two), max_tokens=3)
        list(first)
        images = [place for place, token in enumerate(first.prompt) if token < 0]
        prompt = model.session.encode_chat(asked("And the colour?" * 15, one, two))
        count, row = logits(model, prompt)
        assert len(images) > 128 and count == len(prompt) - images[-1] - 1
        assert np.array_equal(row, prefill_prompt(model.engine.sequence(), prompt, None))
        other = model.session.encode_chat(asked("And the colour?" * 15, one, picture((320, 480), 3)))
        count, row = logits(model, other)
        assert count == len(other) - 1 - max(place for place in images if first.prompt[place] == other[place])
        assert np.array_equal(row, prefill_prompt(model.engine.sequence(), other, None))


def is_segment_end(tokens: list[int]) -> bool:
    """Return whether a prefill segment ends after these tokens, before text and before an image."""
    prompts = [*tokens, *[6] * 300], [*tokens, -1 - (9 << 15), *[6] * 300]
    return all(
        any(stretch.end == len(tokens) for stretch in split_around_images(prompt, RunPlan())) for prompt in prompts
    )


def test_segments_end_alike_whatever_follows():
    """Check ends of runs and of images in prompts of all types."""
    rng, runs = np.random.default_rng(0), RunPlan()
    for _ in range(300):
        tokens = list[int]()
        while len(tokens) < 1500:
            count, key = int(rng.integers(1, 700)), int(rng.integers(1, 3))
            tokens += [5] * count if rng.random() < 0.5 else [-1 - (key << 15 | row) for row in range(count)]
        length = int(rng.integers(0, 1400))
        ends = [stretch.end for stretch in split_around_images(tokens, runs)]
        wanted = max(
            [
                0,
                *(
                    end
                    for end in ends
                    if end <= length and not cuts_image(tokens, end) and is_segment_end(tokens[:end])
                ),
            ]
        )
        assert find_last_end(tokens, length, runs) == wanted


def test_batched_image_prompts_give_the_same_answers_as_single_ones(models, opened):
    messages = [[{"role": "user", "content": "What?", "images": [models / name]}] for name in ("one.png", "two.jpg")]
    messages.append([{"role": "user", "content": "What?"}])
    alone = []
    for one in messages:
        answer = opened.chat(one, max_tokens=8, temperature=0)
        list(answer)
        alone.append(answer.tokens)
    assert len({tuple(tokens) for tokens in alone}) > 1
    assert [answer.tokens for answer in opened.map(messages, max_tokens=8, temperature=0)] == alone
    (best, *_) = opened.candidates(messages[0], n=2, max_tokens=8, temperature=0)
    assert best.tokens == alone[0]


def test_map_accepts_images_in_every_form(models, call, tmp_path, monkeypatch):
    """Compare with `run`; an unreadable image is an error of its record."""
    monkeypatch.chdir(models)
    path, more = models / "gemma3" / "tiny.gguf", ["--temp", 0, "-n", 8, "-t", 2]
    url = "data:image/png;base64," + base64.b64encode((models / "one.png").read_bytes()).decode()
    parts = [{"type": "image", "image": "two.jpg"}, {"type": "text", "text": "What?"}]
    records = [
        {"prompt": "What?", "image": "one.png"}, {"prompt": "What?", "image": ["one.png", "two.jpg"]},
        {"prompt": "What?", "image": url}, {"messages": [{"role": "user", "content": parts}]}, {"prompt": "What?"},
        {"prompt": "What?", "image": "none.png"}, {"prompt": "What?", "image": 5}, {"prompt": "?", "image": __file__},
        {"messages": [{"role": "user", "content": "What?"}], "image": "one.png"},
    ]  # fmt: skip
    (tmp_path / "in.jsonl").write_text("\n".join(map(json.dumps, records)))
    code, out, _ = call("map", path, tmp_path / "in.jsonl", *more)
    results = [json.loads(line) for line in out.splitlines()]
    assert code == 6 and [each["id"] for each in results] == [*range(1, 10)]
    shown = (["one.png"], ["one.png", "two.jpg"], ["one.png"], ["two.jpg"], [])
    for each, images in zip(results, shown, strict=False):
        options = [word for image in images for word in ("--image", image)]
        assert each["output"] == call("run", path, "-p", "What?", *more, "--no-cache", *options)[1].removesuffix("\n")
    assert len({each["output"] for each in results[:5]}) == 4
    assert [each["error"].partition(": ")[0] for each in results[5:]] == [
        "cannot read the image none.png", '"image" must be the path of an image, or a list of them', __file__,
        '"image" needs a prompt; in "messages", put images into the content',
    ]  # fmt: skip
    named = call("map", path, "-p", "About {image}:", *more, stdin=json.dumps(records[0]).encode())[1]
    plain = call("run", path, "-p", "About one.png:", *more, "--no-cache")[1]
    assert json.loads(named)["output"] == plain.removesuffix("\n")
    blind = write(seeing("llava", context=2048), tmp_path / "blind.gguf")
    raw, sees_none = (
        json.loads(call("map", model, tmp_path / "in.jsonl", *more, *options)[1].splitlines()[0])["error"]
        for model, options in ((path, ["--raw"]), (blind, []))
    )
    assert "images cannot be combined with raw" in raw and "blind.gguf cannot read images" in sees_none
    by_option = call("map", blind, tmp_path / "in.jsonl", *more, "--mmproj", models / "llava" / "mmproj-tiny-F32.gguf")
    assert "output" in json.loads(by_option[1].splitlines()[0])


def test_images_of_waiting_requests_are_kept(models, opened, monkeypatch):
    """Evict other images first."""
    from localllm.generation import image_encoder as eye
    from localllm.generation.options import GenerationOptions
    from localllm.generation.sampling.options import SamplingOptions

    monkeypatch.setattr(eye, "MIN_CACHED", 0)
    monkeypatch.setattr(eye, "MAX_BYTES", 0)
    asked = [{"role": "user", "content": "What?", "images": [models / "one.png", models / "two.jpg"]}]
    options = GenerationOptions(4, sampling=SamplingOptions(temperature=0))
    answers = [opened.session.chat(asked, options) for _ in range(2)]
    requests = [opened.session.request(asked, options) for _ in range(2)]
    assert opened.vision.encoder.encoded == 8 and not opened.vision.encoder._cache
    texts = ["".join(answer) for answer in answers]
    with closing(opened.batch(iter(requests))) as batch:
        assert sum(map(len, batch)) == 2
    assert texts == [request.answers[0].text for request in requests]
    one_by_one = opened.session.encode_chat(asked)
    del answers, requests, batch
    opened.session.cache.idle[-1].close()
    gc.collect()
    with pytest.raises(UsageError, match="token ids"):
        opened.sequence().append(one_by_one)


@pytest.mark.parametrize(
    ("count", "mega", "left"),
    [(129, 2, 128), (128, 2, 128), (70, 100, 64), (64, 100, 64), (1025, 0.25, 1024), (9, 1, 9)],
)
def test_the_least_recent_images_are_evicted(count: int, mega: float, left: int):
    """Keep at least 64, and the latest that fit into 256 MB."""
    from localllm.generation.image_encoder import EncodedImage, ImageEncoder

    eye, half = ImageEncoder.__new__(ImageEncoder), SimpleNamespace(rows=SimpleNamespace(nbytes=int(mega * 2**19)))
    eye._cache = OrderedDict((number.to_bytes(2), EncodedImage([], [half, half])) for number in range(count))
    eye._evict_images()
    assert [*eye._cache] == [number.to_bytes(2) for number in range(count - left, count)]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "precise"), [("gemma3", False), *((name, True) for name in PROJECTORS)])
def test_prefill_segments_do_not_cut_images(tmp_path, name, precise):
    """Compare logits of 8 prompts, prefilled in chunks of 64 tokens, with each prompt alone.

    Gemma's images have 144 rows that attend to each other and are prefilled at once.
    """
    from localllm.generation.chunked_prefill import prefill_prompt
    from localllm.generation.options import GenerationOptions
    from localllm.generation.scheduler import Scheduler

    write(seeing(name, context=4096), tmp_path / "tiny.gguf")
    write_projector(projector(name, **({"side": 336} if name == "gemma3" else {})), tmp_path / "mmproj.gguf")
    one, two = picture((480, 320), 1), picture((480, 320), 2)
    shown = [[], [one], [two], [one, two], [two, one], [], [one], [two]]
    with localllm.open(tmp_path / "tiny.gguf", threads=2, cache=False) as model:
        requests, logits_by_prompt = [], {}
        for number, images in enumerate(shown):
            parts = [{"type": "text", "text": "Look. " * (7 * number)}]
            parts += [{"type": "image", "image": image} for image in images]
            asked = [{"role": "user", "content": [*parts, {"type": "text", "text": "What? " * number}]}]
            requests.append(model.session.request(asked, GenerationOptions(1), key=number))
            requests[-1].listener = lambda one, token, parts, row: logits_by_prompt.setdefault(
                one.request.key, row.copy()
            )
        batch = Scheduler(model.engine, model.tokenizer, iter(requests), 8, chunk=64, precise=precise)
        assert sum(map(len, batch)) == 8
        batch.close()
        for request in requests:
            alone = prefill_prompt(model.engine.sequence(), request.prompt, None)[0]
            assert nmse(logits_by_prompt[request.key], alone[: model.tokenizer.vocab_size]) < (
                1e-10 if precise else 1e-4
            )


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--image", "none.png"], "cannot read the image none.png: No such file"),
        (["--image", __file__], "expected an image file"),
        (["--image", "{one}", "--mmproj", "none.gguf"], "none.gguf"),
        (["--image", "{one}", "--mmproj", "{model}"], "(mmproj), found a language model"),
        (["--image", "{one}", "--mmproj", "{other}"], "the projector of another model"),
        (["--image", "{one}", "--raw"], "images need a chat template"),
        (["--image", "{one}", "--receipt", "r.json"], "--image cannot be combined with --receipt"),
        (["--image", "-", "--image", "-"], "stdin"),
    ],
)
def test_unusable_images_are_refused_in_one_line(models, call, arguments, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    wide = write_projector(projector("gemma3", out=64), tmp_path / "wide.gguf")
    path = models / "gemma3" / "tiny.gguf"
    words = [argument.format(one=models / "one.png", model=path, other=wide) for argument in arguments]
    code, out, err = call("run", path, "-p", "What?", "-n", 4, "--no-cache", *words)
    assert code != 0 and not out and message in err
    assert err.splitlines()[-1].startswith("localllm: error: ") and "Traceback" not in err


def test_a_model_without_a_usable_projector_refuses_images(models, call, tmp_path):
    """Try no projector, several, one for another vocabulary, and a family without embedding inputs."""
    path, image = tmp_path / "tiny.gguf", models / "one.png"
    shutil.copy(models / "gemma3" / "tiny.gguf", path)
    assert "no projector (mmproj" in call("run", path, "-p", "?", "--image", image)[2]
    for name in ("a-mmproj.gguf", "b-mmproj.gguf"):
        write_projector(projector("idefics3"), tmp_path / name)
    assert "there are 2 projectors" in call("run", path, "-p", "?", "--image", image)[2]
    chosen = ["--mmproj", tmp_path / "a-mmproj.gguf"]
    _, _, err = call("run", path, "-p", "?", "--image", image, *chosen)
    assert "this model lacks the token <fake_token_around_image>" in err
    from models import model

    gpt2 = model("gpt2", width=96, heads=3)
    blind = write(gpt2, tmp_path / "blind.gguf")
    write_projector(projector("llava"), tmp_path / "c.gguf")
    _, _, err = call("run", blind, "-p", "?", "--image", image, "--mmproj", tmp_path / "c.gguf")
    assert "images are not supported by gpt2 models" in err


def test_without_pillow_the_extra_is_named(models, call, monkeypatch):
    monkeypatch.setitem(__import__("sys").modules, "PIL", None)
    code, _, err = call("run", models / "gemma3" / "tiny.gguf", "-p", "?", "--image", models / "one.png")
    assert code != 0 and "pip install 'localllm[images]'" in err


def test_the_projector_of_a_model_is_chosen_by_name(tmp_path):
    """Take the only one, or that of the same name in any format."""
    for name in ("small-Q4_K_M.gguf", "large-Q4_K_M.gguf", "mmproj-small-f16.gguf"):
        (tmp_path / name).write_bytes(b"")
    for model in ("small-Q4_K_M.gguf", "large-Q4_K_M.gguf"):
        assert find_projector(str(tmp_path / model)).endswith("mmproj-small-f16.gguf")
    (tmp_path / "large-mmproj-Q8_0.gguf").write_bytes(b"")
    assert find_projector(str(tmp_path / "small-Q4_K_M.gguf")).endswith("mmproj-small-f16.gguf")
    assert find_projector(str(tmp_path / "large-Q4_K_M.gguf")).endswith("large-mmproj-Q8_0.gguf")
    with pytest.raises(UsageError, match="there are 2 projectors"):
        find_projector(str(tmp_path / "other.gguf"))


def test_a_template_that_drops_images_is_refused(models, opened):
    with (
        localllm.open(opened.path, chat_template="{{ messages[0].role }}", cache=False) as other,
        pytest.raises(LocalllmError, match=r"render 1 images \(found 0\)"),
    ):
        other.chat([{"role": "user", "content": "What?", "images": [models / "one.png"]}])


def test_a_projector_opened_as_a_model_is_refused(models, call):
    code, _, err = call("run", models / "gemma3" / "mmproj-tiny-F32.gguf", "-p", "Hi")
    assert code != 0 and "mmproj" in err
    with pytest.raises(ModelError):
        localllm.open(models / "gemma3" / "mmproj-tiny-F32.gguf")


def test_arrays_pillow_images_and_files_give_the_same_answer(models, opened):
    path = models / "one.png"
    image = Image.open(path)
    prompts = [
        opened.session.encode_chat([{"role": "user", "content": "?", "images": [source]}])
        for source in (path, str(path), path.read_bytes(), image, np.asarray(image))
    ]
    assert all(prompt == prompts[0] for prompt in prompts) and opened.vision.encoder.encoded == 1


def test_chat_sends_saves_and_retries_images(models, opened, monkeypatch, tmp_path, capfd):
    from localllm.cli.interactive.conversation import TerminalConversation
    from localllm.cli.interactive.slash_commands import CommandTools, execute
    from localllm.cli.terminal.output import ProgressLine
    from localllm.generation.options import GenerationOptions
    from localllm.services import sessions

    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path))
    path = models / "one.png"
    conversation = TerminalConversation(opened, GenerationOptions(6), ProgressLine())

    def say(text: str) -> None:
        if not execute(conversation, text, CommandTools(lambda name: opened, lambda text: None)):
            conversation.ask(text)

    for text in ("/save trip", f"/image {path}", f"/image {models / 'two.jpg'}", "/undo", "What?"):
        say(text)
    assert conversation.images == [] and conversation.lines[0]["images"] == [str(path)]
    first = opened.session._answer.prompt
    assert sum(token < 0 for token in first) == 4
    say("/retry")
    assert opened.session._answer.prompt == first and conversation.lines[0]["images"] == [str(path)]
    say("And now?")
    assert [line["content"] for line in conversation.lines if line["role"] == "user"] == ["What?", "And now?"]
    conversation.leave()
    kept = sessions.read_session("trip").messages
    assert sessions.select_visible_fields(kept)[0] == {"role": "user", "content": "What?", "images": [str(path)]}
    say("/load trip")
    say("Once more?")
    prompt = opened.session._answer.prompt
    assert sum(token < 0 for token in prompt) == 4 and prompt[: len(first)] == first
    with pytest.raises(UsageError, match="No such file"):
        say("/image none.png")
    conversation.leave()


SMOLVLM = """<|im_start|>{% for message in messages %}{{message['role'] | capitalize}}\
{% if message['content'][0]['type'] == 'image' %}{{':'}}{% else %}{{': '}}{% endif %}\
{% for line in message['content'] %}{% if line['type'] == 'text' %}{{line['text']}}\
{% elif line['type'] == 'image' %}{{ '<image>' }}{% endif %}{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}{{ 'Assistant:' }}{% endif %}"""


def test_a_template_that_needs_parts_gets_them(models, opened):
    """Give SmolVLM's template, which drops a string, its parts."""
    with localllm.open(opened.path, chat_template=SMOLVLM, cache=False, threads=1) as other:
        messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "What?"}]
        text = other.tokenizer.decode(other.session.encode_chat(messages), special=True)
        assert text == "<|im_start|>System: Be brief.<|im_end|>\nUser: What?<|im_end|>\nAssistant:"
        shown = other.session.encode_chat([{"role": "user", "content": "What?", "images": [models / "one.png"]}])
        assert sum(token < 0 for token in shown) == 4
        words = other.tokenizer.decode([token for token in shown if token >= 0], special=True)
        assert words == "<|im_start|>User: <start_of_image><end_of_image>What?<|im_end|>\nAssistant:"


@pytest.mark.parametrize("name", ["gemma3", "qwen25vl", "llava"])
def test_shifting_the_context_moves_or_drops_whole_images(tmp_path, name):
    """Compare with a prefill of the rest; refuse an image larger than the context."""
    path = write(seeing(name, context=2048), tmp_path / "tiny.gguf")
    write_projector(projector(name, **({"side": 336} if name == "gemma3" else {})), tmp_path / "mmproj.gguf")
    parts = [{"type": "text", "text": "Look. " * 9}]
    for seed in (1, 2, 3):
        parts += [{"type": "image", "image": picture((170, 120), seed)}, {"type": "text", "text": "And this? " * 12}]
    token_lists, rows = [], []
    for backend in ("cpu", "reference"):
        with localllm.open(path, threads=2, cache=False, backend=backend, kv_type="f32", context=384) as model:
            answer = model.chat([{"role": "user", "content": parts}], 12, on_overflow="shift", temperature=0)
            list(answer)
            assert answer.prompt_tokens + 12 > 384 and answer.dropped >= 64
            token_lists.append(answer.tokens)
            sequence = model.session.cache.idle[-1]
            assert sequence.tokens[: answer.prompt_tokens] == answer.prompt
            rows.append(sequence.append([5, 6, 7], "all"))
            assert all(not cuts_image(sequence._sequence.tokens, place) for place in (answer.kept, 384))
    assert token_lists[0] == token_lists[1] and nmse(*rows) < bound(1e-8, 1e-5)
    if name != "qwen25vl":  # whose images have more rows
        return
    with (
        localllm.open(path, threads=2, cache=False, context=256) as model,
        pytest.raises(ContextError, match="does not fit the context of 256"),
    ):
        messages = [{"role": "user", "content": "?", "images": [picture((640, 480), 1)]}]
        list(model.chat(messages, 2, on_overflow="shift"))


def test_a_draft_model_without_vision_does_not_change_the_answer(models, opened):
    """Draft from the text alone; compare also without drafts and with several forks."""
    messages = [{"role": "user", "content": "What? " * 9, "images": [models / "one.png", models / "two.jpg"]}]
    with localllm.open(opened.path, threads=1, cache=False) as small:
        token_lists = []
        for speculate in ("off", "ngram", small):
            answer = opened.chat(messages, 24, temperature=0, speculate=speculate)
            list(answer)
            token_lists.append(answer.tokens)
            if speculate is small:
                assert answer.drafted
    assert token_lists[0] == token_lists[1] == token_lists[2]
    assert {tuple(one.tokens) for one in opened.candidates(messages, n=3, max_tokens=24, temperature=0)} == {
        tuple(token_lists[0])
    }


def test_an_image_in_a_piped_chat_equals_run(models, call):
    """Refuse unreadable ones."""
    path, more = models / "gemma3" / "tiny.gguf", ["--temp", 0, "-n", 8, "-t", 2, "--no-cache"]
    shown = call("chat", path, "--image", models / "one.png", *more, stdin=b"What?")
    assert shown[:2] == call("run", path, "-p", "What?", "--image", models / "one.png", *more)[:2]
    assert shown[1] != call("chat", path, *more, stdin=b"What?")[1]
    for source, message in (
        ("-", "reads prompts from stdin: use `localllm run`"),
        ("https://a.example/b.png", "are not downloaded"),
    ):
        code, out, err = call("chat", path, "--image", source, *more, stdin=b"What?")
        assert code != 0 and not out and message in err and "Traceback" not in err
