"""Templates from strangers: none takes over two seconds or 256 MB, whatever it does and wherever."""

import os
import resource
import runpy
import signal
import sys
import time
from contextlib import nullcontext
from io import BytesIO
from types import SimpleNamespace
from typing import Any, NoReturn

import pytest
from jinja2 import nodes

from localllm.errors import ModelError
from localllm.text import sandbox, templates
from localllm.text import sandbox as limits
from localllm.text import template_probe as trial
from localllm.text.sandbox import LimitError, compile_template, render_template
from localllm.text.templates import ChatTemplate

USER = {"role": "user", "content": "Hi"}
LOOP = "{% for i in range(99999) %}"
BOMBS = {
    "a format many times": "{{ ('{0}' * 99999).format('a' * 99999) }}",
    "a format many times by %": "{{ ('%(a)s' * 99999) % {'a': 'x' * 99999} }}",
    "a format many times by a filter": "{{ ('%(a)s' * 99999)|format(a='x' * 99999) }}",
    "a text many times": "{{ ['x' * 999999] * 999 }}",
    "a text many times in JSON": "{{ (['x' * 999999] * 999)|tojson }}",
    "a text to fill": "{{ [1]|batch(999, 'x' * 999999)|list }}",
    "lipsum": "{{ lipsum(16000000) }}",
    "cycler": "{{ cycler('a') }}",
    "a loop with a filter": LOOP + "{% for j in range(99999) if j < 0 %}{% endfor %}{% endfor %}",
    "one loop that finds nothing": "{% for i in range(99999) if range(99999)|list|length < 0 %}{% endfor %}",
    "chained maps": "{{ range(99999)" + "|map('string')|map('upper')" * 300 + "|list|length }}",
    "chained attributes": "{{ range(99999)" + "|map(attribute='real')" * 500 + "|list|length }}",
    "a comprehension of lists": "{{ range(99999)|map('list')|list }}",
    "sums": "{{ (range(99999)|list * 2000)|sum }}",
    "source of megabytes": "{{a}}" * 1_000_000,
    "deep parentheses": "{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}",
    "deep lists": "{{ " + "[" * 200 + "]" * 200 + " }}",
    "deep ifs": "{% if 1 %}" * 900 + "{% endif %}" * 900,
    "width": "{{ '%99999999d' % 1 }}",
    "width beside": "{{ '%*d' % (999999999, 1) }}",
    "width within": "{{ '{:{}}'.format(1, 999999999) }}",
    "replace": "{{ ('a' * 9999).replace('a', 'b' * 9999999) }}",
    "replace nothing": "{{ ('a' * 99999).replace('', 'b' * 99999) }}",
    "replace, a filter": "{{ ('a' * 9999)|replace('a', 'b' * 99999) }}",
    "join": "{{ ('a' * 99999).join(['b'] * 99999) }}",
    "join, a filter": "{{ (['b'] * 99999)|join('a' * 99999) }}",
    "join of a generator": "{{ range(99999)|map('string')|join('a' * 99999) }}",
    "translate": "{{ ('a' * 99999).translate({97: 'b' * 9999999}) }}",
    "indented JSON": "{{ range(9999)|list|tojson(indent=99999) }}",
    "indented JSON by text": "{{ range(9999)|list|tojson(indent='a' * 99999) }}",
    "indent": "{{ ('\n' * 99999)|indent(999) }}",
    "bytes": "{{ ('a' * 999999).encode('utf-32') }}",
    "ljust": "{{ 'a'.ljust(999999999) }}",
    "wordwrap": "{{ ('a b' * 99999)|wordwrap(1) }}",
    "a big integer": "{% set ns = namespace(x=3) %}" + LOOP + "{% set ns.x = ns.x * ns.x %}{% endfor %}",
    "a power": "{{ 10 ** 9999999 }}",
    "a shared list": "{% set ns = namespace(x=[]) %}" + LOOP + "{% set ns.x = [ns.x, ns.x] %}{% endfor %}{{ ns.x }}",
    "a shared dictionary": "{% set ns = namespace(x={}) %}"
    + LOOP
    + "{% set ns.x = dict(a=ns.x, b=ns.x) %}{% endfor %}",
    "a text in a block": "{% set x %}" + LOOP + "y" * 9999 + "{% endfor %}{% endset %}",
    "a constant in a block": "{% set x %}" + LOOP + "{{ '" + "y" * 9999 + "' }}{% endfor %}{% endset %}",
    "texts in a list": "{% set ns = namespace(x=[]) %}" + LOOP + "{% set ns.x = ns.x + ['y' * 999999] %}{% endfor %}",
    "set": "{% set a = 'x' * 7999999 %}" + "".join(f"{{% set a{n} = a ~ '{n}' %}}" for n in range(500)),
    "a macro for ever": "{% macro f() %}{{ f() }}{{ f() }}{% endmacro %}{{ f() }}",
    "the characters": "{{ ('a' * 7999999)|list|length }}",
    "split": "{{ ('a ' * 3999999).split()|length }}",
    "sorted": LOOP + "{{ range(99999)|sort|length }}{% endfor %}",
    "words": "{{ ('a b ' * 1999999)|title|length }}",
    "groups of characters": "{{ ('ba' * 3999999)|groupby('real')|length }}",
    "signs of a format": "{{ ('%' * 7999999) % 1 }}",
    "an attribute in a format": "{% set ns = namespace(x='x' * 7999999) %}{{ ('{0.x}' * 9999).format(ns) }}",
    "a part in a format": "{{ ('{a[x]}' * 9999).format(a={'x': 'x' * 799999}) }}",
    "join of a range": "{{ range(99999)|join('a' * 99999) }}",
    "join of a generator, the method": "{{ ('a' * 99999).join(range(99999)|map('string')) }}",
    "join of an attribute": "{% set ns = namespace(x='x' * 7999999) %}{{ ([ns] * 9999)|join(attribute='x') }}",
    "join of a loop": "{% for x in ['x' * 7999999, 'b'] %}{{ ([loop] * 999)|join(attribute='previtem') }}{% endfor %}",
    "values as a text": "{{ dict.fromkeys(range(99999), 'x' * 7999999).values() }}",
    "a namespace as a text": "{% set ns = namespace(x=['x' * 7999999] * 999) %}{{ ns ~ '' }}",
    "a namespace in a list": "{% set ns = namespace(x=['x' * 7999999] * 999) %}{{ [ns]|string }}",
    "parts of a text": "{% set a = 'x' * 7999999 %}" + "".join(f"{{% set a{n} = a[{n}:] %}}" for n in range(999)),
    "wide characters": "".join(f"{{% set a{n} = '😀' * 7999999 %}}" for n in range(99)),
    "a test that nothing passes": "{{ range(99999)|select('in', range(99999)|map('string')|list)|list }}",
    "a sum of lists": "{{ ([[1, 2, 3]] * 49999)|sum(start=[])|length }}",
    "sorted by an attribute": "{% set ns = namespace(x='X' * 7999999) %}{{ ([ns] * 9999)|sort(attribute='x')|length }}",
    "escapes in JSON": "{{ ('é' * 7999999)|tojson(ensure_ascii=true) }}",
    "JSON, indented deeply": "{% set ns = namespace(x=range(99999)|list) %}{% for i in range(200) %}"
    + "{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x|tojson(indent=16) }}",
    "a layout of time": "{{ strftime_now('%c' * 3999999) }}",
    "a pattern of time": "{{ strftime_now('%9999999999d') }}",
}


