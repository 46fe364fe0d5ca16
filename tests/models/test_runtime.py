"""What Diffusers does to a model at run time: offload, checkpointing, compilation, context parallelism."""

import warnings

import pytest
import torch
from diffusers import ContextParallelConfig, MiniMaxH3Transformer3DModel
from diffusers.hooks import apply_group_offloading
from diffusers.models.transformers.transformer_minimax_h3 import MiniMaxH3AttnProcessor
from torch.testing._internal.distributed.fake_pg import FakeStore

from diffusers_h3 import HybridAttentionConfig, HybridAttnProcessor, apply_hybrid_attention


@pytest.mark.parametrize(
    "arguments", [{"offload_type": "leaf_level"}, {"offload_type": "block_level", "num_blocks_per_group": 2}]
)
def test_group_offload_equals_no_offload(arguments, make_model, make_request, predict):
    requests = [make_request(), make_request(text=5, num_frames=12, keyframes=("first",))]
    expected = [predict(make_model(), request) for request in requests]
    model = make_model()
    apply_group_offloading(model, onload_device=torch.device("cpu"), offload_device=torch.device("cpu"), **arguments)
    for request, output in zip(requests, expected, strict=True):
        assert torch.equal(predict(model, request), output)


def _poison_outside_forward(model):
    """Make every module's own parameters NaN but while its own `forward` runs."""

    def poison(module, own):
        for name, parameter in own.items():
            module._parameters[name] = torch.nn.Parameter(torch.full_like(parameter, torch.nan))

    for module in model.modules():
        own = {name: parameter for name, parameter in module._parameters.items() if parameter is not None}
        if own:
            module.register_forward_pre_hook(lambda module, _, own=own: module._parameters.update(own))
            module.register_forward_hook(lambda module, *_, own=own: poison(module, own), always_call=True)
            poison(module, own)


def test_weights_are_read_inside_their_owners_forward_only(make_model, make_request, predict):
    """What leaf-level offload needs: a weight read by attribute elsewhere would be on another device there."""
    requests = [make_request(), make_request(text=5, num_frames=12, keyframes=("first",))]
    expected = [predict(make_model(short_conv_targets=("q", "k", "v")), request) for request in requests]
    model = make_model(short_conv_targets=("q", "k", "v"))
    _poison_outside_forward(model)
    for request, output in zip(requests, expected, strict=True):
        assert all(parameter.isnan().all() for parameter in model.parameters())
        assert torch.equal(predict(model, request), output)


def _gradients(model, *requests):
    model.zero_grad()
    sum(model(**request).sample.square().mean() for request in requests).backward()
    return {name: parameter.grad.clone() for name, parameter in model.named_parameters() if parameter.grad is not None}


def test_gradient_checkpointing_gives_the_same_gradients(make_model, make_request):
    model, request = make_model().train(), make_request(num_frames=12)
    expected = _gradients(model, request)
    for name in ("linear_attention.alpha.A_log", "softmax_gate.up.weight", "to_out_linear.weight"):
        assert expected[f"transformer_blocks.0.attn.{name}"].abs().sum() > 0
    model.enable_gradient_checkpointing()
    calls = []
    model.transformer_blocks[1].attn.register_forward_pre_hook(lambda *_: calls.append(1))
    actual = _gradients(model, request)
    assert len(calls) == 2  # once forwards, once again for the backward pass
    assert actual.keys() == expected.keys()
    for name, gradient in actual.items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-7)


def test_gradient_checkpointing_over_two_requests(make_model, make_request):
    """Two forward passes before one backward pass, which runs the blocks again, each with its own layout."""
    first, other = make_request(num_frames=12), make_request(num_frames=9)
    model = make_model().train()
    expected = _gradients(model, first, other)
    model.enable_gradient_checkpointing()
    for name, gradient in _gradients(model, first, other).items():
        torch.testing.assert_close(gradient, expected[name], rtol=1e-5, atol=1e-6)


class GraphCounter:
    """A `torch.compile` backend that runs graphs as they are and counts them."""

    def __init__(self):
        self.graphs = 0

    def __call__(self, graph, _):
        self.graphs += 1
        return graph.forward


@pytest.fixture
def compiled(make_model):
    """A model with compiled blocks and the counter of its graphs."""
    torch._dynamo.reset()
    counter = GraphCounter()
    model = make_model()
    model.compile_repeated_blocks(fullgraph=True, backend=counter)
    yield model, counter
    torch._dynamo.reset()


@pytest.mark.slow
def test_compiled_blocks(compiled, make_model, make_request, predict):
    """One graph for all transformer blocks and one for the refiner's; of any other prompt lengths one more each."""
    model, counter = compiled
    counts = []
    with warnings.catch_warnings(record=True) as warned:
        for text in (4, 4, 7, 11, 13, 15, 4):
            request = make_request(text=text, num_frames=9)
            torch.testing.assert_close(predict(model, request), predict(make_model(), request), rtol=1e-5, atol=1e-5)
            counts.append(counter.graphs)
    assert counts == [2, 2, 4, 4, 4, 4, 4]
    # Dynamo warns of every cache it looks through.
    assert [str(warning.message) for warning in warned if "lru_cache" in str(warning.message)] == []


