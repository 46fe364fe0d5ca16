"""The hybrid layer on a real card: every kernel, every window backend that runs there, and a compiled model."""

import math

import pytest
import torch
from diffusers.modular_pipelines.minimax_h3.before_denoise import MiniMaxH3PrepareLayoutStep

from diffusers_h3 import HybridAttentionConfig, HybridAttnProcessor, SequenceLayout, VDNH3Transformer3DModel
from diffusers_h3.hybrid.layout import plan_window
from diffusers_h3.models.quantization import fp8_quantization_config
from diffusers_h3.ops import delta_rule, frame_statistics, linear_state, short_conv
from diffusers_h3.ops.window_attention import window_attention
from diffusers_h3.ops.window_attention.kernels import KERNELS, kernel_refusal
from diffusers_h3.ops.window_attention.merge import merge_gated


pytestmark = [pytest.mark.gpu, pytest.mark.timeout(900)]

# B, F, S, H, D: lengths that no tile divides, head dimensions at and between powers of two.
SIZES = [(1, 1, 1, 1, 16), (2, 3, 63, 3, 48), (1, 51, 7, 2, 64), (1, 5, 100, 3, 128)]
FLOAT32_LIMIT = 1e-5
EAGER_FACTOR = 1.5


@pytest.fixture(autouse=True)
def device():
    """The card; allocations on it are NaN until a kernel writes them."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    torch.use_deterministic_algorithms(True, warn_only=True)
    with torch.no_grad():
        yield torch.device("cuda")
    torch.use_deterministic_algorithms(False)


@pytest.fixture
def draw(device):
    generator = torch.Generator().manual_seed(0)

    def make(*shape):
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(device)

    return make


@pytest.fixture(params=[torch.bfloat16, torch.float16, torch.float32], ids=lambda dtype: str(dtype)[6:])
def dtype(request):
    return request.param


@pytest.fixture(params=SIZES, ids=str)
def size(request):
    return request.param


def _error(actual, exact):
    return ((actual.double() - exact).norm() / exact.norm()).item()


def _check(operator, arguments, eager=None):
    """Compare with float64, where the operator runs its reference, and with the eager path's own error."""
    results = [operator(*arguments)]
    results.append(operator(*(rows.double() if isinstance(rows, torch.Tensor) else rows for rows in arguments)))
    results.append(eager(*arguments) if eager else [None] * 2)
    results = [result if isinstance(result, (tuple, list)) else [result] for result in results]
    for actual, exact, rounded in zip(*results, strict=eager is not None):
        limit = FLOAT32_LIMIT if actual.dtype == torch.float32 else 0.0
        if rounded is not None:
            limit = max(limit, EAGER_FACTOR * _error(rounded, exact))
        assert _error(actual, exact) <= limit  # a NaN fails too


