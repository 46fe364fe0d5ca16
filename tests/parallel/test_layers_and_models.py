"""Ulysses on two and four CPU processes: what one process computes, or a refusal that names the way out."""

import json

import pytest
import torch

from diffusers_h3 import SequenceLayout


pytestmark = pytest.mark.slow

TOLERANCE = 2e-5
EVEN, ODD = {}, {"anything": True}

# Of the model: heads, configuration, request, switches, options of the parallel configuration. The sequence is 46 rows
# and the text, and 6 a keyframe.
BOTH_ORDERS = (("parallel",), ("parallel", "hybrid"), ("stock", "parallel", "hybrid"), ("native", "parallel"))
MODELS = {
    **{f"even-{'+'.join(switches)}": (4, {}, {"text": 2}, switches, EVEN) for switches in BOTH_ORDERS},
    "offload-first": (4, {}, {"text": 3}, ("offload", "parallel"), ODD),
    "offload-later": (4, {}, {"text": 3}, ("parallel", "offload"), ODD),
    "compiled": (4, {}, {"text": 3}, ("parallel", "compile"), ODD),
    "odd-length": (4, {}, {"text": 5}, ("parallel",), ODD),
    "odd-length-other-order": (4, {}, {"text": 5}, ("stock", "parallel", "hybrid"), ODD),
    "more-text-than-a-rank-has-rows": (4, {}, {"text": 61}, ("parallel",), ODD),
    "odd-heads": (5, {}, {"text": 2}, ("parallel",), ODD),
    "odd-heads-and-length": (7, {}, {"text": 3}, ("parallel",), ODD),
    "first-and-last-keyframe": (4, {}, {"text": 2, "keyframes": ("first", "last")}, ("parallel",), EVEN),
    "last-keyframe-odd": (4, {}, {"text": 3, "keyframes": ("last",)}, ("parallel",), ODD),
    "full-cover": (4, {"chunk": 4}, {"text": 2}, ("parallel",), EVEN),
    "no-anchors-no-gate": (
        4,
        {"anchor_frames": "none", "enable_softmax_gate": False, "chunk": 0, "short_conv_targets": ("q", "k", "v")},
        {"text": 3},
        ("parallel",),
        ODD,
    ),
    "no-text-state-scaled": (4, {"enable_text_state": False, "delta_rule": "vdn_scaled"}, {}, ("parallel",), ODD),
}
# These fit two ranks and not four.
MODELS_OF_TWO = {"three-heads-of-two-ranks": (3, {}, {"text": 3}, ("parallel",), ODD)}
REFUSED = {
    "ring": (4, {}, {"text": 2}, ("parallel",), {"ring": True}),
    "ring-other-order": (4, {}, {"text": 2}, ("stock", "parallel", "hybrid"), {"ring": True}),
    "length": (4, {}, {"text": 3}, ("parallel",), EVEN),
    "heads": (5, {}, {"text": 2}, ("parallel",), EVEN),
    "too-few-heads": (1, {}, {"text": 3}, ("parallel",), ODD),
    "gradients": (4, {}, {"text": 2}, ("parallel", "gradients"), EVEN),
}


def _reasons(ranks):
    anything = f"ContextParallelConfig(ulysses_degree={ranks}, ulysses_anything=True)"
    return {
        "ring": f"Use `ContextParallelConfig(ulysses_degree={ranks})`",
        "ring-other-order": f"Use `ContextParallelConfig(ulysses_degree={ranks})`",
        "length": f"49 rows of the packed sequence cannot be shared equally by {ranks} ranks: use `{anything}`",
        "heads": f"5 attention heads cannot be shared equally by {ranks} ranks: use `{anything}`",
        "too-few-heads": f"1 attention heads cannot be shared by {ranks} ranks",
        "gradients": "inference only",
    }


# Rows of the packed sequence of a layer: text, audio and video of 6 rows a frame.
LAYERS = {"even": (2, EVEN), "odd": (5, ODD), "batch": (5, ODD)}


