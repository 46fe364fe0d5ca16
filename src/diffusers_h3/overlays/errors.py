"""What can go wrong with an overlay. Every message says what was found, what was expected and the way out."""


class OverlayError(ValueError):
    """An overlay cannot be loaded or materialised."""


class ManifestError(OverlayError):
    """A manifest, or the description files of a release, do not say what they must."""


class UnpinnedRevisionError(OverlayError):
    """A revision is a branch or a tag, which can move, instead of a commit."""


class SourceError(OverlayError):
    """A repository, a folder or a file is not where it should be, or cannot be reached."""


class IncompatibleWeightsError(OverlayError):
    """Base, adapters and linear branch do not belong together."""


class IntegrityError(OverlayError):
    """The content of a file is not what was published, or not usable."""


class DiskSpaceError(OverlayError):
    """The disk cannot hold what must be written."""


def some_of(names, limit: int = 3) -> str:
    """Join the first few of `names` for an error message and say how many more there are."""
    names = list(names)
    text = ", ".join(str(name) for name in names[:limit])
    return text if len(names) <= limit else f"{text} and {len(names) - limit} more"
