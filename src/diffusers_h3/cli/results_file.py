"""The manifest of a batch: `results.jsonl` in its folder, one record a clip, shared by all processes."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

from filelock import FileLock

from ..overlays.files import flush
from .console import UsageError


RESULTS_FILE = "results.jsonl"
STATUSES = ("started", "done", "failed")


class Results:
    """The records of a folder, by the name of the clip's file.

    Every change reads the file again under a lock and replaces it in one step, so that processes, also on other
    machines with the same folder, never overwrite each other's records and no reader sees half a file.

    Args:
        folder (`Path`): The folder of the clips; it exists before the first change.
        order (`Iterable[str]`): Files in the order their records are to have; those of other batches follow.
    """

    def __init__(self, folder: Path, order: Iterable[str] = ()):
        self.path = folder / RESULTS_FILE
        self._lock = FileLock(folder / ".results.lock")
        self._order = list(order)

    def read(self) -> dict[str, dict[str, Any]]:
        """Return the records by file.

        Raises:
            UsageError: If a line is not a record.
        """
        if not self.path.is_file():
            return {}
        records = {}
        for number, line in enumerate(self.path.read_text(encoding="utf-8").splitlines(), 1):
            try:
                record = json.loads(line)
                if record["status"] not in STATUSES:
                    raise ValueError(f"unknown status {record['status']!r}")
                records[record["file"]] = record
            except (KeyError, TypeError, ValueError) as error:
                raise UsageError(
                    f"{self.path} line {number} is not a record of a clip ({error}): correct it, or name another "
                    "--out."
                ) from error
        return records

    def update(self, records: Iterable[dict[str, Any]]) -> None:
        """Add records, or replace those of the same file."""
        with self._lock:
            known = self.read() | {record["file"]: record for record in records}
            files = [file for file in self._order if file in known]
            files += [file for file in known if file not in set(files)]
            # The lock makes one name enough, and the next change takes over what a killed process left.
            scratch = self.path.with_name(f".{RESULTS_FILE}.tmp")
            with scratch.open("w", encoding="utf-8") as handle:
                handle.writelines(json.dumps(known[file], ensure_ascii=False) + "\n" for file in files)
                flush(handle)
            scratch.replace(self.path)
