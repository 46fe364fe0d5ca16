"""`diffusers-h3 generate --prompts`: many clips into one folder, with resume, on one process or several."""

import os
import shutil
import time
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from . import weights
from .console import UsageError, messages
from .prompts_file import Clip, digest_of
from .results_file import RESULTS_FILE, Results


if TYPE_CHECKING:
    import torch
    from accelerate import PartialState

    from ..pipelines.pipeline_vdn_h3 import VDNH3Pipeline

_ENCODINGS = ".prompts"
_GENERATORS = ("transformer", "vae", "audio_vae")
_ENCODERS = ("text_encoder", "tokenizer", "processor")

# How long a process that is done waits for the slowest one, which may have many clips left.
_PATIENCE = timedelta(days=14)


def check_folder(folder: Path, clips: list[Clip], overwrite: bool) -> None:
    """Check that the clips can be written to `folder`, which need not exist, and replace nothing of the user's.

    Raises:
        UsageError: For a place not writable, and for files of the clips' names that no batch made.
    """
    existing = folder.absolute()
    while not existing.exists():
        existing = existing.parent
    if not existing.is_dir():
        raise UsageError(f"--out {folder} cannot be written: {existing} is not a folder.")
    if not os.access(existing, os.W_OK | os.X_OK):
        raise UsageError(f"--out {folder} cannot be written: {existing} is not writable.")
    known = Results(folder).read()
    foreign = [clip for clip in clips if (folder / clip.file).exists() and clip.file not in known]
    if foreign and not overwrite:
        raise UsageError(
            f"{folder / foreign[0].file}, the file of line {foreign[0].line}, exists already, and {RESULTS_FILE} does "
            "not list it: pass --overwrite to replace it, or name another --out."
        )


def join_processes(device: "torch.device") -> "PartialState":
    """Return this process's place among those that `accelerate launch` or `torchrun` started; alone, it is the first.

    They meet on the CPU: the GPUs' own library would take memory from the models, and time out on unequal work.
    """
    from accelerate import PartialState

    launched = int(os.environ.get("WORLD_SIZE", "1")) > 1
    options = {"backend": "gloo", "timeout": _PATIENCE} if launched else {}
    return PartialState(cpu=device.type == "cpu", **options)


