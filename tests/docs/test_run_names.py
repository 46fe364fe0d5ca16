"""The names of measured runs in the tables and charts of the performance page."""

import dataclasses

import pytest

from diffusers_h3.planning.measured import measurements


SETTINGS = {
    "model": ("dense", "dense H3, fp8"),
    "precision": ("bf16", "VDN-H3, bf16"),
    "attention_precision": ("fp8", "VDN-H3, fp8, fp8 attention"),
    "compiled": (False, "VDN-H3, fp8, eager"),
    "compiled_parts": ("layers", "VDN-H3, fp8, linear layers compiled"),
    "offload": ("leaf", "VDN-H3, fp8, offload by leaf"),
    "memory_cap_gb": (24.0, "VDN-H3, fp8, cap 24 GB"),
}


@pytest.fixture
def run_name(load_script):
    """A function naming a run like the first one of the table but for the settings it is given."""
    plain = {"model": "hybrid", "precision": "fp8", "attention_precision": "bf16", "offload": "none"}
    plain |= {"compiled": True, "memory_cap_gb": None, "use_stream": False, "compiled_parts": None}
    name = load_script("performance")._run_name
    return lambda **settings: name(dataclasses.replace(measurements()[0], **plain | settings))


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting_that_was_changed_is_named(setting, run_name):
    value, expected = SETTINGS[setting]
    assert run_name() == "VDN-H3, fp8"
    assert run_name(**{setting: value}) == expected


def test_streams_are_named_with_their_offload(run_name):
    capped = {"offload": "block", "memory_cap_gb": 24.0}
    assert run_name(**capped) == "VDN-H3, fp8, offload by block, cap 24 GB"
    assert run_name(**capped, use_stream=True) == "VDN-H3, fp8, offload by block with streams, cap 24 GB"
