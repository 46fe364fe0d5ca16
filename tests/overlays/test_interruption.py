"""Killed anywhere, the overlay is absent or complete; two processes at once do the work once."""

import json
import os
import subprocess
import sys
import threading
import time

import pytest
from filelock import FileLock

from diffusers_h3.overlays import fuse, load_overlay, materialize, materialize_overlay, verify_folder


STAGE = "stage-dmd-step-250"
TRANSFORMER = ("transformer",)

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="forks the processes it kills")


# Everything is imported once; each attempt is a fork. Pauses stretch an attempt to about half a second, so that a kill
# falls between any two of its writes, links and renames.
_WORKER = """
import json, os, random, shutil, signal, sys, time
from pathlib import Path
from diffusers_h3.overlays import files, fuse, load_overlay, materialize, materialize_overlay, verify_folder

source, cache, log = (Path(argument) for argument in sys.argv[2:5])
overlay = load_overlay(source)

def slow(module, name, seconds):
    original = getattr(module, name)
    def wrapped(*arguments, **options):
        time.sleep(seconds)
        result = original(*arguments, **options)
        time.sleep(seconds)
        return result
    setattr(module, name, wrapped)

def start():
    child = os.fork()
    if child:
        return child
    slow(fuse, "write", 0.0005)
    for name in ("link_file", "write_json", "fuse_shard", "fetch_part"):
        slow(materialize, name, 0.003)
    original = materialize.fuse_shard
    def logged(source, *arguments):
        with log.open("a") as handle:
            handle.write(source.name + chr(10))
        return original(source, *arguments)
    materialize.fuse_shard = logged
    status = 1
    try:
        print(materialize_overlay(overlay, cache), flush=True)
        status = 0
    finally:
        os._exit(status)
"""

_KILLS = (
    _WORKER
    + """
def state():
    found = [path for path in cache.iterdir() if not path.name.startswith(".")] if cache.exists() else []
    if not found:
        finished = list(cache.glob(".*.partial/finished.json"))
        return "started" if finished else "absent"
    assert len(found) == 1, found
    checks = verify_folder(found[0])
    complete = len(checks) > 10 and all(check.status == "ok" for check in checks)
    return "complete" if complete else "broken"

begin = time.monotonic()
os.waitpid(start(), 0)
duration = time.monotonic() - begin
shutil.rmtree(cache)
generator = random.Random(0)
states = []
for attempt in range(20):
    child = start()
    time.sleep(generator.uniform(0.05, 1.0) * duration)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    states.append(state())
    if states[-1] == "complete":
        shutil.rmtree(cache)
_, status = os.waitpid(start(), 0)
print(json.dumps({"states": states, "last": state(), "status": status, "duration": duration}))
"""
)

_TWO = (
    _WORKER
    + """
children = [start(), start()]
print(json.dumps([os.waitpid(child, 0)[1] for child in children]))
"""
)