@pytest.mark.slow
def test_compiled_blocks_of_other_clips(compiled, make_model, make_request, predict):
    """Numbers of frames are graphs of their own, one each once the lengths are variables; then there are no more."""
    model, counter = compiled
    counts = []
    clips = [{"num_frames": 9}, {"num_frames": 14, "keyframes": ("first",)}, {}]
    for texts in ((4, 5, 6), (8, 7, 3), (9, 11, 12)):
        for text, clip in zip(texts, clips, strict=True):
            request = make_request(text, **clip)
            torch.testing.assert_close(predict(model, request), predict(make_model(), request), rtol=1e-5, atol=1e-5)
        counts.append(counter.graphs)
    # The refiner's two; of the blocks one of fixed length, and one for each number of frames.
    assert counts == [5, 6, 6]


@pytest.fixture
def two_ranks(monkeypatch):
    """A process group in which this process is rank 0 of 2 and no other exists: enough to shard, not to attend."""
    monkeypatch.setattr(torch.accelerator, "device_count", lambda: 2)
    torch.distributed.init_process_group("fake", rank=0, world_size=2, store=FakeStore())
    yield ContextParallelConfig(ulysses_degree=2)
    torch.distributed.destroy_process_group()


def test_ring_attention_is_refused_on_a_hybrid_model(two_ranks, make_model):
    two_ranks.ring_degree, two_ranks.ulysses_degree = 2, 1
    with pytest.raises(ValueError, match=r"does not run as a ring .*linear branch"):
        make_model().enable_parallelism(config=two_ranks)


@pytest.mark.parametrize("hybrid", [True, False])
def test_a_ring_is_refused_when_the_processor_is_set_after_it(hybrid, two_ranks, make_model, tiny_arguments):
    """Also on a stock model, whose layers would run dense on their shard: the refusal comes when it is set."""
    two_ranks.ring_degree, two_ranks.ulysses_degree = 2, 1
    model = make_model() if hybrid else MiniMaxH3Transformer3DModel(**tiny_arguments).eval()
    model.set_attn_processor(MiniMaxH3AttnProcessor())
    model.enable_parallelism(config=two_ranks)
    with pytest.raises(ValueError, match="does not run as a ring"):
        model.set_attn_processor(HybridAttnProcessor())


def test_the_processor_takes_the_configuration_in_either_order(two_ranks, make_model):
    model = make_model()
    model.set_attn_processor(MiniMaxH3AttnProcessor())
    model.enable_parallelism(config=two_ranks)
    model.set_attn_processor(HybridAttnProcessor())
    processors = set(model.attn_processors.values())
    assert [processor._parallel_config.context_parallel_config for processor in processors] == [two_ranks]


def test_hybrid_attention_after_parallelism_is_refused(two_ranks, tiny_arguments):
    model = MiniMaxH3Transformer3DModel(**tiny_arguments).eval()
    model.enable_parallelism(config=two_ranks)
    before = set(model.state_dict())
    with pytest.raises(ValueError, match="call `apply_hybrid_attention` first and `enable_parallelism` after it"):
        apply_hybrid_attention(model, HybridAttentionConfig(linear_head_dim=16))
    assert set(model.state_dict()) == before


def test_what_the_ranks_cannot_share_is_refused_before_the_first_layer(two_ranks, make_model, make_request):
    model = make_model()
    model.enable_parallelism(config=two_ranks)
    model.token_refiner.register_forward_pre_hook(lambda *_: pytest.fail("a layer ran"))
    with torch.no_grad(), pytest.raises(ValueError, match="49 rows of the packed sequence cannot be shared equally"):
        model(**make_request(text=3))


def test_a_sharded_sequence_without_a_configuration_is_refused(two_ranks, make_model, make_request):
    """What a processor would see that nobody told: half the rows."""
    model = make_model()
    model.enable_parallelism(config=two_ranks)
    model.set_attn_processor(HybridAttnProcessor())
    for processor in model.attn_processors.values():
        processor._parallel_config = None
    with torch.no_grad(), pytest.raises(ValueError, match=r"describes \d+ rows but the layer got \d+ with"):
        model(**make_request(text=4))


def test_the_stock_processor_never_runs_a_hybrid_model_dense(make_model, make_request):
    model = make_model()
    model.set_attn_processor(MiniMaxH3AttnProcessor())
    with torch.no_grad(), pytest.raises(TypeError, match="positional arguments"):
        model(**make_request())


def test_a_stock_model_is_never_dense_by_accident(tiny_arguments, make_request):
    model = MiniMaxH3Transformer3DModel(**tiny_arguments).eval()
    model.set_attn_processor(HybridAttnProcessor())
    with torch.no_grad(), pytest.raises(ValueError, match="no linear branch, and only the token refiner runs dense"):
        model(**make_request(text=6))


def test_fp8_attention_is_never_dropped_for_another_backend(make_model, make_request):
    """`set_attention_backend` selects `"sdpa"`, which has no fp8."""
    model = make_model()
    model.set_attn_processor(HybridAttnProcessor(fp8=True))
    model.set_attention_backend("native")
    with (
        torch.no_grad(),
        pytest.raises(ValueError, match="fp8 attention runs on the 'flashinfer' window backend only"),
    ):
        model(**make_request(text=6))
