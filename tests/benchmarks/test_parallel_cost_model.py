"""The model's arithmetic, against numbers worked out by hand."""

import importlib.util
import pathlib
import sys

import pytest


@pytest.fixture(scope="module")
def model():
    path = pathlib.Path(__file__).parents[2] / "benchmarks" / "parallel_cost_model.py"
    specification = importlib.util.spec_from_file_location("parallel_cost_model", path)
    module = importlib.util.module_from_spec(specification)
    sys.modules[specification.name] = module
    specification.loader.exec_module(module)
    return module


def test_one_gpu_is_the_measured_call(model):
    prediction = model.predict(1, model.Machine())
    assert prediction.total == pytest.approx(9.82, abs=0.02)
    assert (prediction.copies, prediction.waiting, prediction.sent) == (0, 0, 0)
    assert model.predict_dense(1, model.Machine()) == pytest.approx(33.3)


def test_what_two_ranks_exchange(model):
    sent = model.sent_per_layer(2)
    assert sent["query"] == sent["key"] == sent["value"] == sent["window"] == 104_166 * 7168  # half the rows, 2 bytes
    assert sent["gate"] == sent["beta"] == 104_166 * 56
    assert sent["readout"] == 100 * 1008 * 7168
    assert sent["output gate"] == 104_166 * 128 * 2
    assert sent["frame means"] == 2 * 100 * 5376 * 4


def test_the_rank_with_most_heads_sets_the_pace(model):
    assert [model.head_share(ranks) * 56 for ranks in (1, 3, 8, 16, 56)] == pytest.approx([56, 19, 7, 4, 1])
    fast = model.Machine(inside=1e18, between=1e18, latency=0.0, memory=1e18)
    assert model.predict(16, fast).compute - model.predict(14, fast).compute == pytest.approx(
        3.673 * (1 / 16 - 1 / 14)
    )


@pytest.mark.parametrize(
    ("ranks", "seconds"),
    [
        (1, 0.0),
        (8, 1e-5 + 8e9 * 7 / 8 / 100e9),  # all through NVLink
        (16, 2e-5 + 8e9 * 8 / 16 / 10e9),  # half of it to the other node, which takes longer than the rest inside
    ],
)
def test_an_exchange_takes_as_long_as_its_slower_way(ranks, seconds, model):
    machine = model.Machine(inside=100e9, between=10e9, latency=1e-5)
    assert machine.exchange(8e9, ranks) == pytest.approx(seconds)


def test_a_transfer_beneath_work_costs_nothing_until_it_is_longer(model):
    slow, slower = (model.Machine(latency=0.0, memory=1e18, inside=speed) for speed in (100e9, 50e9))
    sent, share = model.sent_per_layer(8), model.head_share(8)
    for machine in (slow, slower):
        seconds = {name: size * 7 / 8 / machine.inside for name, size in sent.items()}
        expected = sum(seconds.values()) - min(seconds["readout"], 4.892 * share / 50)
        expected -= 2 * min(seconds["query"], 0.0167 / 3 / 8)
        assert model.predict(8, machine).waiting == pytest.approx(50 * expected)


def test_more_gpus_than_heads_are_refused(model):
    with pytest.raises(ValueError, match="56 heads are for 1 to 56 ranks, got 64"):
        model.predict(64, model.Machine())
    assert [model.predict_dense(ranks, model.Machine()) is None for ranks in (3, 14, 16, 28, 32, 56)] == [
        False, False, True, False, True, False,
    ]  # fmt: skip
    assert "| 64 | – | | | | | not possible: 56 heads | | |" in model.report(model.Machine())


def test_the_report_that_is_kept_is_the_models(model):
    assert model.REPORT.read_text(encoding="utf-8") == model.report(model.Machine())