@pytest.mark.parametrize("normalize", [True, False])
def test_features(size, dtype, normalize, draw):
    batch, frames, rows, heads, dim = size
    packed = draw(batch, frames, rows, 3 * heads * dim).to(dtype)
    features = packed[..., heads * dim : 2 * heads * dim]
    taps = draw(heads * dim, 1, 5, 5).to(dtype), draw(heads * dim, 1, 5).to(dtype)
    columns = next(count for count in (9, 7, 5, 4, 3, 2, 1) if rows % count == 0)
    arguments = (features, *taps, (rows // columns, columns), heads, normalize)
    _check(short_conv.convolved_features, arguments, short_conv.reference.convolved_features)
    _check(short_conv.pointwise_features, (features, heads, normalize), short_conv.reference.pointwise_features)


@pytest.mark.parametrize("gram_fp32", [True, False])
def test_frame_statistics(size, dtype, gram_fp32, draw):
    key, value = draw(*size), draw(*size[:-1], 2 * size[-1])[..., : size[-1]]
    key = key / key.norm(dim=-1, keepdim=True)
    arguments = (key.to(dtype), value.to(dtype), torch.sigmoid(draw(*size[:-1])).to(dtype), gram_fp32)
    _check(frame_statistics.frame_statistics, arguments, frame_statistics.reference.frame_statistics)


def test_delta_rule_and_states(size, draw):
    batch, frames, rows, heads, dim = size
    key = draw(batch, frames, heads, rows, dim)
    key = key / key.norm(dim=-1, keepdim=True)
    gram, cross = (key.mT @ key).float(), (draw(batch, frames, heads, rows, dim).mT @ key).float()
    log_alpha = -draw(batch, frames, heads, dim).abs().float()
    _check(delta_rule.delta_factors, (gram, cross, log_alpha.exp(), "vdn_solve", rows))
    transition, update = delta_rule.delta_factors(gram, cross, log_alpha.exp(), "vdn_solve", rows)
    initial = draw(batch, heads, dim, dim).float()
    prefix, suffix = [frame - 2 for frame in range(frames)], [frame + 2 for frame in range(frames)]
    _check(linear_state.linear_states, (transition, update, initial, log_alpha, prefix, suffix, "alpha", False))


def test_readout(size, dtype, draw):
    batch, frames, rows, heads, dim = size
    states, query = draw(batch, frames, heads, dim, dim).float(), draw(*size).to(dtype)
    gate, weight = draw(batch, frames, rows, heads * dim).to(dtype), draw(dim).to(dtype)
    _check(linear_state.readout, (states, query, gate, weight, 1e-6), linear_state.reference.readout)


@pytest.mark.parametrize("gated", [True, False])
def test_merge(dtype, gated, draw):
    parts = [(draw(101, 3, 128).to(dtype), 3 * draw(3, 101).float().T) for _ in range(2)]
    gate = draw(101, 3).to(dtype) if gated else None
    output = torch.empty_like(parts[0][0])
    merge_gated(parts, gate, output)
    share = torch.sigmoid(parts[0][1] - parts[1][1]).double().unsqueeze(-1)
    exact = share * parts[0][0].double() + (1 - share) * parts[1][0].double()
    if gated:
        exact = exact * torch.sigmoid(gate.double()).unsqueeze(-1)
    assert _error(output, exact) <= max(EAGER_FACTOR * _error(exact.to(dtype), exact), 1e-6)


def _attention(query, key, value):
    query, key, value = (rows.transpose(1, 2) for rows in (query, key, value))
    return torch.nn.functional.scaled_dot_product_attention(query, key, value).transpose(1, 2)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype)[6:], indirect=True)
@pytest.mark.parametrize("backend", KERNELS)
def test_window_backends(backend, dtype, draw):
    """Against float64, gated, in a batch of two, with odd lengths; no worse than 1.5 times gathered attention."""
    layout = SequenceLayout(26 + 23 * 15, 17, 26, 23, (5, 3))
    groups = plan_window(HybridAttentionConfig(), layout.num_frames)
    query, key, value = (draw(2, layout.seq_len, 3, 128).to(dtype) for _ in range(3))
    gate = draw(2, layout.seq_len, 3).to(dtype)
    refusal = kernel_refusal(backend, query)
    if refusal is not None:
        pytest.skip(refusal)
    doubles = (rows.double() for rows in (query, key, value))
    exact = window_attention(*doubles, groups, _attention, gate.double(), "sdpa", rows=layout.rows)
    gathered = window_attention(query, key, value, groups, _attention, gate, "sdpa", rows=layout.rows)
    output = window_attention(query, key, value, groups, _attention, gate, backend, rows=layout.rows)
    assert _error(output, exact) <= EAGER_FACTOR * _error(gathered, exact)


