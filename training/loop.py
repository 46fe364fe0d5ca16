"""The loop every stage runs: resumable at any step, limited by steps and by minutes, and the same either way."""

import json
import time
from collections.abc import Callable, Hashable, Iterator
from dataclasses import dataclass
from pathlib import Path

import torch
from diffusers.training_utils import EMAModel
from safetensors.torch import load_file, save_file

from .backward import Backward, Losses


WEIGHTS_FILE, STATE_FILE, HISTORY_FILE = "weights.safetensors", "state.pt", "history.json"

# One part of a batch: what its tensors share (compared, so it must be hashable), and the tensors.
Part = tuple[Hashable, tuple[torch.Tensor, ...]]


@dataclass(frozen=True)
class Schedule:
    """How long a stage trains and how fast.

    Attributes:
        steps (`int`): Optimiser steps of the whole stage; the learning rate falls to a tenth over them.
        minutes (`float`): When this piece stops and saves, finished or not.
        learning_rate (`float`): Peak of the learning rate, after `warmup` steps.
        warmup (`int`): Steps of linear warm-up.
        average (`float`): Decay of the averaged weights, which are what a stage hands on.
        graphs (`bool`): Whether forward and backward passes are replayed as CUDA graphs on a card.
        report_seconds, save_seconds (`float`): How often a line is printed and a checkpoint saved.
    """

    steps: int
    minutes: float = float("inf")
    learning_rate: float = 1e-3
    warmup: int = 100
    average: float = 0.999
    graphs: bool = True
    report_seconds: float = 5.0
    save_seconds: float = 60.0

    def rate(self, step: int) -> float:
        """Return the learning rate of a step."""
        warm = min(1.0, (step + 1) / self.warmup)
        cosine = 0.55 + 0.45 * torch.tensor(torch.pi * step / self.steps).cos().item()
        return self.learning_rate * warm * cosine


@dataclass(frozen=True)
class Draws:
    """The random numbers of one step: `host` for choices that Python makes, `device` for whole tensors."""

    host: torch.Generator
    device: torch.Generator

    @classmethod
    def of(cls, seed: int, step: int, device: torch.device) -> "Draws":
        """Seed both for one step of a stage."""
        number = (seed << 32) + step
        return cls(torch.Generator().manual_seed(number), torch.Generator(device).manual_seed(number))

    def strata(self, count: int) -> list[float]:
        """Draw a number from each of `count` equal parts of [0, 1)."""
        offsets = torch.rand(count, generator=self.host).tolist()
        return [(index + offset) / count for index, offset in enumerate(offsets)]

    def pick(self, sizes: list[int], count: int) -> tuple[int, torch.Tensor]:
        """Draw one of several groups, as often as it is large, and `count` of its members, on the device."""
        group = int(torch.multinomial(torch.tensor(sizes, dtype=torch.float32), 1, generator=self.host))
        members = torch.randint(sizes[group], (count,), generator=self.host)
        return group, members.to(self.device.device)

    def normal(self, shape: torch.Size) -> torch.Tensor:
        """Draw unit normal numbers on the device."""
        return torch.randn(shape, generator=self.device, device=self.device.device)


