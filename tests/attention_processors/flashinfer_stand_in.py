"""A recording stand-in for FlashInfer's two functions: their contracts checked, their results computed in float64.

The contracts are those of FlashInfer 0.6.13 and cuDNN 9: what the real kernels refuse, read out of bounds or get
silently wrong fails an assertion here. Used by the tests, and by `benchmarks/gpu_check_flashinfer.py --stand-in`.
"""

import sys
import types
from dataclasses import dataclass, field

import torch


@dataclass
class Call:
    """One call of a stand-in: which function, with which kernel, and its arguments."""

    function: str
    kernel: str
    arguments: dict = field(repr=False)


class FlashInferStandIn:
    """Modules `flashinfer`, `flashinfer.prefill` and `flashinfer.cudnn`, and the list of calls made of them."""

    def __init__(self):
        self.calls: list[Call] = []
        self._cudnn_graphs: dict = {}
        package, prefill, cudnn = (
            types.ModuleType(name) for name in ("flashinfer", "flashinfer.prefill", "flashinfer.cudnn")
        )
        package.__version__ = "0.6.13"
        prefill.single_prefill_with_kv_cache = self.single_prefill_with_kv_cache
        cudnn.cudnn_batch_prefill_with_kv_cache = self.cudnn_batch_prefill_with_kv_cache
        package.prefill, package.cudnn = prefill, cudnn
        self.modules = {"flashinfer": package, "flashinfer.prefill": prefill, "flashinfer.cudnn": cudnn}

    @property
    def kernels(self) -> list[str]:
        return [call.kernel for call in self.calls]

    def single_prefill_with_kv_cache(
        self,
        q,
        k,
        v,
        scale_q=None,
        scale_k=None,
        scale_v=None,
        o_dtype=None,
        custom_mask=None,
        packed_custom_mask=None,
        causal=False,
        kv_layout="NHD",
        pos_encoding_mode="NONE",
        use_fp16_qk_reduction=False,
        sm_scale=None,
        window_left=-1,
        logits_soft_cap=None,
        rope_scale=None,
        rope_theta=None,
        backend="auto",
        return_lse=False,
    ):
        self.calls.append(Call("single", backend, dict(locals(), self=None)))
        rows, heads, head_dim = q.shape
        columns, key_heads, _ = k.shape
        assert k.shape == v.shape == (columns, key_heads, head_dim), (q.shape, k.shape, v.shape)
        assert heads % key_heads == 0, (heads, key_heads)
        assert head_dim in (64, 128, 256), f"head_dim {head_dim} gives wrong values or an illegal access"
        assert kv_layout == "NHD"
        assert backend in ("fa2", "fa3"), backend
        assert q.dtype == k.dtype == v.dtype, (q.dtype, k.dtype, v.dtype)
        for tensor in (q, k, v):
            assert tensor.stride(2) == 1, f"kernels read channels as adjacent, strides are {tensor.stride()}"
            for unit in (tensor.stride(0) * tensor.itemsize, tensor.stride(1) * tensor.itemsize, tensor.data_ptr()):
                assert unit % 16 == 0, "loads need 16-byte alignment"
        if q.dtype == torch.float8_e4m3fn:
            assert backend == "fa3"
            assert custom_mask is None, "the float8 kernel takes no mask"
            assert o_dtype in (torch.float16, torch.bfloat16), o_dtype
            assert scale_q.shape == (heads,), scale_q.shape
            assert scale_k.shape == scale_v.shape == (key_heads,), (scale_k.shape, scale_v.shape)
            assert scale_q.dtype == scale_k.dtype == scale_v.dtype == torch.float32
            assert all(scale.is_contiguous() for scale in (scale_q, scale_k, scale_v))
            q, k, v = (x.double() * s.double()[:, None] for x, s in ((q, scale_q), (k, scale_k), (v, scale_v)))
            dtype = o_dtype
        else:
            assert q.dtype in (torch.float16, torch.bfloat16), q.dtype
            assert scale_q is scale_k is scale_v is None
            dtype = q.dtype
        if custom_mask is not None:
            assert backend == "fa2", "fa3 returns cudaErrorNotSupported for a custom mask"
            assert custom_mask.shape == (rows, columns), "a mask of another shape is read out of bounds"
            assert custom_mask.dtype == torch.bool
            assert not causal, "`causal` is ignored where a mask is given"
        return _attention(q, k, v, sm_scale, causal, custom_mask).to(dtype)

    def cudnn_batch_prefill_with_kv_cache(
        self,
        q,
        k_cache,
        v_cache,
        scale,
        workspace_buffer,
        *,
        max_token_per_sequence,
        max_sequence_kv,
        actual_seq_lens_q,
        actual_seq_lens_kv,
        block_tables=None,
        causal,
        return_lse,
        batch_offsets_q=None,
        batch_offsets_o=None,
        batch_offsets_k=None,
        batch_offsets_v=None,
        out=None,
    ):
        self.calls.append(Call("cudnn", "cudnn", dict(locals(), self=None)))
        batch = actual_seq_lens_q.shape[0]
        _, heads, head_dim = q.shape
        _, key_heads, _ = k_cache.shape
        assert head_dim == 128, head_dim
        assert q.dtype == k_cache.dtype == v_cache.dtype
        assert q.dtype in (torch.float16, torch.bfloat16), q.dtype
        assert all(tensor.is_contiguous() for tensor in (q, k_cache, v_cache))
        assert actual_seq_lens_q.shape == actual_seq_lens_kv.shape == (batch, 1, 1, 1)
        assert actual_seq_lens_q.dtype == actual_seq_lens_kv.dtype == torch.int32
        assert (actual_seq_lens_q <= max_token_per_sequence).all()
        assert (actual_seq_lens_kv <= max_sequence_kv).all()
        assert workspace_buffer.dtype == torch.uint8
        assert workspace_buffer.numel() >= 128 * 1024**2
        for offsets in (batch_offsets_q, batch_offsets_k, batch_offsets_v, batch_offsets_o):
            assert offsets.numel() == batch + 1, "one offset per item and the end"
            assert offsets.dtype == torch.int64, "32 bits overflow with three long clips"
        # Graphs are cached by shape; what else they were built from must not change under one key.
        key = (batch, q.dtype, max_token_per_sequence, max_sequence_kv, heads, key_heads, head_dim, return_lse, causal)
        built_from = (scale, q.stride(), k_cache.stride(), v_cache.stride())
        assert self._cudnn_graphs.setdefault(key, built_from) == built_from, "a cached graph would be wrong"
        output = torch.full_like(q, float("nan"))
        for item in range(batch):
            queries = int(actual_seq_lens_q[item])
            columns = int(actual_seq_lens_kv[item])

            def rows(tensor, offsets, count, item=item):
                flat = tensor.view(-1)[int(offsets.view(-1)[item]) :]
                return flat[: count * tensor.shape[1] * head_dim].view(count, tensor.shape[1], head_dim)

            query = rows(q, batch_offsets_q, queries)
            key, value = rows(k_cache, batch_offsets_k, columns), rows(v_cache, batch_offsets_v, columns)
            rows(output, batch_offsets_o, queries)[:] = _attention(query, key, value, scale, causal, None)
        return output, None


