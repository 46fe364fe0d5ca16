"""Requests whose activations cannot fit on the GPU are refused before any model runs. The GPUs are pretended."""

import copy
from types import SimpleNamespace

import pytest
import torch
from accelerate import cpu_offload_with_hook

from diffusers_h3.pipelines import memory, pipeline_vdn_h3


CPU = torch.device("cpu")
GPU = torch.device("cuda", 0)
GB = 10**9
# 47 latent frames of 56 × 31 rows, 2,772 rows of text and 2 × 263 of audio.
REQUEST = {"height": 992, "width": 1792, "num_frames": 158, "output_type": "latent"}
TEXT_ROWS = 2772
ROWS = 84_890
# 9 rows of 7168 values in bfloat16.
BYTES_PER_ROW = 129_024
SHORT_OF_ONE_BYTE = ROWS * BYTES_PER_ROW - 1


class EncodedError(Exception):
    """Raised where the first component would run."""


@pytest.fixture(scope="module")
def full_width_transformer():
    """One block of the released width in bfloat16, without storage."""
    from diffusers_h3 import VDNH3Transformer3DModel

    with torch.device("meta"):
        transformer = VDNH3Transformer3DModel(num_layers=1, num_refiner_layers=1)
    return transformer.to(torch.bfloat16)


@pytest.fixture
def gpu(monkeypatch):
    """A function pretending GPUs of `{index: (free, total)}` bytes and an allocator that holds `unused` bytes."""

    def pretend(memory_by_index, unused=0):
        queries = []

        def mem_get_info(device):
            queries.append(device)
            return memory_by_index[device.index]

        monkeypatch.setattr(torch.cuda, "mem_get_info", mem_get_info)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 5 * GB + unused)
        monkeypatch.setattr(torch.cuda, "memory_allocated", lambda device: 5 * GB)
        monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
        return queries

    return pretend


@pytest.fixture
def request_on_gpu(make_pipeline, full_width_transformer, monkeypatch):
    """A function making the request of this file with weights that seem to lie on `weight_devices`."""
    parts = dict.fromkeys(("vae", "audio_vae", "text_encoder", "tokenizer", "processor"))

    def run(weight_devices=(GPU,), text_rows=TEXT_ROWS, device=GPU, **options):
        pipeline = make_pipeline(transformer=full_width_transformer, **parts)

        def stop(*_arguments, **_options):
            raise EncodedError

        weights = [SimpleNamespace(device=weight_device) for weight_device in weight_devices]
        monkeypatch.setattr(full_width_transformer, "parameters", lambda: iter(weights))
        monkeypatch.setattr(type(pipeline), "_execution_device", device)
        monkeypatch.setattr(pipeline_vdn_h3, "_encode_text", stop)
        monkeypatch.setattr(full_width_transformer, "forward", stop)
        embeds = torch.empty(1, text_rows, 5120, device="meta")
        pipeline(prompt_embeds=embeds, text_token_tags=torch.ones(text_rows, dtype=torch.int), **REQUEST | options)

    return run


def test_what_cannot_fit_beside_the_weights_is_refused(gpu, request_on_gpu):
    gpu({0: (9 * GB, 24 * GB)})
    with pytest.raises(ValueError, match="make 84890 rows, which need at least") as error:
        request_on_gpu()
    lines = str(error.value).split("\n")
    assert lines[0] == (
        "158 frames of 1792 × 992 make 84890 rows, which need at least 11.0 GB for activations, but cuda:0 has 9.0 GB "
        "for them."
    )
    # 124 frames are 37 × 1736 + 2772 + 2 × 207 = 67,418 rows, 8.7 GB; 141 are 42 × 1736 + 2772 + 2 × 235 = 76,154
    # rows, 9.8 GB. 50 × 27 rows a frame are 66,748 rows, 8.6 GB; 51 × 28 are 70,414 rows, 9.1 GB.
    assert lines[1] == (
        "What helps: `num_frames=124` or less; `height=864, width=1600` or less; fp8 weights (`quantization_config`) "
        "or `enable_group_offload`, which leave more memory free; a GPU with more memory."
    )


def test_the_released_request_fits_a_large_gpu(gpu, request_on_gpu):
    gpu({0: (70 * GB, 141 * GB)})
    with pytest.raises(EncodedError):
        request_on_gpu()


@pytest.mark.parametrize(("unused", "outcome"), [(0, ValueError), (1, EncodedError)])
def test_unused_memory_of_the_allocator_counts(unused, outcome, gpu, request_on_gpu):
    gpu({0: (SHORT_OF_ONE_BYTE, 24 * GB)}, unused)
    with pytest.raises(outcome):
        request_on_gpu()


@pytest.mark.parametrize(("free", "advice"), [(10 * GB, "`num_frames=141` or less"), (GB, "`height=")])
def test_advice_is_what_passes(free, advice, gpu, request_on_gpu):
    gpu({0: (free, 24 * GB)})
    with pytest.raises(ValueError, match=f"What helps: {advice}"):
        request_on_gpu()


def test_suggested_frames_pass_and_the_next_count_does_not(gpu, request_on_gpu):
    gpu({0: (10 * GB, 24 * GB)})
    with pytest.raises(EncodedError):
        request_on_gpu(num_frames=141)
    with pytest.raises(ValueError, match="158 frames"):
        request_on_gpu(num_frames=158)