@pytest.fixture
def model(device):
    """A small model in bfloat16 with random weights, wide enough for every kernel; heads × channels ≠ hidden size."""
    config = HybridAttentionConfig(linear_head_dim=64, chunk=2)
    model = VDNH3Transformer3DModel(
        num_attention_heads=3,
        attention_head_dim=64,
        hidden_size=128,
        num_layers=3,
        num_refiner_layers=1,
        ffn_dim=256,
        in_channels=4,
        audio_in_channels=6,
        text_dim=32,
        freq_dim=32,
        time_embed_dim=32,
        time_embed_hidden_dim=64,
        rope_freq_dim=8,
        hybrid_attention=config.to_dict(),
    )
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        scale = 1.0 / math.sqrt(parameter[0].numel()) if parameter.ndim > 1 else 0.3
        offset = 1.0 if "norm" in name and parameter.ndim == 1 and not name.endswith("bias") else 0.0
        parameter.data = offset + scale * torch.randn(parameter.shape, generator=generator)
        if not any(part in model._keep_in_fp32_modules for part in name.split(".")):
            parameter.data = parameter.data.bfloat16()
    return model.to(device).eval()


@pytest.fixture
def make_request(device):
    """A function packing a request with Diffusers' own block."""

    def make(text):
        position_ids, token_tags, video, audio, text_rows, conditions, _ = (
            MiniMaxH3PrepareLayoutStep.build_packed_sequence(
                torch.ones(text, dtype=torch.long),
                num_latent_frames=9,
                latent_height=6,
                latent_width=10,
                num_audio_latents=5,
                patch_size=(1, 2, 2),
                audio_channels=2,
                audio_tag=2,
                video_tag=0,
                keyframe_anchors=(),
            )
        )
        assert conditions == 0
        generator = torch.Generator().manual_seed(text)
        timestep_indices = torch.zeros(len(position_ids), dtype=torch.long)
        timestep_indices[video] = 1
        request = {
            "hidden_states": torch.randn(1, len(video), 16, generator=generator).bfloat16(),
            "audio_hidden_states": torch.randn(1, len(audio), 6, generator=generator).bfloat16(),
            "encoder_hidden_states": torch.randn(1, text, 32, generator=generator).bfloat16(),
            "timestep": torch.tensor([0.6, 0.4]),
            "timestep_indices": timestep_indices,
            "token_tags": token_tags,
            "position_ids": position_ids,
            "video_indices": video,
            "audio_indices": audio,
            "text_indices": text_rows,
        }
        return {name: tensor.to(device) for name, tensor in request.items()}

    return make


def _predict(model, request):
    return torch.cat([prediction.flatten() for prediction in model(**request, return_dict=False)]).double()


def test_auto_agrees_with_float32_and_sdpa(model, make_request):
    """The kernels' bfloat16 model errs no more than 1.5 times the eager one, both against float32."""
    request = make_request(7)
    automatic = _predict(model, request)
    model.set_attn_processor(HybridAttnProcessor(backend="sdpa"))
    with torch.enable_grad():  # gradients keep every operator on its reference
        eager = _predict(model, request).detach()
        doubled = {name: rows.float() if rows.is_floating_point() else rows for name, rows in request.items()}
        exact = _predict(model.float(), doubled).detach()
    assert _error(automatic, exact) <= EAGER_FACTOR * _error(eager, exact)


def test_compiled_blocks_agree_with_eager(model, make_request):
    """One graph without breaks, for two prompt lengths."""
    requests = [make_request(text) for text in (7, 12)]
    eager = [_predict(model, request) for request in requests]
    model.compile_repeated_blocks(fullgraph=True)
    for request, expected in zip(requests, eager, strict=True):
        # Inductor keeps in float32 what eager rounds between its operators: a few roundings to 2⁻⁸ a block.
        assert _error(_predict(model, request), expected) <= 3e-2


def test_fp8_linears_agree_with_their_weights(model, make_request, tmp_path):
    if torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a card that multiplies fp8")
    pytest.importorskip("torchao")
    model.save_pretrained(tmp_path)
    quantised = VDNH3Transformer3DModel.from_pretrained(
        tmp_path, quantization_config=fp8_quantization_config(), dtype=torch.bfloat16
    ).to("cuda")
    request = make_request(7)
    assert 1e-3 < _error(_predict(quantised, request), _predict(model, request)) < 0.15