@pytest.mark.sampled
@pytest.mark.parametrize("case", BOMBS)
def test_a_bomb_ends_by_a_limit(case: str):
    """Render in the program itself, as if the first rendering had been harmless."""
    start, before = time.process_time(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    try:
        text = render_template(compile_template(BOMBS[case]), {"messages": [USER]})
    except LimitError:
        text = ""
    except Exception as error:
        assert not isinstance(error, MemoryError)
        text = ""
    assert len(text) < 100_000
    assert time.process_time() - start < 4
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 700_000  # KB


@pytest.mark.slow
@pytest.mark.parametrize(("source", "reason"), [
    ("{{ lipsum(16000000) }}", None),
    ("{{ 'x' * 99999999 }}", "a value exceeds"),
    ("{{a}}" * 200_000, "1000000 characters, but the limit is"),
    ("{{a}}" * 99_000, "more than"),  # 2 seconds, or 256 MB
    ("{% if a %}" + "{% elif a %}" * 9000 + "{% endif %}", "an `if` has more than 1000 branches"),
    ("{% if a %}" + "{% elif a %}" * 999 + "{% endif %}", None),
    ("{% for %}", None),
])  # fmt: skip
def test_probing_refuses_a_template_that_exceeds_the_limits(source: str, reason: str | None):
    problem = trial.probe_template(source)
    assert problem is None if reason is None else reason in str(problem)


@pytest.mark.slow
def test_the_systems_limits_end_a_probe(monkeypatch):
    monkeypatch.setattr(trial, "compile_template", lambda source: bytearray(1 << 30))
    assert "more than 256 MB" in trial.probe_template("x")
    monkeypatch.setattr(trial, "compile_template", lambda source: [None for _ in iter(int, 1)])
    assert trial.probe_template("x") is not None
    monkeypatch.setattr(trial, "compile_template", lambda source: trial.os.kill(trial.os.getpid(), 11))
    assert "crashes the process" in trial.probe_template("x")


def test_want_of_memory_is_not_the_templates_fault(tmp_path, monkeypatch):
    """Compile or render without memory, or probe where `ulimit -v` leaves less than a template may take."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with monkeypatch.context() as patch:
        patch.setattr(trial, "compile_template", greedy)
        assert "more than 256 MB" in trial.probe_template("x")
        resource.setrlimit(resource.RLIMIT_AS, (trial.BYTES, hard))
        try:
            with pytest.raises(MemoryError):
                trial.probe_template("x")
        finally:
            resource.setrlimit(resource.RLIMIT_AS, (soft, hard))
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    template = ChatTemplate("{{ messages[0].content }}")
    monkeypatch.setattr(templates, "render_template", greedy)
    with pytest.raises(MemoryError):
        template.render([USER])
    monkeypatch.setattr(templates, "compile_template", greedy)
    with pytest.raises(MemoryError):
        ChatTemplate("{{ messages[0].content }}")


def test_a_good_template_is_probed_once(tmp_path, monkeypatch):
    monkeypatch.setenv("LOCALLLM_CACHE", str(tmp_path))
    ChatTemplate("{{ messages[0].content }}")
    monkeypatch.setattr(trial, "probe_template", lambda source: "twice")
    assert ChatTemplate("{{ messages[0].content }}").render([USER]) == "Hi"
    with pytest.raises(ModelError, match="the chat template was stopped: twice"):
        ChatTemplate("{{ messages[0].role }}")
    (tmp_path / "known").chmod(0o777)
    with pytest.raises(ModelError, match="twice"):
        ChatTemplate("{{ messages[0].content }}")


def greedy(*_: object) -> NoReturn:
    raise MemoryError


X = "{{ 'x' * 99999999 }}"


@pytest.mark.parametrize(("source", "outcome"), [
    ("{{ messages[0].content }}", "ok"), ("{% for %}", "ok"), ("{{ raise_exception('no') }}", "ok"), (X, "over"),
    ("{% if messages|length == 13 %}" + X + "{% endif %}", "over"), ("{{ raise_exception('no') }}" + X, "ok"),
    ("{% if messages[0].role == 'system' %}" + X + "{% endif %}", "over"), ("{{ a.b.c }}" + X, "ok"),
    ("{% if messages|length == 3 and tools is none and documents is none %}" + X + "{% endif %}", "over"),
])  # fmt: skip
def test_a_probe_reports_too_much_but_not_failures(source: str, outcome: str, monkeypatch):
    """Report what takes too much in any of its conversations; a template that only fails is reported later."""
    assert trial._render_probe(source, lambda: "too much") == (
        "a value exceeds 8000000 characters" if outcome == "over" else outcome
    )
    with monkeypatch.context() as patch:
        patch.setattr(trial, "render_template", greedy)
        assert trial._render_probe("x", lambda: "too much") == "too much"
        assert trial._render_probe("x", greedy) == "no memory"


@pytest.mark.parametrize(("output", "was_ended", "problem"), [
    (b"ok", True, None), (b"oh, \xff", False, "oh, \ufffd"), (b"", True, "it ran for more than 2 seconds"),
    (b"", False, "it crashes the process that renders it"),
])  # fmt: skip
def test_the_outcome_of_a_probe_is_explained(output: bytes, was_ended: bool, problem: str | None, monkeypatch):
    """Explain its output and its end; probe in a program of its own where processes cannot be forked."""
    asked: list[Any] = []
    assert trial._explain_outcome(output, was_ended) == problem
    with pytest.raises(MemoryError):
        trial._explain_outcome(b"no memory", was_ended)
    monkeypatch.setattr(trial, "can_fork", lambda: False)
    monkeypatch.setattr(trial, "run_limited", lambda *limits: asked.append(limits) or (output, was_ended))
    assert trial.probe_template("a\udc80é") == problem
    assert asked == [([sys.executable, "-P", "-m", "localllm.text.template_probe"], "a?é".encode(), 3, 384 << 20, 20.0)]


def test_a_probe_runs_in_a_program_of_its_own(monkeypatch, capfdbinary):
    for source, output in ((b"\xff{{ messages[0].role }}", b"ok"), (X.encode(), b"a value exceeds 8000000 characters")):
        monkeypatch.setattr(sys, "stdin", SimpleNamespace(buffer=BytesIO(source)))
        runpy.run_path(trial.__file__, run_name="__main__")
        assert capfdbinary.readouterr() == (output, b"")


def test_a_probing_child_reports_and_ends_in_any_case(monkeypatch):
    """Report in 400 bytes."""
    events: list[Any] = []

    def end(code: int) -> NoReturn:
        events.append(code)
        raise SystemExit

    monkeypatch.setattr(trial, "os", SimpleNamespace(_exit=end, write=lambda *what: events.append(what)))
    monkeypatch.setattr(trial, "_render_probe", lambda source, limit: source * 300)
    with pytest.raises(SystemExit):
        trial._run_probe("é", 7)
    assert events == [(7, ("é" * 200).encode()), 0]
    monkeypatch.setattr(trial, "_render_probe", greedy)
    with pytest.raises(SystemExit):
        trial._run_probe("é", 7)
    assert events[2:] == [1]


def test_a_probe_leaves_no_pipe_open(monkeypatch):
    ends, pipe = list[tuple[int, int]](), os.pipe
    monkeypatch.setattr(trial.os, "pipe", lambda: ends.append(pipe()) or ends[-1])
    monkeypatch.setattr(trial, "fork", lambda: 7)
    monkeypatch.setattr(trial, "_read_outcome", lambda reader, child: (reader, child))
    assert trial.probe_template("x") == (ends[0][0], 7)
    for end in ends[0]:
        with pytest.raises(OSError):
            os.fstat(end)


@pytest.mark.parametrize(("pieces", "waited", "problem"), [
    ([b"o", b"k", b""], [20, 5, 0], None), ([b"oh", b""], [20, 5], "oh"), ([b"oh"], [20, 5], "oh"),
    ([], [20], "it ran for more than 2 seconds"),
])  # fmt: skip
def test_a_probe_ends_after_20_seconds(pieces: list[bytes], waited: list[float], problem: str | None, monkeypatch):
    """End it whatever it has written."""
    clock, timeouts, ended, reads = [100.0], list[float](), list[Any](), iter(pieces)

    def select(readers: list, writers: list, others: list, timeout: float) -> tuple[list, list, list]:
        timeouts.append(timeout)
        clock[0] += 15
        return readers if len(timeouts) <= len(pieces) else [], [], []

    monkeypatch.setattr(trial, "select", SimpleNamespace(select=select))
    monkeypatch.setattr(trial, "time", SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(trial, "was_stopped", lambda status: status == 9)
    child = {"kill": lambda *what: ended.append(what), "waitpid": lambda *what: ended.append(what) or (7, 9)}
    monkeypatch.setattr(trial, "os", SimpleNamespace(read=lambda reader, size: next(reads), **child))
    assert trial._read_outcome(5, 7) == problem
    assert (timeouts, ended) == (waited, [(7, signal.SIGKILL), (7, 0)])


@pytest.mark.parametrize(("may", "output"), [(True, "it takes more than 256 MB"), (False, "no memory")])
def test_a_probe_has_limits_and_ignores_ctrl_c(may: bool, output: str, monkeypatch):
    asked: list[Any] = []
    monkeypatch.setattr(trial, "limit_process", lambda *limits: asked.append(limits) or may)
    assert trial._set_limits() == output
    assert (asked, signal.getsignal(signal.SIGINT)) == ([(2, 256 << 20)], signal.SIG_IGN)


def test_long_sources_and_many_branches_are_refused(monkeypatch):
    monkeypatch.setattr(sandbox, "MAX_SOURCE", 48)
    monkeypatch.setattr(sandbox, "MAX_BRANCHES", 2)
    sandbox.compile_template("{% if a %}{% elif b %}1{% else %}{% endif %}".ljust(48))
    for source, problem in (
        ("x" * 49, "it has 49 characters, but the limit is 48"),
        ("{%if a%}{%elif b%}{%elif c%}{%endif%}", "an `if` has more than 2 branches"),
    ):
        with pytest.raises(LimitError, match=f"^{problem}$"):
            sandbox.compile_template(source)


@pytest.mark.usefixtures("small")
def test_items_and_parts_are_counted_up_to_the_limits():
    sandbox.reset_limits()
    assert [*limits.count_items(iter(range(7)))] == [*range(7)]
    with pytest.raises(LimitError, match=f"^{MANY}$"):
        [*limits.count_items(iter(range(8)))]
    limits.check_values((65535, -65535, "x" * 99, [1] * 6, ("y" * 40,)))
    for wrong, problem in ((65536, LARGE), (-65536, LARGE), ([1] * 7, MANY), ({1: "y" * 41}, LONG)):
        with pytest.raises(LimitError, match=f"^{problem}$"):
            limits.check_values((1, wrong))


@pytest.mark.parametrize("condition", ["add_generation_prompt", "bos_token and eos_token", "messages|length == 1"])
def test_a_probe_renders_with_the_later_variables(condition: str):
    assert "exceeds" in (trial.probe_template(f"{{% if {condition} %}}{{{{ 'x' * 99999999 }}}}{{% endif %}}") or "")


@pytest.mark.parametrize("around", [
    "{% if X %}{% endif %}", "{% if 1 %}{{ X }}{% elif X %}{{ X }}{% else %}{{ X }}{% endif %}",
    "{% for i in X %}{{ X }}{% else %}{{ X }}{% endfor %}", "{% for i in y if X %}{% endfor %}",
    "{% macro f(a=X) %}{{ X }}{% endmacro %}", "{% call f(X) %}{{ X }}{% endcall %}",
    "{% set a = X %}{% set b %}{{ X }}{% endset %}", "{% with a = X %}{{ X }}{% endwith %}",
    "{% filter upper %}{{ X }}{% endfilter %}", "{% generation %}{{ X }}{% endgeneration %}",
    "{{ [X] }}", "{{ (X, 1) }}", "{{ {'a': X} }}", "{{ {X: 1} }}", "{{ X[1:] }}", "{{ y[X:] }}", "{{ f(X, a=X) }}",
    "{{ y | join(X) }}", "{{ X if X else X }}", "{{ X is defined and not X }}", "{{ y.f(X) }}", "{{ X + 1 }}",
    "{{ (X ~ 'a') ~ (X ~ 'b') }}",
])  # fmt: skip
def test_concatenations_are_limited_within_every_construct(around: str):
    """Replace a chain by a call that limits it."""
    tree = sandbox._GuardInserter().visit(sandbox._LimitedEnvironment().parse(around.replace("X", "(p ~ q)")))
    calls = [node.name for node in tree.find_all(nodes.ExtensionAttribute)]
    assert calls.count("concat") == around.count("X") + 3 * ("~" in around)
    assert not [*tree.find_all(nodes.Concat)]


def test_the_output_has_a_limit_even_without_loops(monkeypatch):
    template = compile_template("abc{{ messages|length }}" * 30)
    assert len(render_template(template, {"messages": [USER]})) == 120
    monkeypatch.setattr(sandbox, "MAX_LENGTH", 119)
    with pytest.raises(LimitError, match="the output exceeds 119 characters"):
        render_template(template, {"messages": [USER]})
    monkeypatch.setattr(sandbox, "MAX_LENGTH", 120)
    assert len(render_template(template, {"messages": [USER]})) == 120


@pytest.mark.parametrize(
    ("separator", "items", "length"),
    [
        ("-" * 9, ["a" * 5] * 4, 4 * 5 + 9 * 4 + 4),
        ("", ["ab", 7, None], 2 + 1 + 1 + 3),
        ("xy", {"key": "value", "other": 1}, 5 + 1 + 2 * 2 + 2),
        ("---", "abcd", 1 + 3 * 4 + 4),
    ],
)
def test_joined_texts_are_measured_before_they_are_made(monkeypatch, separator, items, length):
    """Add up texts and separators, whichever of the two is long; in a filter as in a method."""
    for limit, fits in ((length, True), (length - 1, False)):
        monkeypatch.setattr(limits, "MAX_LENGTH", limit)
        with nullcontext() if fits else pytest.raises(LimitError, match="a value exceeds"):
            limits.check_join(separator, items)
        with nullcontext() if fits else pytest.raises(LimitError, match="a value exceeds"):
            limits.check_method(separator, "join", (items,), {})


SMALL = {"MAX_LENGTH": 40, "MAX_ITEMS": 6, "MAX_BITS": 16, "MAX_WIDTH": 9}


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Set limits that a test can reach."""
    for name, value in SMALL.items():
        monkeypatch.setattr(limits, name, value)


LONG, MANY, LARGE = "a value exceeds 40 characters", "a value has more than 6 items", "a number exceeds 16 bits"


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize(("source", "fits", "not_so", "problem"), [
    ("{{ 'x' * N }}", 40, 41, LONG), ("{{ N * 'x' }}", 40, 41, LONG), ("{{ ('x' * (N - 1)) ~ 'y' }}", 40, 41, LONG),
    ("{{ ('x' * (N - 1)) + 'y' }}", 40, 41, LONG), ("{{ ['x'] * N }}", 6, 7, MANY), ("{{ ['x'] * N }}", 6, 41, LONG),
    ("{{ 2 ** N }}", 8, 9, LARGE), ("{{ (-2) ** N }}", 8, 9, LARGE), ("{{ 255 * N }}", 255, 256, LARGE),
    ("{{ 1 + N }}", 65534, 65535, LARGE), ("{{ [-N] | join }}", 65535, 65536, None), ("{{ N + 1 }}", 9, 99999, LARGE),
    ("{{ 'x' | indent(N) }}", 9, 10, "an argument of the filter indent exceeds 9"),
    ("{{ 'x' | indent(-N) }}", 9, 10, "an argument of the filter indent exceeds 9"),
    ("{{ 'x' | indent(width=N) }}", 9, 10, "an argument of the filter indent exceeds 9"),
    ("{{ ('\n' * (N - 1)) | indent }}", 10, 11, LONG), ("{{ ('\n' * (N - 1)) | indent('12345') }}", 8, 9, LONG),
    ("{{ [[1] * (N - 1), 2] }}", 5, 6, MANY), ("{{ dict.fromkeys(range(N)) | length }}", 6, 7, MANY),
    ("{{ dict.fromkeys(range(N)).values() }}", 6, 7, MANY), ("{{ ('x',) * N }}", 6, 7, MANY),
    ("{% set a = [[1] * N, 2] %}", 4, 5, MANY), ("{% set a = ([1] * N, 2) %}", 4, 5, MANY),
    ("{% set a = {1: [1] * N, 2: 3} %}", 4, 5, MANY),
    ("{{ [[], 'y' * N] | string | length }}", 32, 33, LONG), ("{{ [[], 'y' * N] | length }}", 40, 41, LONG),
    ("{{ {'y' * N: 1} | length }}", 40, 41, LONG), ("{{ {1: 'y' * N} | length }}", 40, 41, LONG),
    ("{{ range(N) | list }}", 6, 7, MANY), ("{{ range(N) | sum }}", 6, 7, MANY), ("{{ ('x' * N) | list }}", 6, 7, MANY),
    ("{{ ('x' * N) | title }}", 6, 7, MANY), ("{{ ('x' * N) | sort }}", 6, 7, MANY),
    ("{{ 'x'.ljust(N) }}", 9, 10, "a width exceeds 9"), ("{{ 'x'.rjust(N) }}", 9, 10, "a width exceeds 9"),
    ("{{ 'x'.zfill(N) }}", 9, 10, "a width exceeds 9"),
    ("{{ ('a' * 10).replace('a', 'b' * N) }}", 4, 5, LONG), ("{{ ('a' * 10) | replace('a', 'b' * N) }}", 4, 5, LONG),
    ("{{ ('a' * 39 ~ 'b').replace('b', 'c' * N) }}", 1, 2, LONG),
    ("{{ '%s|%s' % ('x' * N, 1) }}", 17, 18, LONG), ("{{ '%s|%s' | format('x' * N, 1) }}", 17, 18, LONG),
    ("{{ '{}|{}'.format('x' * N, 1) }}", 17, 18, LONG), ("{{ '{a}|{a}'.format(a='x' * N) }}", 16, 17, LONG),
    ("{{ '%(a)s' % {'a': 'x' * N} }}", 35, 36, LONG), ("{{ '%s' % ('x' * N) }}", 38, 39, LONG),
    ("{{ strftime_now('x' * N) | length }}", 9, 10, "the format of strftime_now exceeds 9 characters"),
    ("{{ [1] | tojson(separators=(':' * 8, ',' * N)) }}", 8, 9, "the separators of tojson exceed 16 characters"),
    ("{{ ('é' * N) | tojson(ensure_ascii=true) }}", 4, 5, "the text of tojson with ensure_ascii exceeds 6 characters"),
])  # fmt: skip
def test_the_largest_value_renders_and_the_next_is_refused(source: str, fits: int, not_so: int, problem: str | None):
    render_template(compile_template(source.replace("N", str(fits))), {})
    with nullcontext() if problem is None else pytest.raises(LimitError, match=f"^{problem}$"):
        render_template(compile_template(source.replace("N", str(not_so))), {})


@pytest.mark.parametrize(("source", "problem"), [
    ("{{ 'x' | center(3) }}", "the filter center is not supported in templates"),
    ("{{ 'x'.encode() }}", "str.encode is not supported in templates"),
    ("{{ (1.5).is_integer() }}", "float.is_integer is not supported in templates"),
    ("{{ (5).bit_length() }}", "int.bit_length is not supported in templates"),
    ("{{ [[1]] | sum(start=[]) }}", "sums of lists are not supported in templates"),
    ("{{ '{0.x}'.format(1) }}", "attributes and items in format fields are not supported in templates"),
    ("{{ '{0[0]}' | format(1) }}", "attributes and items in format fields are not supported in templates"),
    ("{{ '%1000d' % 1 }}", "a width exceeds 999"), ("{{ '%-*d' % (3, 1) }}", "a width exceeds 999"),
    ("{{ strftime_now('%1000d') }}", "a width exceeds 999"), ("{{ '%1000d' | format(1) }}", "a width exceeds 999"),
    ("{{ '{:1000}'.format(1) }}", "a width exceeds 999"), ("{{ '{:{}}'.format(1, 2) }}", "a width exceeds 999"),
    ("{% for x in [1] %}{{ [loop] }}{% endfor %}", "the variable `loop` cannot be stored in a list"),
    ("{{ [1] | tojson(indent=17) }}", "the indentation of tojson must be at most 16 characters"),
    ("{{ [1] | tojson(indent=' ' * 17) }}", "the indentation of tojson must be at most 16 characters"),
    ("{{ strftime_now('%H') }}{{ '%999d' | format(1) }}", None),
    ("{{ '%999d%%' % 1 }}{{ '{:.1f}{:999}'.format(1, 2) }}{{ [1] | tojson(indent=16) }}{{ [[1], [2]] | map('sum') }}",
     None),
])  # fmt: skip
def test_unsupported_parts_of_templates_are_refused(source: str, problem: str | None):
    with nullcontext() if problem is None else pytest.raises(LimitError, match=f"^{problem}$"):
        render_template(compile_template(source), {})


@pytest.mark.parametrize(("text", "name", "arguments", "fits"), [
    ("a a a a a a a", "split", (" ",), True), ("a a a a a a a a", "split", (" ",), False),
    ("x" * 13, "split", (), True), ("x" * 14, "split", (), False), ("x" * 14, "rsplit", ("y",), True),
    ("x" * 14, "splitlines", (), False), ("x" * 14, "split", (None, 1), False), ("x" * 14, "split", ("",), False),
    ("x" * 14, "strip", (), True),
])  # fmt: skip
@pytest.mark.usefixtures("small")
def test_parts_of_a_text_are_counted_before_they_are_made(text: str, name: str, arguments: Any, fits: bool):
    with nullcontext() if fits else pytest.raises(LimitError, match=MANY):
        limits.check_method(text, name, arguments, {})


@pytest.mark.parametrize(("value", "indent", "length"), [
    ([], 3, 3), ([1, 2], 2, 6), ([[1, 2], 3], 2, 6 + 2 * 2 * 3), ({"a": [1], "b": (2,)}, 1, 3 + 2 * (2 + 2)),
    ([[[]]], 1, 2 + 4 + 3),
])  # fmt: skip
def test_indented_parts_are_measured_before_they_are_written(monkeypatch, value, indent: int, length: int):
    for limit, fits in ((length, True), (length - 1, False)):
        monkeypatch.setattr(limits, "MAX_LENGTH", limit)
        with nullcontext() if fits else pytest.raises(LimitError, match="a value exceeds"):
            limits.check_indented_json(value, indent)


def test_a_rendering_ends_by_the_clock_or_by_bytes_made(monkeypatch: pytest.MonkeyPatch):
    now = [5.0]
    monkeypatch.setattr(limits, "time", SimpleNamespace(thread_time=lambda: now[0]))
    limits.reset_limits()
    now[0] = 7.0
    limits.count_step(200_000_000)
    limits.count_step(56_000_000)
    with pytest.raises(LimitError, match=r"^it created more than 256000000 bytes of text$"):
        limits.count_step(1)
    limits.reset_limits()
    now[0] = 9.01
    with pytest.raises(LimitError, match=r"^it ran for more than 2 seconds$"):
        limits.count_step()
    limits.reset_limits()
    for value, size in ((["x"] * 7, 56), ("x" * 100, limits.sys.getsizeof("x" * 100)), (iter([1, 2]), 16)):
        before = limits._rendering.made
        kept: Any = limits.require_small(value)
        assert [*kept] and limits._rendering.made - before == size


@pytest.mark.parametrize(("source", "ticks"), [
    ("{% for i in range(5) if i < 0 %}{% endfor %}", [0] * 5),
    ("{% for i in range(2) %}ab{{ 'c' }}{% endfor %}", [3, 0, 3, 0]),
    ("{% macro f() %}abc{{ 'de' }}{% endmacro %}{{ f() }}{{ f() }}", [5, 0, 5] * 2),
    ("{{ x | select('odd') | list }}", [0, 0, 0, 0, 3]), ("{{ x | upper }}", [0, 6]), ("{{ x }}", [6]),
])  # fmt: skip
def test_every_turn_and_every_written_text_counts(monkeypatch: pytest.MonkeyPatch, source: str, ticks: list[int]):
    """Count items that are looked at and left out, too; and the length of written texts."""
    template, counted = compile_template(source), []
    monkeypatch.setattr(sandbox, "count_step", lambda made=0: counted.append(made))
    for name in ("require_small", "count_items"):  # which count the sizes of values besides
        monkeypatch.setattr(sandbox, name, lambda value: value)
    render_template(template, {"x": [1, 2]})
    assert counted == ticks


def test_the_limits_are_far_from_what_released_templates_take():
    assert (limits.SECONDS, limits.MAX_LENGTH, limits.MAX_CREATED) == (2, 8_000_000, 256_000_000)
    assert (limits.MAX_ITEMS, limits.MAX_BITS, limits.MAX_WIDTH) == (200_000, 10_000, 1000)
    assert (sandbox.MAX_SOURCE, sandbox.MAX_BRANCHES, trial.SECONDS, trial.BYTES) == (500_000, 1000, 2, 256 << 20)


@pytest.mark.parametrize(("value", "length"), [
    ("abc", 3), (1.5, 20), (None, 20), (7, 3333), (["ab", 1.5], 4 + 2 + 4 + 20), ({"k": "vv"}, 4 + 1 + 4 + 2), ((), 0),
])  # fmt: skip
def test_the_length_of_values_as_texts_is_estimated(value: object, length: int):
    assert limits.estimate_length(value) == length


@pytest.mark.parametrize("value", [
    ["x" * 10], [["x" * 4], "y" * 6], {"a": "x" * 9}, {"a" * 10: 1}, [{"a": "b" * 3}, "c" * 6], ("x" * 5, ("y" * 5, 7)),
])  # fmt: skip
def test_texts_in_lists_are_measured_together(monkeypatch: pytest.MonkeyPatch, value: Any):
    """Measure texts that are going to be one, however deep they lie, and as keys, too."""
    for length, fits in ((10, True), (9, False)):
        monkeypatch.setattr(limits, "MAX_LENGTH", length)
        assert limits.require_few_items(value) is value
        with nullcontext() if fits else pytest.raises(LimitError, match="a value exceeds 9 characters"):
            limits.require_few_items(value, written=True)


def test_parts_of_texts_and_lists_count_as_made(monkeypatch: pytest.MonkeyPatch):
    """Count them though nothing of them is written."""
    template = compile_template("{% for i in range(9) %}{% set a = x[1:] %}{% endfor %}")
    for value in ("y" * 300, [1] * 40):
        monkeypatch.setattr(limits, "MAX_CREATED", 9 * 8000)
        render_template(template, {"x": value})
        monkeypatch.setattr(limits, "MAX_CREATED", 1000)
        with pytest.raises(LimitError, match="it created more than 1000 bytes"):
            render_template(template, {"x": value})