@dataclass(frozen=True)
class Batch:
    """What all clips share.

    `source` is the pipeline's folder, `folder` where the clips go.
    """

    clips: list[Clip]
    folder: Path
    source: Path
    running: weights.Running
    force_steps: bool
    processes: "PartialState"

    def run(self) -> dict[str, Any]:
        """Make every clip that is not there yet, and return the outcome of all.

        A clip that fails is recorded and the next one begins. Every process takes each n-th line; all return when the
        last one is done.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        waiting = [clip for clip in self.clips if not self._is_done(clip)]
        self._encode_prompts(waiting)
        self.processes.wait_for_everyone()
        # A clip whose prompt could not be encoded has failed already, maybe in another process.
        mine = [clip for clip in self._share(self.clips) if not self._is_done(clip)]
        self._generate([clip for clip in mine if self._encoding(clip).is_file()])
        self.processes.wait_for_everyone()

        records = self._results.read()
        outcome = [records[clip.file] for clip in self.clips]
        failed = [record for record in outcome if record["status"] != "done"]
        if not failed and self.processes.is_main_process:
            shutil.rmtree(self.folder / _ENCODINGS, ignore_errors=True)
        return {
            "results": str(self._results.path.absolute()),
            "made": len(waiting) - len(failed),
            "skipped": len(self.clips) - len(waiting),
            "failed": len(failed),
            "clips": outcome,
        }

    @cached_property
    def _results(self) -> Results:
        return Results(self.folder, [clip.file for clip in self.clips])

    def _share(self, items: list) -> list:
        """Return the items of this process: every process must see the same list."""
        return items[self.processes.process_index :: self.processes.num_processes]

    def _is_done(self, clip: Clip) -> bool:
        """Return whether the clip was finished with the same settings and its file is what was written."""
        record = self._records.get(clip.file, {})
        file = self.folder / clip.file
        return (
            record.get("status") == "done"
            and record.get("digest") == self._digest(clip)
            and file.is_file()
            and file.stat().st_size == record.get("bytes")
        )

    @cached_property
    def _records(self) -> dict[str, dict[str, Any]]:
        """The records as the run begins."""
        return self._results.read()

    def _digest(self, clip: Clip) -> str:
        return digest_of({"prompt": clip.prompt, "seed": clip.seed, **self._settings(clip)})

    def _settings(self, clip: Clip) -> dict[str, Any]:
        settings = {**clip.settings, "weights": str(self.source.absolute()), "dtype": str(self.running.dtype)}
        # Only where it is so, and folders of before keep their digests.
        return settings | ({"linear_layers": "fp8"} if self.running.fp8 else {})

    def _encoding(self, clip: Clip) -> Path:
        """Return the file of the encoded prompt; clips of the same prompt and keyframes on one canvas share it."""
        settings = self._settings(clip)
        names = ["weights", "dtype", "image", "last_image"]
        if clip.image or clip.last_image:
            names += ["height", "width"]
        digest = digest_of({"prompt": clip.prompt, **{name: settings[name] for name in names}})
        return self.folder / _ENCODINGS / f"{digest}.safetensors"

    def _encode_prompts(self, clips: list[Clip]) -> None:
        """Encode this process's share of the prompts that are not encoded yet, and free the text encoder."""
        groups: dict[Path, list[Clip]] = {}
        for clip in clips:
            groups.setdefault(self._encoding(clip), []).append(clip)
        mine = [path for path in self._share(list(groups)) if not path.is_file()]
        if not mine:
            return
        (self.folder / _ENCODINGS).mkdir(exist_ok=True)
        pipeline = self._load(without=_GENERATORS)
        for path in mine:
            self._attempt(groups[path], _encode, pipeline, groups[path][0], path)
        _free(pipeline)

    def _generate(self, clips: list[Clip]) -> None:
        if not clips:
            return
        pipeline = self._load(without=_ENCODERS)
        for number, clip in enumerate(clips, 1):
            messages.print(f"[{number}/{len(clips)}] {clip.file}", markup=False)
            self._record([clip], "started")
            self._attempt([clip], self._make, pipeline, clip)
        _free(pipeline)

    def _make(self, pipeline: "VDNH3Pipeline", clip: Clip) -> None:
        """Generate one clip and put it into the folder in one step."""
        import torch
        from safetensors.torch import load_file

        started = time.monotonic()
        image, last_image = clip.keyframes()
        result = pipeline(
            **load_file(self._encoding(clip)),
            image=image,
            last_image=last_image,
            height=clip.height,
            width=clip.width,
            num_frames=clip.num_frames,
            num_inference_steps=clip.num_inference_steps,
            force_num_inference_steps=self.force_steps,
            generator=torch.Generator().manual_seed(clip.seed),
            output_type="np",
        )
        if result.nonfinite:
            raise ValueError(f"NaN or infinity in the generated {' and '.join(result.nonfinite)}.")
        # A folder only this clip uses, so that what a killed run left is found again.
        scratch = self.folder / f".partial-{clip.name}"
        shutil.rmtree(scratch, ignore_errors=True)
        scratch.mkdir()
        try:
            saved = result.save(scratch / clip.file)
            size = saved.stat().st_size
            saved.replace(self.folder / clip.file)
        finally:
            shutil.rmtree(scratch)
        self._record([clip], "done", bytes=size, seconds=round(time.monotonic() - started, 3))

    def _attempt(self, clips: list[Clip], work: Callable, *arguments) -> None:
        """Do `work` for `clips`; whatever fails is their record, and the end of them alone."""
        try:
            work(*arguments)
        except Exception as error:
            self._record(clips, "failed", error=f"{type(error).__name__}: {error}")
            for clip in clips:
                messages.print(f"{clip.file} failed: {type(error).__name__}: {error}", style="red", markup=False)

    def _record(self, clips: list[Clip], status: str, **fields) -> None:
        self._results.update(
            {
                "id": clip.id or clip.name,
                "line": clip.line,
                "prompt": clip.prompt,
                "seed": clip.seed,
                "settings": self._settings(clip),
                "digest": self._digest(clip),
                "file": clip.file,
                "status": status,
                "bytes": None,
                "seconds": None,
                "error": None,
                **fields,
            }
            for clip in clips
        )

    def _load(self, without: tuple[str, ...]) -> "VDNH3Pipeline":
        pipeline = weights.load_pipeline(self.source, self.running, without)
        # One progress bar on the screen at a time.
        pipeline.set_progress_bar_config(disable=not self.processes.is_main_process)
        return pipeline


def _encode(pipeline: "VDNH3Pipeline", clip: Clip, path: Path) -> None:
    """Encode a clip's prompt, with the keyframes the encoder sees, into a file that is complete or absent."""
    from safetensors.torch import save_file

    image, last_image = clip.keyframes()
    prompt_embeds, text_token_tags = pipeline.encode_prompt(clip.prompt, image, last_image, clip.height, clip.width)
    scratch = path.with_suffix(".tmp")
    tensors = {"prompt_embeds": prompt_embeds, "text_token_tags": text_token_tags}
    save_file({name: tensor.cpu().contiguous() for name, tensor in tensors.items()}, scratch)
    scratch.replace(path)


def _free(pipeline: "VDNH3Pipeline") -> None:
    """Give the models' memory back before the next ones are loaded; the pipeline is of no use then."""
    from accelerate.utils import release_memory

    pipeline.remove_all_hooks()
    for name in pipeline.components:
        setattr(pipeline, name, None)
    release_memory()
