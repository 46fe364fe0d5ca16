"""The attention call itself: values against float64, the arguments each kernel gets, and every refusal."""

import logging
import threading

import pytest
import torch
import torch.nn.functional as F

from diffusers_h3.ops import prefill
from diffusers_h3.ops.prefill import PrefillOptions, prefill_attention, prefill_refusal


NEGATIVE_INFINITY = float("-inf")


def random_inputs(batch=1, queries=6, keys=9, heads=2, key_heads=2, head_dim=64, dtype=torch.bfloat16):
    query = torch.randn(batch, queries, heads, head_dim).to(dtype)
    key, value = (torch.randn(batch, keys, key_heads, head_dim).to(dtype) for _ in range(2))
    return query, key, value


def reference(query, key, value, allowed=None, is_causal=False, scale=None):
    """PyTorch's attention in float64; `allowed` broadcasts to ``[B, H, Q, K]``."""
    query, key, value = (x.double().transpose(1, 2) for x in (query, key, value))
    if is_causal:
        causal = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool).tril()
        allowed = causal if allowed is None else allowed & causal
    output = F.scaled_dot_product_attention(query, key, value, attn_mask=allowed, scale=scale, enable_gqa=True)
    return output.transpose(1, 2)


def attend(query, key, value, mask=None, is_causal=False, scale=None, **options):
    options = PrefillOptions(**options)
    refusal = prefill_refusal(query, key, value, mask, is_causal, scale, options)
    assert refusal is None, refusal
    return prefill_attention(query, key, value, mask, is_causal, scale, options)


def refuse(query, key, value, mask=None, is_causal=False, scale=None, **options):
    refusal = prefill_refusal(query, key, value, mask, is_causal, scale, PrefillOptions(**options))
    assert refusal is not None, "accepted"
    assert ". " not in refusal, "one sentence"
    assert refusal.endswith("."), "one sentence"
    return refusal