@pytest.mark.parametrize("weight_devices", [(CPU,), (GPU, CPU)])
def test_offloaded_weights_leave_the_whole_device(weight_devices, gpu, request_on_gpu):
    gpu({0: (0, 24 * GB)})
    with pytest.raises(EncodedError):
        request_on_gpu(weight_devices)
    gpu({0: (0, 10 * GB)})
    with pytest.raises(ValueError, match=r"cuda:0 has 10\.0 GB for them") as error:
        request_on_gpu(weight_devices)
    assert "offload" not in str(error.value)  # would not help: activations alone exceed the device


@pytest.mark.parametrize("offload", ["model", "leaf_level", "block_level"])
def test_real_offload_hooks_leave_the_whole_device(offload, make_pipeline, components, gpu, generate):
    parts = dict.fromkeys(("vae", "audio_vae", "text_encoder", "tokenizer", "processor"))
    pipeline = make_pipeline(transformer=copy.deepcopy(components["transformer"]), **parts)
    if offload == "model":
        cpu_offload_with_hook(pipeline.transformer, GPU)
    else:
        pipeline.enable_group_offload(GPU, CPU, offload, num_blocks_per_group=1)
    options = {"prompt": None, "prompt_embeds": torch.zeros(1, 3, pipeline.transformer.config.text_dim)}
    gpu({0: (GB, GB // 1000)})
    with pytest.raises(ValueError, match=r"but cuda:0 has 0\.0 GB"):
        generate(pipeline, text_token_tags=torch.ones(3, dtype=torch.int), num_frames=345, **options)


def test_hooked_weights_leave_the_whole_device(gpu, request_on_gpu, full_width_transformer, monkeypatch):
    gpu({0: (0, 24 * GB)})
    monkeypatch.setattr(full_width_transformer.transformer_blocks[0], "_hf_hook", object(), raising=False)
    with pytest.raises(EncodedError):
        request_on_gpu()


def test_a_transformer_on_another_gpu_is_judged_by_the_largest(gpu, request_on_gpu):
    gpu({0: (0, 8 * GB), 1: (0, 24 * GB)})
    with pytest.raises(EncodedError):
        request_on_gpu((torch.device("cuda", 1),))


def test_a_device_without_index_is_the_current_one(gpu, request_on_gpu):
    gpu({0: (9 * GB, 24 * GB)})
    with pytest.raises(ValueError, match=r"but cuda:0 has 9\.0 GB"):
        request_on_gpu(device=torch.device("cuda"))


@pytest.mark.parametrize(("num_keyframes", "text_rows", "rows"), [(0, 0, 82_118), (0, 2772, ROWS), (2, 2772, 88_362)])
def test_rows_count_text_keyframes_audio_and_video(num_keyframes, text_rows, rows, full_width_transformer):
    geometry = SimpleNamespace(latents_shape=(1, 24, 47, 62, 112), audio_latents_shape=(2, 32, 263))
    components = SimpleNamespace(patch_size=full_width_transformer.config.patch_size)
    assert memory.count_rows(components, geometry, num_keyframes, text_rows) == rows


def test_counted_rows_are_those_of_the_packed_sequence(pipeline, generate, keyframes, monkeypatch):
    counted, packed = [], []
    check = pipeline_vdn_h3.check_memory

    def record(components, geometry, num_keyframes, prompt_embeds):
        counted.append(memory.count_rows(components, geometry, num_keyframes, 0))
        return check(components, geometry, num_keyframes, prompt_embeds)

    def record_inputs(_module, _arguments, inputs):
        packed.append(len(inputs["position_ids"]) - len(inputs["text_indices"]))

    monkeypatch.setattr(pipeline_vdn_h3, "check_memory", record)
    handle = pipeline.transformer.register_forward_pre_hook(record_inputs, with_kwargs=True)
    try:
        generate(pipeline, image=keyframes[0], last_image=keyframes[1])
    finally:
        handle.remove()
    # Once a request, before its two steps: 39 frames of 2 × 3 rows and 2 × 207 of audio.
    assert counted == [648]
    assert packed == [648, 648]


def test_the_bound_follows_dtype_and_processes(full_width_transformer, monkeypatch):
    assert memory.activation_bytes(full_width_transformer, ROWS, torch.bfloat16) == ROWS * BYTES_PER_ROW
    assert memory.activation_bytes(full_width_transformer, ROWS, torch.float32) == ROWS * BYTES_PER_ROW * 2
    monkeypatch.setattr(full_width_transformer, "_parallel_config", object())
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 2)
    assert memory.activation_bytes(full_width_transformer, ROWS, torch.bfloat16) == 5_476_423_680


def test_the_device_is_asked_once_a_request(gpu, request_on_gpu):
    queries = gpu({0: (70 * GB, 141 * GB)})
    with pytest.raises(EncodedError):
        request_on_gpu()
    assert queries == [GPU]


def test_nothing_is_asked_on_the_cpu(pipeline, generate, gpu):
    queries = gpu({0: (0, 0)})
    frames, _ = generate(pipeline)
    assert frames.isfinite().all()
    assert queries == []
