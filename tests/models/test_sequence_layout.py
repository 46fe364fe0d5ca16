"""How the row layout reaches the layers: derived once per request, never stale, never missing, never a shard's."""

import copy

import pytest
import torch

from diffusers_h3 import HybridAttnProcessor, SequenceLayout


REQUESTS = [
    {},
    {"text": 9, "num_frames": 12, "grid": (3, 2)},
    {"text": 1, "num_frames": 2, "audio": 0, "keyframes": ("first", "last")},
    {"text": 4, "num_frames": 17, "keyframes": ("last",)},
    {},
]


@pytest.fixture
def derivations(monkeypatch):
    """The layouts derived so far."""
    derived = []
    from_indices = SequenceLayout.from_indices.__func__

    def record(cls, *tensors):
        derived.append(from_indices(cls, *tensors))
        return derived[-1]

    monkeypatch.setattr(SequenceLayout, "from_indices", classmethod(record))
    return derived


def test_calls_in_a_row_equal_calls_of_fresh_models(make_model, make_request, predict):
    model = make_model()
    for arguments in REQUESTS:
        request = make_request(**arguments)
        assert torch.equal(predict(model, request), predict(make_model(), request))


def test_the_layout_is_derived_once_per_request(make_model, make_request, predict, derivations):
    model, request = make_model(), make_request()
    for step in range(4):
        request["hidden_states"] = request["hidden_states"] + step
        request["timestep"] = request["timestep"] * 0.9
        predict(model, request)
    assert derivations == [SequenceLayout(49, 3, 7, 7, (2, 3))]
    predict(model, make_request(num_frames=5))
    predict(model, request)
    assert derivations[1:] == [SequenceLayout(37, 3, 7, 5, (2, 3)), derivations[0]]


def test_equal_tensors_of_another_request_are_not_confused(make_model, make_request, predict, derivations):
    """A tensor that dies may be followed by another at its address; identity is checked on living ones."""
    model = make_model()
    for frames in (7, 9, 7, 9):
        predict(model, make_request(num_frames=frames))
    assert [layout.num_frames for layout in derivations] == [7, 9, 7, 9]


@pytest.mark.parametrize("inference_mode", [False, True])
def test_a_change_in_place_is_noticed(inference_mode, make_model, make_request, derivations):
    """Two requests of one length in the same buffers: 12 frames of 2×3, then 6 of 4×3."""
    model = make_model()
    with torch.inference_mode(inference_mode), torch.no_grad():
        request = {name: tensor.clone() for name, tensor in make_request(num_frames=12).items()}
        other = make_request(num_frames=6, grid=(4, 3))
        first = model(**request).sample
        for name, tensor in other.items():
            request[name].copy_(tensor)
        second = model(**request).sample
        assert torch.equal(second, make_model()(**other).sample)
        assert not torch.equal(first, second)
    assert [layout.grid for layout in derivations[:2]] == [(2, 3), (4, 3)]


def test_positional_arguments(make_model, make_request, predict):
    model, request = make_model(), make_request()
    with torch.no_grad():
        video, audio = model(*request.values(), return_dict=False)
    assert torch.equal(torch.cat([video.flatten(), audio.flatten()]), predict(model, request))


def test_a_missing_argument_is_named_by_forward(make_model, make_request):
    request = make_request()
    del request["position_ids"]
    with pytest.raises(TypeError, match="position_ids"):
        make_model()(**request)


def test_two_models_sharing_a_processor(make_model, make_request, predict):
    processor = HybridAttnProcessor()
    models = [make_model(seed=1), make_model(seed=2, chunk=3, anchor_frames="none")]
    requests = [make_request(num_frames=9), make_request(text=6, num_frames=14, keyframes=("first",))]
    alone = [[predict(model, request) for request in requests] for model in models]
    for model in models:
        model.set_attn_processor(processor)
    for number, request in ((0, 0), (1, 1), (0, 1), (1, 0), (0, 0)):
        assert torch.equal(predict(models[number], requests[request]), alone[number][request])
    assert {id(entry) for model in models for entry in model.attn_processors.values()} == {id(processor)}


def test_a_copy_is_independent(make_model, make_request, predict):
    model, request = make_model(), make_request()
    expected = predict(model, request)
    duplicate = copy.deepcopy(model)
    longer = make_request(num_frames=13)
    assert torch.equal(predict(duplicate, longer), predict(make_model(), longer))
    assert torch.equal(predict(model, request), expected)
    assert torch.equal(predict(duplicate, request), expected)
    torch.nn.init.ones_(duplicate.transformer_blocks[0].attn.to_out_linear.weight)
    assert torch.equal(predict(model, request), expected)
    assert not torch.equal(predict(duplicate, request), expected)


def _block_inputs(seq_len, *layout):
    hidden_states = torch.randn(1, seq_len, 32)
    rotary = torch.ones(seq_len, 12), torch.zeros(seq_len, 12), *layout
    return hidden_states, torch.randn(3, 12), torch.zeros(seq_len, dtype=torch.long), rotary


def test_a_block_without_a_layout_is_refused(make_model):
    model = make_model()
    with pytest.raises(ValueError, match="No sequence layout came"):
        model.transformer_blocks[0](*_block_inputs(49))


@pytest.mark.parametrize("rows", [48, 50, 24, 98])
def test_a_block_with_the_layout_of_another_sequence_is_refused(rows, make_model):
    model = make_model()
    with pytest.raises(ValueError, match=f"describes 49 rows but the layer got {rows}.*context parallelism"):
        model.transformer_blocks[0](*_block_inputs(rows, SequenceLayout(49, 3, 7, 7, (2, 3))))


def test_a_mask_is_refused(make_model):
    model = make_model()
    mask = torch.ones(1, 49, dtype=torch.bool)
    with pytest.raises(ValueError, match="takes no `attention_mask`"):
        model.transformer_blocks[0](*_block_inputs(49, SequenceLayout(49, 3, 7, 7, (2, 3))), attention_mask=mask)


def test_the_refiner_stays_dense(make_model, make_request):
    """Its attention has no branch and no layout; it sees the text alone, whatever the window is."""
    model = make_model()
    attn = model.token_refiner.refiner_blocks[0].attn
    assert not hasattr(attn, "linear_attention")
    text = torch.randn(2, 11, 32)
    with torch.no_grad():
        output = attn(text)
        query, key, value = (linear(text).unflatten(-1, (2, 16)) for linear in (attn.to_q, attn.to_k, attn.to_v))
        weights = torch.einsum("bthd,bshd->bhts", attn.norm_q(query), attn.norm_k(key)) / 4.0
        expected = attn.to_out[0](torch.einsum("bhts,bshd->bthd", weights.softmax(-1), value).flatten(2))
    torch.testing.assert_close(output, expected, rtol=1e-5, atol=1e-6)