def fit(
    folder: Path,
    module: torch.nn.Module,
    draw: Callable[[Draws], Iterator[Part]],
    losses: Callable[..., Losses],
    schedule: Schedule,
    device: torch.device,
    seed: int = 0,
) -> list[dict[str, float]]:
    """Train the parameters of `module` that ask for gradients, on from where `folder` stands.

    Every step seeds its own generators, so a stage that was stopped and resumed gives the weights of one that was not.
    `module` is left with the averaged weights.

    Args:
        folder (`Path`): Where `weights.safetensors` (averaged), `state.pt` (everything needed to go on) and
            `history.json` are kept. A finished stage has no state any more.
        module (`torch.nn.Module`): The module; frozen parameters are neither saved nor restored.
        draw (`Callable`): Called once per step with its random numbers; yields the parts of the batch.
        losses (`Callable`): Called with the key and the tensors of a part; returns its losses. On a card it is
            captured as a CUDA graph, unless the schedule says no.
        schedule (`Schedule`): Steps, minutes and rates.
        device (`torch.device`): Where the module is.
        seed (`int`): Seed of the stage.

    Returns:
        `list[dict]`: the history: step, seconds, learning rate and mean losses since the entry before.

    Raises:
        FloatingPointError: If a loss is not finite; the last checkpoint is kept.
    """
    trained = {name: parameter for name, parameter in module.named_parameters() if parameter.requires_grad}
    history = _read_history(folder)
    if (folder / WEIGHTS_FILE).is_file() and not (folder / STATE_FILE).is_file():
        load_weights(module, folder)
        return history

    optimizer = torch.optim.AdamW(trained.values(), lr=schedule.learning_rate, weight_decay=0.01, betas=(0.9, 0.98))
    average = EMAModel(trained.values(), decay=schedule.average, use_ema_warmup=True, power=0.75, foreach=True)
    step = _restore(folder, trained, optimizer, average, device)

    backward = Backward(losses, trained.values(), schedule.graphs and device.type == "cuda")

    start = reported = saved = time.monotonic()
    before = history[-1]["seconds"] if history else 0.0
    sums: dict[str, float] = {}
    counted = 0
    while step < schedule.steps and time.monotonic() - start < 60 * schedule.minutes:
        for group in optimizer.param_groups:
            group["lr"] = schedule.rate(step)
        optimizer.zero_grad(set_to_none=False)
        parts = [backward(*part) for part in draw(Draws.of(seed, step, device))]
        # Gradients are sums over the parts. Adam divides by their size, so only the clipping has to know.
        torch.nn.utils.clip_grad_norm_(trained.values(), float(len(parts)))
        optimizer.step()
        average.step(trained.values())
        step += 1
        # Summed on the device: reading a loss every step would wait for it every step.
        for name in parts[0]:
            sums[name] = sums.get(name, 0.0) + sum(part[name] for part in parts) / len(parts)
        counted += 1

        now = time.monotonic()
        if now - reported >= schedule.report_seconds or step == schedule.steps:
            means = {name: float(value) / counted for name, value in sums.items()}
            history.append(
                {"step": step, "seconds": round(before + now - start, 1), "rate": schedule.rate(step)} | means
            )
            print(folder.name, f"step {step}", *(f"{name} {value:.5f}" for name, value in means.items()), flush=True)
            if not all(torch.isfinite(torch.tensor(value)) for value in means.values()):
                raise FloatingPointError(f"A loss of {folder.name} is not finite at step {step}; lower the rate.")
            sums, counted, reported = {}, 0, now
        if now - saved >= schedule.save_seconds:
            _save(folder, trained, optimizer, average, step, history)
            saved = now

    _save(folder, trained, optimizer, average, step, history)
    if step >= schedule.steps:
        (folder / STATE_FILE).unlink()
    average.copy_to(trained.values())
    return history


def load_weights(module: torch.nn.Module, folder: Path) -> None:
    """Load a stage's averaged weights into the parameters of those names.

    Raises:
        FileNotFoundError: If the stage has not run.
        ValueError: If `module` lacks one of the parameters.
    """
    file = folder / WEIGHTS_FILE
    if not file.is_file():
        raise FileNotFoundError(f"{file} is missing: run the stage {folder.name!r} first.")
    weights = load_file(file)
    parameters = dict(module.named_parameters())
    unknown = sorted(weights.keys() - parameters.keys())
    if unknown:
        raise ValueError(f"{file} holds {len(unknown)} weights this model has not, for instance {unknown[0]}.")
    with torch.no_grad():
        for name, value in weights.items():
            parameters[name].copy_(value)


def _read_history(folder: Path) -> list[dict[str, float]]:
    file = folder / HISTORY_FILE
    return json.loads(file.read_text(encoding="utf-8")) if file.is_file() else []


def _restore(folder: Path, trained: dict, optimizer: torch.optim.Optimizer, average: EMAModel, device) -> int:
    """Load the last checkpoint, if there is one, and return its step."""
    if not (folder / STATE_FILE).is_file():
        return 0
    state = torch.load(folder / STATE_FILE, map_location=device, weights_only=True)
    with torch.no_grad():
        for name, parameter in trained.items():
            parameter.copy_(state["parameters"][name])
    optimizer.load_state_dict(state["optimizer"])
    average.load_state_dict(state["average"])
    return state["step"]


def _save(folder: Path, trained: dict, optimizer, average: EMAModel, step: int, history: list) -> None:
    """Write the checkpoint; a kill in between leaves the one before."""
    folder.mkdir(parents=True, exist_ok=True)
    state = {
        "step": step,
        "parameters": {name: parameter.detach() for name, parameter in trained.items()},
        "optimizer": optimizer.state_dict(),
        "average": average.state_dict(),
    }
    weights = {
        name: value.detach().cpu().contiguous() for name, value in zip(trained, average.shadow_params, strict=True)
    }
    for name, write in (
        (HISTORY_FILE, lambda path: path.write_text(json.dumps(history, indent=1) + "\n", encoding="utf-8")),
        # The state first: weights without a state mean a finished stage.
        (STATE_FILE, lambda path: torch.save(state, path)),
        (WEIGHTS_FILE, lambda path: save_file(weights, path)),
    ):
        scratch = folder / f"{name}.new"
        write(scratch)
        scratch.replace(folder / name)