def assert_close(actual, expected, unit=2**-8):
    # The stand-in computes in float64, so the output's own rounding is all that may differ.
    torch.testing.assert_close(actual.double(), expected, rtol=unit, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("batch", [1, 3])
def test_single(stand_in, dtype, head_dim, key_heads, batch):
    query, key, value = random_inputs(batch, heads=4, key_heads=key_heads, head_dim=head_dim, dtype=dtype)
    output = attend(query, key, value, prefill="single")
    assert output.dtype == dtype
    assert_close(output, reference(query, key, value))
    assert stand_in.kernels == ["fa3"] * batch


@pytest.mark.parametrize("key_heads", [4, 2, 1])
@pytest.mark.parametrize("is_causal", [False, True])
def test_cudnn_takes_the_batch_in_one_call(stand_in, key_heads, is_causal):
    query, key, value = random_inputs(3, 7, 7, 4, key_heads, 128)
    output = attend(query, key, value, is_causal=is_causal, prefill="cudnn")
    assert_close(output, reference(query, key, value, is_causal=is_causal))
    (call,) = stand_in.calls
    assert call.arguments["batch_offsets_q"].flatten().tolist() == [0, 3584, 7168, 10752]
    row = key_heads * 128
    assert call.arguments["batch_offsets_k"].flatten().tolist() == [0, 7 * row, 14 * row, 21 * row]
    assert call.arguments["batch_offsets_v"].flatten().tolist() == [0, 7 * row, 14 * row, 21 * row]
    assert call.arguments["batch_offsets_o"].flatten().tolist() == [0, 3584, 7168, 10752]
    assert call.arguments["actual_seq_lens_kv"].flatten().tolist() == [7, 7, 7]


def test_cudnn_offsets_pass_32_bits():
    # Three MiniMax-H3 clips of 345 frames: 3 × 104,512 rows × 7,168 channels.
    lengths, offsets = prefill.cudnn._lengths_and_offsets(3, 104_512, 7_168, torch.device("cpu"))
    assert offsets.flatten().tolist() == [0, 749_142_016, 1_498_284_032, 2_247_426_048]
    assert lengths.flatten().tolist() == [104_512] * 3


@pytest.mark.parametrize("packed_first", [False, True])
@pytest.mark.parametrize("options", [{"prefill": "cudnn"}, {"prefill": "single"}])
def test_packed_views_and_contiguous_inputs_in_both_orders(stand_in, packed_first, options):
    packed = torch.randn(2, 5, 3, 2, 128).bfloat16()
    views = packed.unbind(2)
    copies = [view.contiguous() for view in views]
    expected = reference(*copies)
    for inputs in (views, copies) if packed_first else (copies, views):
        assert_close(attend(*inputs, **options), expected)


@pytest.mark.parametrize("kernel", ["fa2", "fa3"])
def test_inputs_the_kernels_cannot_load_are_copied(stand_in, kernel):
    query, key, value = random_inputs()
    # Adjacent rows instead of channels; heads two bytes off a multiple of 16.
    transposed = query.transpose(1, 3).contiguous().transpose(1, 3)
    shifted = torch.empty(key.numel() + 1, dtype=key.dtype)[1:].view(key.shape).copy_(key)
    assert_close(attend(transposed, shifted, value, kernel=kernel), reference(query, key, value))
    assert stand_in.kernels == [kernel]


@pytest.mark.parametrize("scale", [None, 0.3])
def test_softmax_scale(stand_in, scale):
    query, key, value = random_inputs(head_dim=128)
    assert_close(attend(query, key, value, scale=scale), reference(query, key, value, scale=scale))
    assert stand_in.calls[0].arguments["sm_scale"] == pytest.approx(scale or 128**-0.5)


# --- masks -----------------------------------------------------------------------------------------------------------


MASK_SHAPES = [(3, 9), (3, 1, 1, 9), (3, 1, 6, 9), (1, 1, 6, 9), (1, 1, 1, 9)]


@pytest.mark.parametrize("shape", MASK_SHAPES)
@pytest.mark.parametrize("additive", [False, True])
@pytest.mark.parametrize("is_causal", [False, True])
def test_masks(stand_in, shape, additive, is_causal):
    query, key, value = random_inputs(3)
    allowed = torch.rand(shape) > 0.4
    allowed[..., 0] = True
    mask = torch.zeros(shape).masked_fill(~allowed, NEGATIVE_INFINITY) if additive else allowed
    output = attend(query, key, value, mask, is_causal)
    broadcast = allowed[:, None, None] if allowed.ndim == 2 else allowed
    assert_close(output, reference(query, key, value, broadcast, is_causal))
    # Hopper's own kernel takes no mask.
    assert stand_in.kernels == ["fa2"] * 3


@pytest.mark.parametrize(("queries", "keys", "kernel"), [(7, 7, "fa3"), (7, 4, "fa2"), (4, 7, "fa2")])
def test_causal_counts_from_the_first_key_as_pytorch_does(stand_in, queries, keys, kernel):
    query, key, value = random_inputs(2, queries, keys)
    output = attend(query, key, value, is_causal=True)
    assert_close(output, reference(query, key, value, is_causal=True))
    assert stand_in.kernels == [kernel] * 2


def test_rows_without_any_key_are_zero(stand_in):
    query, key, value = random_inputs(2)
    mask = torch.ones(2, 1, 6, 9, dtype=torch.bool)
    mask[0, 0, 2] = False
    mask[1] = False
    output = attend(query, key, value, mask)
    assert (output[0, 2] == 0).all()
    assert (output[1] == 0).all()
    assert_close(output[0, [0, 1, 3, 4, 5]], reference(query, key, value)[0, [0, 1, 3, 4, 5]])


@pytest.mark.parametrize(
    "shape",
    [(10, 15), (20, 10), (15, 10), (1, 1, 20, 10), (1, 1, 10, 15), (2, 1, 10, 20), (10, 20), (20,), (1, 10, 20)],
)
def test_masks_of_wrong_shape_name_both(stand_in, shape):
    query, key, value = random_inputs(1, 10, 20)
    with pytest.raises(ValueError, match=r"10 queries and 20 keys") as error:
        prefill_refusal(query, key, value, torch.ones(shape, dtype=torch.bool), False, None, PrefillOptions())
    assert str(tuple(shape)) in str(error.value)
    assert stand_in.calls == []


@pytest.mark.parametrize(
    ("mask", "match"),
    [
        (torch.ones(1, 2, 6, 9, dtype=torch.bool), "differs between them"),
        (torch.full((1, 1, 6, 9), 0.5), "a bias"),
        (torch.full((1, 9), -1e9), "a bias"),
        (torch.ones(1, 9, dtype=torch.int64), "boolean or floating point"),
    ],
)
def test_masks_no_kernel_takes(stand_in, mask, match):
    assert match in refuse(*random_inputs(), mask)


@pytest.mark.parametrize("options", [{"kernel": "fa3"}, {"prefill": "cudnn"}, {"fp8": True}])
@pytest.mark.parametrize("masking", ["mask", "causal"])
def test_explicit_kernels_refuse_masks_by_name(stand_in, options, masking):
    inputs = random_inputs(head_dim=128)
    mask = torch.ones(1, 9, dtype=torch.bool) if masking == "mask" else None
    text = refuse(*inputs, mask, masking == "causal", **options)
    assert "mask" in text
    assert stand_in.calls == []


# --- dtypes ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "dtypes",
    [
        (torch.float32, torch.float32, torch.float32),
        (torch.float32, torch.float32, torch.bfloat16),
        (torch.bfloat16, torch.bfloat16, torch.float32),
        (torch.float16, torch.float16, torch.bfloat16),
        (torch.float64, torch.float64, torch.float64),
    ],
)
@pytest.mark.parametrize("options", [{}, {"prefill": "cudnn"}])
def test_other_dtypes_run_in_bfloat16_and_return_the_querys(stand_in, caplog, dtypes, options):
    inputs = [x.to(dtype) for x, dtype in zip(random_inputs(head_dim=128), dtypes, strict=True)]
    with caplog.at_level(logging.WARNING, logger="diffusers_h3"):
        outputs = [attend(*inputs, **options) for _ in range(2)]
    assert [record.getMessage() for record in caplog.records if "bfloat16" in record.getMessage()] == [
        "FlashInfer attention got inputs that are not all float16 or all bfloat16: it computes them in bfloat16 and "
        "returns the query's dtype."
    ]
    for output in outputs:
        assert output.dtype == dtypes[0]
        assert_close(output, reference(*(x.bfloat16() for x in inputs)))
    assert {call.arguments["q"].dtype for call in stand_in.calls} == {torch.bfloat16}