def _run(script, *arguments):
    command = [sys.executable, "-c", script, "worker", *map(str, arguments)]
    result = subprocess.run(command, capture_output=True, text=True, env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert result.returncode == 0, result.stderr[-2000:]
    return result.stdout.strip().splitlines()


def _digests(folder):
    return {check.path: check.sha256 for check in verify_folder(folder)}


@pytest.mark.slow
def test_killed_at_twenty_random_points(tiny_release, tmp_path):
    undisturbed = materialize_overlay(load_overlay(tiny_release / STAGE), tmp_path / "undisturbed")
    cache = tmp_path / "cache"
    report = json.loads(_run(_KILLS, tiny_release / STAGE, cache, tmp_path / "log")[-1])
    assert set(report["states"]) <= {"absent", "started", "complete"}
    assert len(report["states"]) == 20
    # The kills fell before, between and after the shards, not all in one place.
    assert report["states"].count("complete") < 15
    assert report["states"].count("started") >= 3
    assert (report["last"], report["status"]) == ("complete", 0)
    assert sorted(path.name for path in cache.iterdir()) == [".locks", undisturbed.name]
    assert _digests(cache / undisturbed.name) == _digests(undisturbed)


def test_two_processes_do_the_work_once(tiny_release, tmp_path):
    *folders, statuses = _run(_TWO, tiny_release / STAGE, tmp_path / "cache", tmp_path / "log")
    assert json.loads(statuses) == [0, 0]
    assert len(set(folders)) == 1
    assert {check.status for check in verify_folder(folders[0])} == {"ok"}
    merged = (tmp_path / "log").read_text().split()
    assert len(merged) == len(set(merged)) == 3


class _Stop(BaseException):
    """What a kill looks like to code that may not clean up."""


def _stop_after(monkeypatch, shards, error):
    """Let `shards` shards be merged, then raise `error`; returns the names of the shards that were begun."""
    begun, original = [], fuse.fuse_shard

    def limited(source, *arguments):
        begun.append(source.name)
        if len(begun) > shards:
            arguments[0].write_bytes(b"half a shard")
            raise error
        return original(source, *arguments)

    monkeypatch.setattr(materialize, "fuse_shard", limited)
    return begun


def _attempt(golden, cache):
    return materialize_overlay(load_overlay(golden), cache, TRANSFORMER)


def test_an_interrupt_keeps_finished_shards_only(golden, tmp_path, monkeypatch):
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        begun = _stop_after(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            _attempt(golden, cache)
    (scratch,) = cache.glob(".*.partial")
    kept = sorted(path.name for path in scratch.rglob("*") if path.is_file())
    assert kept == sorted([*begun[:2], "finished.json"])
    assert not [path for path in cache.iterdir() if not path.name.startswith(".")]

    resumed = _stop_after(monkeypatch, 99, _Stop())
    folder = _attempt(golden, cache)
    assert resumed == sorted(path.name for path in (folder / "transformer").glob("*-of-*"))[2:]
    assert {check.status for check in verify_folder(folder)} == {"ok"}
    assert sorted(path.name for path in cache.iterdir()) == [".locks", folder.name]


def test_an_interrupt_in_the_first_shard_leaves_nothing(golden, tmp_path, monkeypatch, leftovers):
    _stop_after(monkeypatch, 0, KeyboardInterrupt())
    with pytest.raises(KeyboardInterrupt):
        _attempt(golden, tmp_path / "cache")
    assert leftovers(tmp_path / "cache") == []


def _spoil_shard(scratch):
    path = next(scratch.rglob("*-00001-of-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"\0")


def _spoil_journal(scratch):
    (scratch / "finished.json").write_text("{")


@pytest.mark.parametrize(("spoil", "again"), [(_spoil_shard, 3), (_spoil_journal, 4)])
def test_what_cannot_be_trusted_is_made_again(golden, tmp_path, monkeypatch, spoil, again):
    expected = _digests(_attempt(golden, tmp_path / "undisturbed"))
    cache = tmp_path / "cache"
    with monkeypatch.context() as patch:
        _stop_after(patch, 2, KeyboardInterrupt())
        with pytest.raises(KeyboardInterrupt):
            _attempt(golden, cache)
    spoil(next(cache.glob(".*.partial")))
    resumed = _stop_after(monkeypatch, 99, _Stop())
    folder = _attempt(golden, cache)
    assert len(resumed) == again
    assert _digests(folder) == expected


def test_leftovers_of_other_versions_are_removed(golden, tmp_path):
    cache = tmp_path / "cache"
    stale, other = cache / f".{STAGE}-{'0' * 16}.partial", cache / f".another-{'0' * 16}.partial"
    for folder in (stale, other):
        folder.mkdir(parents=True)
        (folder / "half").touch()
    folder = _attempt(golden, cache)
    assert sorted(path.name for path in cache.iterdir()) == sorted([".locks", other.name, folder.name])


def test_leftovers_another_process_works_on_stay(golden, tmp_path):
    cache = tmp_path / "cache"
    stale = cache / f".{STAGE}-{'0' * 16}.partial"
    stale.mkdir(parents=True)
    (cache / ".locks").mkdir()
    with FileLock(cache / ".locks" / f"{STAGE}-{'0' * 16}.lock"):
        _attempt(golden, cache)
        assert stale.is_dir()


def test_waiting_for_another_process_is_said(golden, tmp_path, caplog):
    cache = tmp_path / "cache"
    folder = _attempt(golden, cache)
    (folder / "model_index.json").unlink()
    held = threading.Event()

    def hold():
        with FileLock(cache / ".locks" / f"{folder.name}.lock"):
            held.set()
            time.sleep(0.3)

    threading.Thread(target=hold).start()
    held.wait()
    assert _attempt(golden, cache) == folder
    assert "Another process is materialising" in caplog.text
