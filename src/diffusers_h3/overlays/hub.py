"""A folder of a Hub repository, read through `huggingface_hub`'s own client and cache."""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from errno import EDQUOT, ENOSPC
from pathlib import Path

from huggingface_hub import HfApi, constants, hf_hub_download, try_to_load_from_cache
from huggingface_hub.errors import (
    EntryNotFoundError,
    GatedRepoError,
    HfHubHTTPError,
    LocalEntryNotFoundError,
    RepositoryNotFoundError,
    RevisionNotFoundError,
    SafetensorsParsingError,
)
from huggingface_hub.file_download import repo_folder_name
from huggingface_hub.hf_api import RepoFile

from .errors import DiskSpaceError, IntegrityError, SourceError
from .files import read_json, write_json
from .manifest import COMMIT
from .tensor_file import TensorEntry, check_entries, read_header


try:
    from huggingface_hub import get_cached_repo_tree
    from huggingface_hub.errors import CachedRepoTreeNotFoundError
except ImportError:  # earlier clients remember no listings
    get_cached_repo_tree, CachedRepoTreeNotFoundError = None, LookupError

# The client's HTTP library changed its name between releases; its errors share this base, connection errors too.
_TransportError = HfHubHTTPError.__mro__[1]


@dataclass(frozen=True)
class HubAccess:
    """How the Hub is reached: the same for every part of an overlay.

    Args:
        cache_dir (`str`, *optional*): The Hub cache; `huggingface_hub`'s own by default.
        token (`str` or `bool`, *optional*): As for `hf_hub_download`.
        local_files_only (`bool`): Never open a connection. `HF_HUB_OFFLINE` does the same.
    """

    cache_dir: str | os.PathLike | None = None
    token: str | bool | None = None
    local_files_only: bool = False

    @property
    def offline(self) -> bool:
        return self.local_files_only or constants.HF_HUB_OFFLINE

    @property
    def cache(self) -> Path:
        return Path(self.cache_dir or constants.HF_HUB_CACHE).expanduser().absolute()

    def repository_cache(self, repo: str) -> Path:
        return self.cache / repo_folder_name(repo_id=repo, repo_type="model")

    def listing(self, repo: str, commit: str) -> Path:
        """Return where the list of a commit's files is remembered.

        A cache holds what was asked for, not all there is: without the list an adapter that was never downloaded
        could not be told from one that does not exist.
        """
        folder = default_cache_dir() if self.cache_dir is None else self.cache
        return folder / ".listings" / f"{repo.replace('/', '--')}@{commit}.json"


class HubFolder:
    """`subfolder` of `repo` at `commit`."""

    def __init__(self, repo: str, commit: str, subfolder: str, access: HubAccess):
        self.repo, self.commit, self.subfolder, self.access = repo, commit, subfolder, access
        self.location = f"{repo}@{commit[:12]}" + (f"/{subfolder}" if subfolder else "")
        self.storage = access.cache
        self._files: dict[str, int] | None = None

    def files(self) -> dict[str, int]:
        if self._files is None:
            start = f"{self.subfolder}/" if self.subfolder else ""
            listed = self._repository_files()
            self._files = {name.removeprefix(start): size for name, size in listed.items() if name.startswith(start)}
        return self._files

    def child(self, subfolder: str) -> "HubFolder":
        return HubFolder(self.repo, self.commit, self._path(subfolder), self.access)

    def header(self, name: str) -> dict[str, TensorEntry]:
        if self.present(name) or self.access.offline:
            return read_header(self.fetch(name))[0]
        with _readable_errors(f"{self.location}/{name}"):
            found = HfApi().parse_safetensors_file_metadata(
                self.repo, self._path(name), revision=self.commit, token=self.access.token
            )
        entries = {
            key: TensorEntry(info.dtype, tuple(info.shape), *info.data_offsets) for key, info in found.tensors.items()
        }
        try:
            check_entries(entries)
        except ValueError as error:
            raise IntegrityError(f"{self.location}/{name} is not a readable safetensors file: {error}.") from error
        return entries

    def present(self, name: str) -> bool:
        return self._cached(name) is not None

    def fetch(self, name: str) -> Path:
        with _readable_errors(f"{self.location}/{name}"):
            path = hf_hub_download(
                self.repo,
                self._path(name),
                revision=self.commit,
                cache_dir=self.access.cache,
                token=self.access.token,
                local_files_only=self.access.offline,
            )
        return Path(path)

    def published_digest(self, name: str) -> str | None:
        # The cache names a file's content by the digest the Hub listed for it, and links to it.
        cached = self._cached(name)
        if cached is None or not cached.is_symlink():
            return None
        blob = Path(os.readlink(cached)).name
        return blob if len(blob) in (40, 64) else None

    def _path(self, name: str) -> str:
        return f"{self.subfolder}/{name}" if self.subfolder and name else self.subfolder or name

    def _cached(self, name: str) -> Path | None:
        found = try_to_load_from_cache(self.repo, self._path(name), cache_dir=self.access.cache, revision=self.commit)
        return Path(found) if isinstance(found, str) else None

    def _repository_files(self) -> dict[str, int]:
        listing = self.access.listing(self.repo, self.commit)
        if listing.is_file():
            return read_json(listing)
        if self.access.offline:
            return self._files_listed_by_the_client()
        with _readable_errors(self.location):
            entries = HfApi().list_repo_tree(self.repo, recursive=True, revision=self.commit, token=self.access.token)
            files = {entry.path: entry.size for entry in entries if isinstance(entry, RepoFile)}
        listing.parent.mkdir(parents=True, exist_ok=True)
        write_json(listing, files)
        return files

    def _files_listed_by_the_client(self) -> dict[str, int]:
        """Return the listing that `hf download` and `snapshot_download` leave in the Hub cache."""
        try:
            if get_cached_repo_tree is None:
                raise CachedRepoTreeNotFoundError
            entries = get_cached_repo_tree(self.repo, revision=self.commit, cache_dir=self.access.cache)
        except CachedRepoTreeNotFoundError as error:
            raise SourceError(
                f"{self.location}: the list of its files is not in the cache {self.access.cache} and no connection "
                "is allowed (`local_files_only` or HF_HUB_OFFLINE). Load the overlay once with a connection."
            ) from error
        return {entry.path: entry.size for entry in entries}