@pytest.fixture(scope="module")
def make_cases(make_model, make_request):
    """A function returning the cases for a number of ranks, with what one process computes."""

    def make(ranks):
        cases = {}
        models = {**MODELS, **(MODELS_OF_TWO if ranks == 2 else {}), **REFUSED}
        for name, (heads, config, request, switches, options) in models.items():
            model, request = make_model(heads, **config), make_request(**request)
            with torch.no_grad():
                cases[name] = "model", model, request, switches, options, model(**request, return_dict=False)
        for name, (text, options) in LAYERS.items():
            model, request = make_model(), make_request(text=text)
            layout = SequenceLayout.from_indices(
                *(request[key] for key in ("position_ids", "video_indices", "text_indices"))
            )
            generator = torch.Generator().manual_seed(2)
            inputs = torch.randn(3 if name == "batch" else 1, layout.seq_len, 24, generator=generator)
            layer = model.transformer_blocks[0].attn
            # Without the hook that attaches the layout of a call.
            rotary_emb = (*type(model.rope).forward(model.rope, request["position_ids"]), layout)
            with torch.no_grad():
                cases[f"layer-{name}"] = "layer", layer, inputs, rotary_emb, options, layer(inputs, rotary_emb)
        return cases

    return make


@pytest.fixture(scope="module", params=[2, 4])
def results(request, make_cases, torchrun, tmp_path_factory):
    """The number of ranks and the results of every rank; starting the processes costs more than all cases."""
    ranks, folder = request.param, tmp_path_factory.mktemp("ranks")
    torch.save(make_cases(ranks), folder / "cases.pt")
    finished = torchrun(ranks, "layers_and_models.py", folder / "cases.pt", folder / "results")
    assert finished.returncode == 0, finished.stderr
    return ranks, [json.loads((folder / f"results.{rank}").read_text()) for rank in range(ranks)]


def test_models_equal_one_process(results):
    ranks, outcomes = results
    names = [*MODELS, *(MODELS_OF_TWO if ranks == 2 else {})]
    for outcome in outcomes:
        assert {name: outcome[name] for name in names if not outcome[name].get("error", 1.0) <= TOLERANCE} == {}


def test_no_exchange_is_left_open(results):
    """Also on ranks that have no rows of what is exchanged, such as the first one of a long prompt."""
    _, outcomes = results
    for outcome in outcomes:
        left = {name: case["open"] for name, case in outcome.items() if case.get("open")}
        assert left == {}


def test_layers_equal_one_process(results):
    _, outcomes = results
    for outcome in outcomes:
        errors = {name: outcome[f"layer-{name}"].get("error", 1.0) for name in LAYERS}
        assert max(errors.values()) <= TOLERANCE, errors


def test_what_cannot_work_is_refused_on_every_rank(results):
    ranks, outcomes = results
    for name, reason in _reasons(ranks).items():
        for outcome in outcomes:
            assert reason in outcome[name].get("refusal", "nothing was refused"), name


def test_a_layer_exchanges_heads_and_gathers_only_the_small_gate(results):
    """Of 48 rows, 24 channels, 4 heads of 16, and 5 frames of the branch with 6 rows each."""
    ranks, outcomes = results
    rows, heads = 48 // ranks, 4 // ranks
    total = {}
    for outcome in outcomes:
        per_layer = len(outcome["even-parallel"]["sent"]) // 2
        for name, count in outcome["even-parallel"]["sent"][:per_layer]:
            total.setdefault(name, []).append(count)
    projections, scalars, window, readout = rows * 64, rows * 4, 48 * heads * 16, 30 * heads * 16
    assert sorted(total["all_to_all_single"]) == sorted(
        ranks * [projections, projections, projections, scalars, scalars, window, readout]
    )
    assert total["all_gather_tensor"] == ranks * [rows * 16]
    assert total["all_reduce"] == ranks * [5 * 24]
