from datetime import datetime
from pathlib import Path
from typing import Any

import pytest

from server.template import ChatTemplate, TemplateRefused


def render(source: str, **variables: Any) -> str:
    return ChatTemplate(source).render(variables)


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% set ns = namespace(n=1) %}{% set ns.n = ns.n + 1 %}{{ ns.n }}", "2"),
        ("{% for x in [1, 2] %}{% if loop.first %}first{% endif %}{{ x }}{% endfor %}", "first12"),
        ("{% for x in range(9) %}{% if x == 2 %}{% break %}{% endif %}{{ x }}{% endfor %}", "01"),
        ("{% for x in [1, 2] %}{% if x == 1 %}{% continue %}{% endif %}{{ x }}{% endfor %}", "2"),
        ("{{ {'a': '<é>'} | tojson }}", '{"a": "<é>"}'),
        ("{{ {'b': 1} | tojson(indent=1) }}", '{\n "b": 1\n}'),
        ("{{ 'a' ~ 1 ~ none }}", "a1None"),
        ("{{ ['a', 'b'] | join('-') }}{{ 'aa' | replace('a', 'b') }}", "a-bbb"),
        ("{{ '%s=%d' % ('a', 1) }}{{ '{}'.format(2) }}{{ '%s' | format(3) }}", "a=123"),
        ("  {% if true %}\nx\n  {% endif %}\n", "x\n"),
        ("{% generation %}answer{% endgeneration %}", "answer"),
        ("{% for k, v in {'city': 'Oslo'} | items %}{{ k }}:{{ v }}{% endfor %}", "city:Oslo"),
        ("{{ [1, 2, 3][::-1] }}{{ 7 % 4 }}{{ 2 ** 3 }}", "[3, 2, 1]38"),
    ],
)
def test_what_real_templates_use_works(source: str, text: str) -> None:
    assert render(source) == text


def test_strftime_now_is_the_date() -> None:
    assert render("{{ strftime_now('%Y') }}") == str(datetime.now().year)


def test_raise_exception_reaches_the_client() -> None:
    with pytest.raises(TemplateRefused, match="^Roles must alternate$"):
        render("{{ raise_exception('Roles must alternate') }}")


@pytest.mark.parametrize(
    "source",
    [
        "{% for i in range(10**9) %}x{% endfor %}",
        "{{ 'x' * 10**9 }}",
        "{{ [0] * 10**9 }}",
        "{% set ns = namespace(s='xx') %}{% for i in range(99) %}"
        "{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        "{{ 'x' | center(10**9) }}",
        "{{ 'x'.ljust(10**9) }}",
        "{{ '%1000000000d' % 3 }}",
        "{{ '%*d' % (10**9, 3) }}",
        "{{ '{:>1000000000}'.format('x') }}",
        "{{ ('a' * 10**6).replace('a', 'b' * 10**6) }}",
        "{{ (['a' * 10**6] * 10**5) | join }}",
        "{{ 10 ** 1000 }}",
        "{{ lipsum(10**6) }}",
        "{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}",
        "{% include 'x' %}",
        "{% import '/etc/passwd' as x %}",
        "{{ messages.append(1) }}",
        "{{ missing.attribute }}",
    ],
)
def test_a_hostile_template_is_refused(source: str) -> None:
    with pytest.raises(TemplateRefused):
        render(source, messages=[])


def test_a_loop_that_prints_nothing_is_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.template.MAX_LINES", 10_000)
    loop = "{% for i in range(9999) %}{% for j in range(9999) %}{% endfor %}{% endfor %}"
    with pytest.raises(TemplateRefused, match="more than 10000 lines"):
        render(loop)


def test_the_output_is_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("server.template.MAX_OUTPUT_CHARS", 100)
    with pytest.raises(TemplateRefused, match="output is over 100"):
        render("{% for i in range(999) %}{{ 'xxxxx' }}{% endfor %}")


def test_attributes_lead_nowhere(tmp_path: Path) -> None:
    marker = tmp_path / "marker"
    call = f".__init__.__globals__['os'].system('touch {marker}')"
    for start in ("cycler", "namespace", "raise_exception", "messages"):
        with pytest.raises(TemplateRefused):
            render(f"{{{{ {start}{call} }}}}", messages=[])
    assert not marker.exists()


def test_broken_syntax_is_refused_when_the_model_is_loaded() -> None:
    with pytest.raises(TemplateRefused, match="not valid"):
        ChatTemplate("{% if %}")
