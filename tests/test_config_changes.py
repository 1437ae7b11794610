"""What else a config.json may say, value by value: it becomes what llama.cpp's converter makes of it, or is refused."""

import json

import pytest
from config_changes import PATH, read, unlike, with_value
from test_convert_families import facts

CHANGES = json.loads(PATH.read_text(encoding="utf-8"))


@pytest.mark.parametrize("variant", CHANGES)
def test_what_a_value_changes(variant: str):
    config = facts(variant)["config"]
    usual = read(config)
    assert isinstance(usual, dict), usual
    for place, cases in CHANGES[variant].items():
        for value, expected in cases:
            found = read(with_value(config, place, value))
            if isinstance(expected, str) or isinstance(found, str):
                assert found == expected, f"{place} = {value}"
            else:
                assert not unlike(found, {**usual, **expected}), f"{place} = {value}"