def default_cache_dir() -> Path:
    """Return where overlays are materialised by default: `DIFFUSERS_H3_CACHE`, else beside the Hub's cache.

    Examples:
        >>> import os
        >>> from diffusers_h3.overlays import default_cache_dir
        >>> os.environ["DIFFUSERS_H3_CACHE"] = "/data/overlays"
        >>> default_cache_dir().as_posix()
        '/data/overlays'
    """
    chosen = os.environ.get("DIFFUSERS_H3_CACHE")
    return Path(chosen).expanduser().absolute() if chosen else Path(constants.HF_HUB_CACHE).parent / "diffusers-h3"


def resolve_commit(repo: str, revision: str, access: HubAccess) -> str:
    """Return the commit a branch or tag points to now; offline, what the cache recorded for it."""
    if COMMIT.fullmatch(revision):
        return revision
    if access.offline:
        recorded = access.repository_cache(repo) / "refs" / revision
        if not recorded.is_file():
            raise SourceError(
                f"The cache {access.cache} does not know what {revision!r} of {repo} points to and no connection is "
                "allowed; give the commit instead."
            )
        return recorded.read_text(encoding="utf-8").strip()
    with _readable_errors(f"{repo}@{revision}"):
        return HfApi().repo_info(repo, revision=revision, token=access.token).sha


@contextmanager
def _readable_errors(location: str) -> Iterator[None]:
    """Turn the client's errors into one or two lines that name `location` and the way out."""
    try:
        yield
    except GatedRepoError as error:
        raise SourceError(
            f"{location} is gated: accept its terms on the Hub and log in with `hf auth login`."
        ) from error
    except RepositoryNotFoundError as error:
        raise SourceError(
            f"{location}: there is no such repository, or it is private and the token does not open it."
        ) from error
    except RevisionNotFoundError as error:
        raise SourceError(f"{location}: the repository has no such revision.") from error
    except LocalEntryNotFoundError as error:
        cause = error.__cause__
        if cause is None:
            raise SourceError(
                f"{location} is not in the cache and no connection is allowed (`local_files_only` or HF_HUB_OFFLINE); "
                "run once with a connection, or point `cache_dir` to where it is."
            ) from error
        raise SourceError(f"{location} cannot be reached ({_first_line(cause)}); check the connection.") from error
    except EntryNotFoundError as error:
        raise SourceError(f"{location}: the repository has no such file or folder at this commit.") from error
    except SafetensorsParsingError as error:
        raise IntegrityError(f"{location} is not a readable safetensors file: {_first_line(error)}") from error
    except (_TransportError, OSError) as error:
        if isinstance(error, OSError) and error.errno in (ENOSPC, EDQUOT):
            raise DiskSpaceError(
                f"The disk of the Hub cache is full while downloading {location}; free space or pass `cache_dir`."
            ) from error
        raise SourceError(f"{location} cannot be downloaded: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[0]