def test_integers_are_refused(stand_in):
    query, key, value = random_inputs()
    assert "torch.int32" in refuse(query, key, value.int())


@pytest.mark.parametrize("key_heads", [4, 2])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_fp8_quantises_per_item_and_head(stand_in, dtype, key_heads):
    query, key, value = random_inputs(2, 40, 50, 4, key_heads, 128, dtype)
    # Heads of very different size, one of them zero: a scale shared by heads would lose the small ones.
    query = query * torch.tensor([1.0, 0.1, 0.01, 1.0], dtype=dtype)[:, None]
    value = value * torch.logspace(-2, 2, key_heads, dtype=torch.float32)[:, None].to(dtype)
    key[1, :, 0] = 0
    output = attend(query, key, value, fp8=True)
    assert output.dtype == dtype
    assert stand_in.kernels == ["fa3", "fa3"]
    for call in stand_in.calls:
        assert call.arguments["q"].dtype == torch.float8_e4m3fn
        # 448 is e4m3's largest value: the largest input of every head uses the whole range.
        assert (call.arguments["q"].float().abs().amax((0, 2)) == 448).all()
    expected = reference(query, key, value)
    error = (output.double() - expected).norm(dim=(1, 3)) / expected.norm(dim=(1, 3))
    # e4m3 has 3 mantissa bits: a value errs by up to 2^-4 and by a third of that on average.
    assert (error < 2**-4).all(), error
    assert (error > 1e-3).any(), "not quantised at all"


# --- refusals --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("head_dim", [32, 72, 96, 192, 512])
@pytest.mark.parametrize("options", [{}, {"kernel": "fa2"}, {"kernel": "fa3"}, {"prefill": "cudnn"}, {"fp8": True}])
def test_head_dims_are_refused_before_any_call(stand_in, head_dim, options):
    assert f"this model has {head_dim}" in refuse(*random_inputs(head_dim=head_dim), **options)
    assert stand_in.calls == []


@pytest.mark.parametrize("head_dim", [64, 256])
def test_cudnn_takes_head_dim_128_alone(stand_in, head_dim):
    assert "cudnn kernel takes head dimensions 128" in refuse(*random_inputs(head_dim=head_dim), prefill="cudnn")


@pytest.mark.parametrize("position", [0, 1, 2])
def test_inputs_that_require_gradients_are_refused(stand_in, position):
    inputs = list(random_inputs())
    inputs[position].requires_grad_()
    assert "no backward pass" in refuse(*inputs)
    with torch.no_grad():
        assert_close(attend(*inputs), reference(*inputs))


def test_cards_older_than_ampere_are_refused(stand_in, hopper):
    hopper.set_capability((7, 5))
    assert "8.0 or newer" in refuse(*random_inputs())


@pytest.mark.parametrize("capability", [(8, 0), (8, 9), (10, 0), (12, 0)])
def test_other_cards_run_fa2_and_refuse_what_is_hoppers(stand_in, hopper, capability):
    hopper.set_capability(capability)
    inputs = random_inputs(2)
    assert_close(attend(*inputs), reference(*inputs))
    assert stand_in.kernels == ["fa2", "fa2"]
    assert "9.0 (Hopper) alone" in refuse(*inputs, fp8=True)
    assert "9.0 (Hopper) alone" in refuse(*inputs, kernel="fa3")


def test_cpu_tensors_are_refused():
    assert "CUDA devices" in refuse(*random_inputs())