def _attention(query, key, value, scale, causal, mask):
    """Softmax attention over ``[S, H, D]`` in float64; causal aligns the ends, as the kernels do."""
    groups = query.shape[1] // key.shape[1]
    query, key, value = (x.double().transpose(0, 1) for x in (query, key, value))
    key, value = key.repeat_interleave(groups, 0), value.repeat_interleave(groups, 0)
    logits = query @ key.transpose(1, 2) * scale
    rows, columns = logits.shape[1:]
    if causal:
        mask = torch.ones(rows, columns, dtype=torch.bool, device=logits.device).tril(columns - rows)
    if mask is not None:
        # As in FlashInfer, whose infinity is a number: a row without keys gives the mean of all values.
        logits = logits.masked_fill(~mask, -5e4)
    return (logits.softmax(-1) @ value).transpose(0, 1).contiguous()


class PretendedMachine:
    """What `diffusers_h3.ops.prefill.machine` finds; `modules` and the capability can be changed."""

    def __init__(self, monkeypatch):
        self._monkeypatch = monkeypatch
        self.modules = {"flashinfer": True, "cudnn": True, "flashinfer_jit_cache": False}
        self._replace("has_module", torch.compiler.assume_constant_result(lambda name: self.modules[name]))
        self._replace("has_program", lambda path: True)
        self.set_capability((9, 0))

    def set_capability(self, capability):
        self._replace("cuda_capability", torch.compiler.assume_constant_result(lambda *_: capability))
        self._replace("visible_capabilities", lambda: [capability])

    def _replace(self, name, value):
        from diffusers_h3.ops.prefill import machine

        self._monkeypatch.setattr(machine, name, value)


def pretend_hopper(monkeypatch) -> PretendedMachine:
    """Make this machine pass for one with a Hopper card, FlashInfer and a compiler, and forget what was found out."""
    from diffusers_h3 import notices
    from diffusers_h3.attention_processors import flashinfer_backend

    flashinfer_backend._options_and_refusal.cache_clear()
    notices._log.cache_clear()
    return PretendedMachine(monkeypatch)


def install(monkeypatch) -> FlashInferStandIn:
    """Put a stand-in where `import flashinfer` finds it."""
    from diffusers_h3.ops.prefill import cudnn

    recorder = FlashInferStandIn()
    for name, module in recorder.modules.items():
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cudnn, "_handle_devices", [])
    return recorder
