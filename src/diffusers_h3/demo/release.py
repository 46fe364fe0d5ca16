"""The embedded release: a trained VDN-H3 of a few megabytes, in the layout OpenVDN publishes."""

from pathlib import Path

from ..overlays.errors import IntegrityError, some_of
from ..overlays.files import read_json, sha256_of


STAGE = "stage-dmd-step-250"
DIGESTS_FILE = "digests.json"

_RELEASE = Path(__file__).parent / "weights"
_WAY_OUT = "Install diffusers-h3 again."


def embedded_release() -> Path:
    """Return the folder of the embedded release, after comparing every file with its SHA-256.

    Its base `h3-base` holds every component, `stage-dmd-step-250` the overlay of eight transformer calls and
    `stage-b-step-2000` the one of many. `training/` makes it.

    Raises:
        IntegrityError: If a file is missing or damaged.
    """
    if not (_RELEASE / DIGESTS_FILE).is_file():
        raise IntegrityError(f"The demo's model is missing: there is no {_RELEASE / DIGESTS_FILE}. {_WAY_OUT}")
    digests = read_json(_RELEASE / DIGESTS_FILE)
    missing = [name for name in digests if not (_RELEASE / name).is_file()]
    damaged = [name for name in digests if name not in missing and sha256_of(_RELEASE / name) != digests[name]]
    for names, state in ((missing, "missing"), (damaged, "changed")):
        if names:
            raise IntegrityError(f"The demo's model in {_RELEASE} is broken: {some_of(names)} {state}. {_WAY_OUT}")
    return _RELEASE