def test_cudnn_refuses_another_scale(stand_in):
    inputs = random_inputs(head_dim=128)
    assert "without the softmax scale" in refuse(*inputs, scale=0.3, prefill="cudnn")
    assert_close(attend(*inputs, scale=128**-0.5, prefill="cudnn"), reference(*inputs))


def test_cudnn_stays_on_the_device_of_its_handle(stand_in, monkeypatch):
    inputs = random_inputs(head_dim=128)
    attend(*inputs, prefill="cudnn")
    monkeypatch.setattr(prefill.cudnn, "_handle_devices", [1])
    assert "one process per device" in refuse(*inputs, prefill="cudnn")
    assert_close(attend(*inputs, prefill="single"), reference(*inputs))


@pytest.mark.parametrize(
    ("shapes", "match"),
    [
        (((1, 6, 2, 64), (1, 9, 2, 64), (1, 8, 2, 64)), "one shape"),
        (((2, 6, 2, 64), (1, 9, 2, 64), (1, 9, 2, 64)), "batch"),
        (((1, 6, 2, 64), (1, 9, 2, 128), (1, 9, 2, 128)), "head dimension"),
        (((1, 6, 3, 64), (1, 9, 2, 64), (1, 9, 2, 64)), "multiple"),
        (((1, 6, 2, 64), (1, 0, 2, 64), (1, 0, 2, 64)), "at least one"),
        (((6, 2, 64), (9, 2, 64), (9, 2, 64)), "shape"),
    ],
)
def test_impossible_shapes_raise(stand_in, shapes, match):
    inputs = [torch.zeros(shape, dtype=torch.bfloat16) for shape in shapes]
    with pytest.raises(ValueError, match=match) as error:
        prefill_refusal(*inputs, None, False, None, PrefillOptions())
    assert str(shapes[0]) in str(error.value)


# --- choices ---------------------------------------------------------------------------------------------------------


def test_auto_takes_cudnn_from_the_measured_batch(stand_in, hopper, monkeypatch):
    monkeypatch.setitem(prefill._CUDNN_MEASURED_FASTER, (8, 0), (2, 512))
    hopper.set_capability((8, 0))
    one, three = random_inputs(1, head_dim=128), random_inputs(3, head_dim=128)
    for inputs in (one, three):
        assert_close(attend(*inputs), reference(*inputs))
    assert stand_in.kernels == ["fa2", "cudnn"]
    stand_in.calls.clear()
    # What cuDNN cannot take goes to the other kernels.
    attend(*random_inputs(3, head_dim=64))
    attend(*three, scale=0.3)
    attend(*three, torch.ones(3, 9, dtype=torch.bool))
    attend(*three, kernel="fa2")
    attend(*three, prefill="single")
    hopper.modules["cudnn"] = False
    attend(*three)
    assert stand_in.kernels == ["fa2"] * 18


def test_auto_takes_cudnn_for_the_text_of_large_batches_on_hopper(stand_in):
    for batch, num_keys in ((4, 512), (3, 512), (4, 513), (1, 512)):
        query = torch.randn(batch, 16, 2, 128, dtype=torch.bfloat16)
        key = torch.randn(batch, num_keys, 2, 128, dtype=torch.bfloat16)
        assert_close(attend(query, key, key), reference(query, key, key))
    assert stand_in.kernels == ["cudnn"] + ["fa3"] * 8


def test_auto_logs_its_choice_once(stand_in, caplog):
    with caplog.at_level(logging.INFO, logger="diffusers_h3"):
        for _ in range(3):
            attend(*random_inputs())
    assert [record.getMessage() for record in caplog.records] == [
        "FlashInfer attention: fa3 on compute capability 9.0, one item."
    ]


def test_single_warns_once_about_batches(stand_in, caplog):
    with caplog.at_level(logging.WARNING, logger="diffusers_h3"):
        attend(*random_inputs(1), prefill="single")
        assert caplog.records == []
        for _ in range(2):
            attend(*random_inputs(2), prefill="single")
    assert len(caplog.records) == 1
    assert "once per batch item" in caplog.records[0].getMessage()


def test_threads_share_everything(stand_in):
    """Eight threads, four shapes, both functions: every thread gets its own answer."""
    failures, barrier = [], threading.Barrier(8)

    def work(index):
        generator = torch.Generator().manual_seed(index)
        query, key, value = (torch.randn(2, 8 + index % 4, 2, 128, generator=generator).bfloat16() for _ in range(3))
        expected = reference(query, key, value)
        barrier.wait()
        try:
            for _ in range(5):
                assert_close(attend(query, key, value, prefill="cudnn" if index % 2 else "single"), expected)
        except Exception as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(index,)) for index in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failures == []
    assert sorted(set(stand_in.kernels)) == ["cudnn", "fa3"]
