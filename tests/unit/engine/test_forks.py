"""Run eight threads with one model, and fork in the middle: answers are right, or clearly refused."""

import os
import subprocess
import sys

import pytest
from project import complaints
from selection import everything

PROGRAM = """
import os, random, sys, threading, time
from localllm import api, builtin_model

model = api.open_model(builtin_model(), 2)
prompts = ["What is localllm?", "How do I quantize?", "One two three", "Hello"]
expected = {prompt: "".join(model.generate(prompt, 24, temperature=0)) for prompt in prompts}
end, answers, wrong = time.monotonic() + SECONDS, [], []

def work(seed):
    draw = random.Random(seed)
    while time.monotonic() < end:
        prompt = draw.choice(prompts)
        text = "".join(model.generate(prompt, 24, temperature=0))
        (answers if text == expected[prompt] else wrong).append(text)

threads = [threading.Thread(target=work, args=(seed,)) for seed in range(8)]
for thread in threads:
    thread.start()
time.sleep(SECONDS / 2)
child = os.fork()
if child == 0:
    for use in (lambda: "".join(model.generate("Hi", 2)), lambda: model.logits([1]), model.sequence().close):
        try:
            use()
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    model.close()
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
for thread in threads:
    thread.join()
model.close()
print("wrong", len(wrong), "enough", len(answers) > 8)
"""

LOCKED = """
import os, sys
from contextlib import ExitStack
from localllm import api, builtin_model
from localllm.engine import forks
from localllm.generation.constraints import constraint as constraints

model = api.open_model(builtin_model(), 1)
"".join(model.generate("Hello", 2))
written, prefixes = model.session.cache.ngrams, model.session.cache.store
with ExitStack() as stack:
    for lock in (constraints._LOCK, *(owner.lock for owner in forks._owners)):
        stack.enter_context(lock)
    child = os.fork()
if child == 0:
    uses = [lambda: "".join(model.generate("Hi", 2)), lambda: model.logits([1]), lambda: model.vision.encode(b"")]
    for use in (*uses, written.get_corpus, lambda: prefixes.keep(None, None)):
        try:
            use()
        except Exception as error:
            print(type(error).__name__, error, flush=True)
    model.close()
    with api.open_model(builtin_model(), 1) as another:
        print("".join(another.generate("Hi", 4, regex="yes")), flush=True)
    sys.exit(7)
print("child", os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
print("".join(model.generate("Hi", 4, regex="yes")), flush=True)
model.close()
"""


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_child_forked_while_locks_are_held_refuses_and_opens_anew():
    ran = subprocess.run([sys.executable, "-c", LOCKED], capture_output=True, timeout=60)
    assert complaints(ran.stderr) == ""
    refused = "LocalllmError the model was opened before this process was forked: open it again in this process"
    assert ran.stdout.decode().splitlines() == [*[refused] * 5, "yes", "child 7", "yes"]


@pytest.mark.slow
@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_eight_threads_answer_right_while_the_process_forks():
    seconds = 30 if everything() else 2
    program = PROGRAM.replace("SECONDS", str(seconds))
    ran = subprocess.run([sys.executable, "-c", program], capture_output=True, timeout=120 + seconds)
    assert ran.stdout.decode().splitlines() == [
        *["LocalllmError the model was opened before this process was forked: open it again in this process"] * 3,
        "child 7",
        "wrong 0 enough True",
    ]
    assert complaints(ran.stderr) == ""
