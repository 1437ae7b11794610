"""Metadata of other values than those of golden models and checkpoints, as families read them, value by value.

readings.json and config_readings.json have them. Nobody else says what is right there: a person has looked at it.
What changes, and for whom, shows. scripts/record/record_metadata_variants.py makes them.
"""

import json

import config_readings
import pytest
from config_readings import facts_of, read_all
from readings import KINDS, SEEING, changed, metadata_of, read, recorded, unlike

READINGS, OF_CONFIGS = recorded(), config_readings.recorded()


def test_every_model_has_been_read():
    assert [*READINGS] == [*KINDS]


@pytest.mark.parametrize("name", READINGS)
def test_metadata_are_read_as_recorded(name: str):
    metadata = metadata_of(name)
    usual = read(name, metadata)
    assert isinstance(usual, dict), usual
    readings = {
        key: {value: unlike(read(name, changed(metadata, key, json.loads(value))), usual) for value in values}
        for key, values in READINGS[name].items()
    }
    assert readings == READINGS[name]


@pytest.mark.parametrize("variant", [name for name in OF_CONFIGS if not name.startswith(SEEING)])
def test_configs_are_read_as_recorded(variant: str):
    config = facts_of(variant)["config"]
    usual = read_all(variant, config)
    assert isinstance(usual, dict), usual
    readings = {
        place: {
            value: config_readings.unlike(
                read_all(variant, config_readings.changed(config, place, json.loads(value))), usual
            )
            for value in values
        }
        for place, values in OF_CONFIGS[variant].items()
    }
    assert readings == OF_CONFIGS[variant]
