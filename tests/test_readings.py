"""What families read of other values than those of golden models: readings.json has it, value by value.

Nobody else says what is right there: a person has looked at it. What changes, and for whom, shows.
scripts/record_readings.py makes it.
"""

import json

import pytest
from readings import MODELS, changed, metadata_of, read, recorded, unlike

READINGS = recorded()


def test_every_model_has_been_read():
    assert [*READINGS] == [*MODELS]


@pytest.mark.parametrize("name", READINGS)
def test_what_is_read(name: str):
    metadata = metadata_of(name)
    usual = read(name, metadata)
    assert isinstance(usual, dict), usual
    found = {
        key: {value: unlike(read(name, changed(metadata, key, json.loads(value))), usual) for value in values}
        for key, values in READINGS[name].items()
    }
    assert found == READINGS[name]
