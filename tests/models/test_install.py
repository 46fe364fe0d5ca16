"""`apply_hybrid_attention` on a stock transformer: equal to the class, and nothing changes where it refuses."""

import copy

import pytest
import torch
from diffusers import MiniMaxH3Transformer3DModel
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor

from diffusers_h3 import HybridAttentionConfig, HybridAttnProcessor, apply_hybrid_attention


BRANCH_MODULES = ("linear_attention", "softmax_gate", "to_out_linear")


@pytest.fixture
def stock(tiny_arguments, randomize):
    return randomize(MiniMaxH3Transformer3DModel(**tiny_arguments), seed=0).eval()


@pytest.fixture
def hybrid(make_model, stock):
    """The class with the weights of `stock`, and its branch's weights by name."""
    model = make_model(seed=1)
    model.load_state_dict(stock.state_dict(), strict=False)
    branch = {
        name: tensor.clone()
        for name, tensor in model.state_dict().items()
        if any(f".{part}." in name for part in BRANCH_MODULES)
    }
    return model, branch


def _config(**fields):
    return HybridAttentionConfig(linear_head_dim=16, **{"chunk": 2, **fields})


def _assert_untouched(transformer, before):
    assert transformer.state_dict().keys() == before.keys()
    assert all(torch.equal(tensor, before[name]) for name, tensor in transformer.state_dict().items())
    assert {type(processor) for processor in transformer.attn_processors.values()} == {MiniMaxH3AttnProcessor}
    assert not transformer._forward_pre_hooks
    assert transformer._keep_in_fp32_modules == MiniMaxH3Transformer3DModel._keep_in_fp32_modules


@pytest.mark.parametrize("as_dict", [False, True])
def test_equals_the_class(as_dict, stock, hybrid, make_request, predict):
    model, branch = hybrid
    config = _config()
    result = apply_hybrid_attention(stock, config.to_dict() if as_dict else config, branch)
    assert result is stock
    assert result.state_dict().keys() == model.state_dict().keys()
    assert result._keep_in_fp32_modules == model._keep_in_fp32_modules
    assert MiniMaxH3Transformer3DModel._keep_in_fp32_modules == [
        "proj_in",
        "audio_proj_in",
        "time_embedder",
        "proj_out",
        "audio_proj_out",
        "rope",
    ]
    (processor,) = {id(processor): processor for processor in result.attn_processors.values()}.values()
    assert isinstance(processor, HybridAttnProcessor)
    for request in (make_request(), make_request(text=5, num_frames=12, keyframes=("first",))):
        assert torch.equal(predict(result, request), predict(model, request))


def test_without_weights_it_is_the_gated_window(stock, make_request, predict):
    """Zero output projections: whatever else the branch holds, the prediction is that of the window."""
    apply_hybrid_attention(stock, _config())
    request = make_request(num_frames=12)
    expected = predict(stock, request)
    assert expected.isfinite().all()
    for block in stock.transformer_blocks:
        assert block.attn.to_out_linear.weight.abs().sum() == 0
        # The convolutions start at the identity.
        for conv in block.attn.linear_attention.short_conv.children():
            taps = conv.weight.flatten(1)
            assert torch.equal(taps.sum(1), torch.ones(32))
            assert torch.equal(taps[:, taps.shape[1] // 2], torch.ones(32))
        torch.nn.init.normal_(block.attn.linear_attention.beta_proj.weight)
    assert torch.equal(predict(stock, request), expected)


def test_new_modules_follow_the_transformer_but_for_the_decay(stock):
    apply_hybrid_attention(stock.to(torch.bfloat16), _config())
    for name, parameter in stock.named_parameters():
        float32 = name.endswith(("A_log", "dt_bias"))
        assert parameter.dtype == (torch.float32 if float32 else torch.bfloat16)


def test_on_the_meta_device(tiny_arguments):
    with torch.device("meta"):
        transformer = MiniMaxH3Transformer3DModel(**tiny_arguments)
    apply_hybrid_attention(transformer, _config())
    assert {parameter.device.type for parameter in transformer.parameters()} == {"meta"}


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda weights: weights.pop("transformer_blocks.1.attn.to_out_linear.weight"),
            r"missing .*1\.attn\.to_out_l",
        ),
        (
            lambda weights: weights.update({"transformer_blocks.9.attn.extra": torch.zeros(1)}),
            "unexpected .*9.attn.extra",
        ),
        (
            lambda weights: weights.update(
                {"transformer_blocks.2.attn.linear_attention.norm.weight": torch.zeros(15)}
            ),
            r"norm\.weight of shape \(15,\) instead of \(16,\)",
        ),
        (lambda weights: weights.clear(), r"48 differences in all"),
    ],
    ids=["missing", "unexpected", "shape", "empty"],
)
def test_weights_that_do_not_fit_change_nothing(change, message, stock, hybrid):
    _, branch = hybrid
    before = copy.deepcopy(stock.state_dict())
    change(branch)
    with pytest.raises(ValueError, match=message):
        apply_hybrid_attention(stock, _config(), branch)
    _assert_untouched(stock, before)


def test_another_head_dimension_changes_nothing(stock):
    before = copy.deepcopy(stock.state_dict())
    with pytest.raises(ValueError, match="`linear_head_dim` must equal the transformer's head dimension 16, got 128"):
        apply_hybrid_attention(stock, HybridAttentionConfig())
    _assert_untouched(stock, before)


def test_an_illegal_transform_changes_nothing(stock):
    before = copy.deepcopy(stock.state_dict())
    transform = _config().to_dict()
    transform["config"]["linear_attention"]["bridge"] = "beta"
    with pytest.raises(ValueError, match="`bridge`"):
        apply_hybrid_attention(stock, transform)
    _assert_untouched(stock, before)


def test_a_second_time_is_refused(stock, hybrid):
    model, branch = hybrid
    apply_hybrid_attention(stock, _config(), branch)
    before = copy.deepcopy(stock.state_dict())
    for transformer in (stock, model):
        with pytest.raises(ValueError, match="already has hybrid attention"):
            apply_hybrid_attention(transformer, _config(chunk=5))
    assert len(stock._forward_pre_hooks) == 1
    assert all(torch.equal(tensor, before[name]) for name, tensor in stock.state_dict().items())
    assert stock.transformer_blocks[0].attn.linear_attention.config.chunk == 2
