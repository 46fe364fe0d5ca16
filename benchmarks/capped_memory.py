"""The memory of a device, capped and counted."""

import gc

import torch


class Memory:
    """The memory of a CPU, which is neither capped nor counted."""

    device = "cpu"

    def limit(self, cap_gb: float | None) -> None:
        """Let PyTorch reserve so much from now on, or everything, and count its peaks anew."""
        gc.collect()

    def caps(self, caps_gb: list[float], peak_gb: float) -> list[float | None]:
        """Return the caps that are not below a peak, smallest first."""
        return [None]

    def peak(self) -> dict[str, float]:
        """Return what PyTorch had at the most since the last limit, and what the process holds beside PyTorch."""
        return {"peak_gb": 0.0, "reserved_gb": 0.0, "outside_gb": 0.0}

    def pinned_gb(self) -> float:
        """Return the computer's memory that is pinned, rounded up as PyTorch's allocator does."""
        return 0.0

    def free_pinned(self) -> None:
        """Give back pinned memory that nothing uses."""

    def synchronize(self) -> None:
        """Wait for everything that runs."""


class CudaMemory(Memory):
    """The memory of the current CUDA device."""

    device = "cuda"

    def limit(self, cap_gb: float | None) -> None:
        super().limit(cap_gb)
        torch.cuda.empty_cache()
        total = torch.cuda.mem_get_info()[1]
        torch.cuda.set_per_process_memory_fraction(1.0 if cap_gb is None else min(1.0, cap_gb * 1e9 / total))
        torch.cuda.reset_peak_memory_stats()

    def caps(self, caps_gb: list[float], peak_gb: float) -> list[float | None]:
        return [cap for cap in sorted(caps_gb) if cap >= peak_gb]

    def peak(self) -> dict[str, float]:
        free, total = torch.cuda.mem_get_info()
        return {
            "peak_gb": torch.cuda.max_memory_allocated() / 1e9,
            "reserved_gb": torch.cuda.max_memory_reserved() / 1e9,
            "outside_gb": (total - free - torch.cuda.memory_reserved()) / 1e9,
        }

    def pinned_gb(self) -> float:
        return torch.cuda.host_memory_stats().get("active_bytes.current", 0) / 1e9

    def free_pinned(self) -> None:
        gc.collect()  # hooks that were taken off refer to themselves, and to the pinned weights
        torch._C._host_emptyCache()

    def synchronize(self) -> None:
        torch.cuda.synchronize()
