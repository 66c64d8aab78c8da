"""Runs and pretrained encoders on the Hugging Face Hub, by the library huggingface_hub.

A run, hf:USER/NAME[@REVISION], or an encoder is downloaded once, as plain files, into
huggingface_hub's folder for other libraries:

    HF_HOME/assets/layernorm-asr/USER--NAME/runs/        or encoders/
        COMMIT/         a run folder
        REVISION.ref    the commit of a branch, a tag or a commit, whose folder is complete

Not into that library's cache: its files are symbolic links, which a run folder must not have.
Where the hub cannot be reached, the last copy is used.
"""

import os
import re
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import ModuleType
from typing import Any
from urllib.parse import quote

from asr.errors import UserError, missing_package
from asr.io import atomic_write, read_small_file
from asr.shipped import find_run

PREFIX = "hf:"
LIBRARY = "layernorm-asr"
NAME = re.compile(r"\w[\w.-]{0,95}/\w[\w.-]{0,95}", re.ASCII)
REVISION = re.compile(r"\w[\w./+-]{0,199}", re.ASCII)
COMMIT = re.compile("[0-9a-f]{40}")
TIMEOUT = 10.0  # seconds without an answer after which the hub counts as unreachable
# The files that transcription needs. No others are downloaded: pickles, for example.
ENCODER = re.compile(
    r"(config|preprocessor_config)\.json|README\.md"
    r"|model(-[0-9]{5}-of-[0-9]{5})?\.safetensors(\.index\.json)?"
)
NEEDED = re.compile(
    r"recipe\.yaml|tokenizer\.(json|model)|features\.safetensors|encoder\.json"
    rf"|encoder/({ENCODER.pattern})|checkpoints/[0-9]{{8,15}}/(sha256\.json|model\.safetensors)"
)
# All that a run may consist of: a push deletes what the new run lacks.
RUN_PATTERNS = [
    "recipe.yaml", "tokenizer.*", "features.safetensors", "encoder.json", "encoder/*",
    "checkpoints/*",
]  # fmt: skip


def is_on_hub(run: str | os.PathLike[str]) -> bool:
    """Whether the run is named as hf:USER/NAME."""
    return os.fspath(run).startswith(PREFIX)


def local_run(run: str | os.PathLike[str]) -> Path:
    """The folder of a run: the path itself, a shipped run, or a copy of hf:USER/NAME[@REVISION].

    Raises UserError without the extra `hub`, for a repository that is missing, restricted, larger
    than the free disk or no run, and where it cannot be downloaded and there is no copy.
    """
    if not is_on_hub(run):
        return find_run(Path(run))
    address = os.fspath(run)
    name = address.removeprefix(PREFIX)
    if not is_name(name):
        raise UserError(f"{address}: write hf:USER/NAME or hf:USER/NAME@REVISION")
    return _copy(address, name, "runs", NEEDED, ("recipe.yaml", "tokenizer.json"))


def is_name(text: str) -> bool:
    """Whether this is USER/NAME or USER/NAME@REVISION of a repository."""
    repo, at, revision = text.partition("@")
    return bool(NAME.fullmatch(repo) and (not at or REVISION.fullmatch(revision)))


def download_encoder(name: str) -> tuple[Path, str]:
    """NAME[@REVISION] of a pretrained encoder -> its folder, and NAME@COMMIT.

    Raises UserError as local_run does.
    """
    required = "config.json", "model.safetensors or model.safetensors.index.json"
    folder = _copy(f"features.encoder = {name}", name, "encoders", ENCODER, required)
    return folder, f"{name.partition('@')[0]}@{folder.name}"


def _copy(
    address: str, name: str, kind: str, wanted: re.Pattern[str], required: Sequence[str]
) -> Path:
    """The folder of a copy of the wanted files, which is made or brought up to date."""
    hub = import_hub(address)
    repo, _, revision = name.partition("@")
    revision = revision or "main"
    assets = hub.constants.HF_ASSETS_CACHE
    folder = hub.cached_assets_path(LIBRARY, repo, kind, assets_dir=assets)
    last = _complete(folder, revision)
    if last == revision:  # a commit, which never changes
        return folder / last
    with _explained(hub, address, revision):
        api = hub.HfApi(library_name=LIBRARY)
        try:
            info = api.model_info(repo, revision=revision, files_metadata=True, timeout=TIMEOUT)
        except _failures(hub) as error:
            if not (last and _is_unreachable(hub, error)):
                raise
            line = f"{address}: the hub cannot be reached; using the copy of {last[:8]}"
            print(line, file=sys.stderr)
            return folder / last
        if not COMMIT.fullmatch(info.sha or ""):
            raise UserError(f"{address}: the hub names no commit")
        if not _complete(folder, info.sha):
            sizes = _sizes(address, info.siblings or [], wanted, required)
            _download(api, repo, address, folder / info.sha, sizes)
        for seen in (info.sha, revision):
            atomic_write(_reference(folder, seen), info.sha)
    return folder / info.sha


def _sizes(
    address: str, files: Sequence[Any], wanted: re.Pattern[str], required: Sequence[str]
) -> dict[str, int]:
    """Names and sizes of the wanted files. UserError where a required one is not among them."""
    sizes = {f.rfilename: f.size or 0 for f in files if wanted.fullmatch(f.rfilename)}
    missing = [names for names in required if not set(names.split(" or ")) & set(sizes)]
    if not missing:
        return sizes
    if wanted is NEEDED:
        raise UserError(f"{address}: no {' and '.join(required)} in it, so it is no run")
    pickled = any(f.rfilename.startswith("pytorch_model") for f in files)
    reason = "; its weights are a pickle, which is not read: name a revision with safetensors, or"
    reason += " convert it with transformers' save_pretrained and name that folder"
    raise UserError(f"{address}: no {missing[0]} in it{reason * pickled}")


def _reference(folder: Path, revision: str) -> Path:
    return folder / f"{quote(revision, safe='')}.ref"


def _complete(folder: Path, revision: str) -> str | None:
    """The commit that a revision had when it was last seen, if its copy is complete."""
    reference = _reference(folder, revision)
    commit = read_small_file(reference, 100) if reference.is_file() else ""
    return commit if COMMIT.fullmatch(commit) and (folder / commit).is_dir() else None


def _download(api: Any, repo: str, address: str, copy: Path, sizes: Mapping[str, int]) -> None:
    """Download the files; continues an interrupted download.

    UserError where they are larger than the free disk.
    """
    megabytes, free = sum(sizes.values()) / 1e6, shutil.disk_usage(copy.parent).free / 1e6
    if megabytes > free:
        raise UserError(f"{address}: {megabytes:.0f} MB, but {copy.parent} has room for {free:.0f}")
    print(f"{address}: downloading {megabytes:.1f} MB to {copy}", file=sys.stderr, flush=True)
    api.snapshot_download(repo, revision=copy.name, local_dir=copy, allow_patterns=list(sizes))


def push_run(folder: Path, repo: str, private: bool) -> str:
    """Upload a run folder as one commit; -> the address of its page.

    Creates the repository, or replaces the run that it holds. Raises UserError where this is not
    allowed, for a repository of something else, and for a public one if `private`.
    """
    hub = import_hub(f"--push-to {repo}")
    with _explained(hub, f"--push-to {repo}", "main"):
        api = hub.HfApi(library_name=LIBRARY)
        url = api.create_repo(repo, private=private or None, exist_ok=True)
        info = api.model_info(repo)
        present = {file.rfilename for file in info.siblings or []}
        if private and not info.private:
            raise UserError(f"--push-to {repo}: is public; omit --private or name another")
        if "recipe.yaml" not in present and present - {".gitattributes", "README.md"}:
            raise UserError(f"--push-to {repo}: holds something else than a run; name another")
        message = f"Upload a run of {LIBRARY}"
        api.upload_folder(
            repo_id=repo,
            folder_path=folder,
            delete_patterns=RUN_PATTERNS,
            commit_message=message,
        )
    return str(url)


def check_repo(repo: str) -> None:
    """Raise UserError for what is no name of a repository, or without the extra `hub`."""
    import_hub(f"--push-to {repo}")
    if not NAME.fullmatch(repo):
        raise UserError(f"--push-to {repo}: write USER/NAME")


def import_hub(repository: str) -> ModuleType:
    """The library huggingface_hub. Raises UserError, naming `repository`, if it is missing."""
    try:
        import huggingface_hub
        import huggingface_hub.constants
        import huggingface_hub.errors
        import huggingface_hub.utils
    except ImportError:
        raise UserError(f"{repository}: {missing_package('huggingface_hub', 'hub')}") from None
    return huggingface_hub


def _failures(hub: ModuleType) -> tuple[type[Exception], ...]:
    # Of the connection, the disk, arguments, an upload.
    return hub.errors.HTTPError, OSError, ValueError, RuntimeError


@contextmanager
def _explained(hub: ModuleType, repository: str, revision: str) -> Iterator[None]:
    """Raise UserError for the library's errors. Its progress bars, which need a terminal, are off.

    Raises the error of a full disk as it is.
    """
    quiet = hub.utils.are_progress_bars_disabled()
    hub.utils.disable_progress_bars()
    try:
        yield
    except _failures(hub) as error:
        if isinstance(error, RuntimeError):  # in which the library wraps that of an upload
            error = error.__cause__ or error
        if isinstance(error, OSError) and error.errno and error.filename:
            raise
        raise UserError(f"{repository}: {_reason(hub, error, repository, revision)}") from None
    finally:
        if not quiet:
            hub.utils.enable_progress_bars()


def _reason(hub: ModuleType, error: Exception, repository: str, revision: str) -> str:
    """What a user can do about an error of the library."""
    login = "log in with `hf auth login` or set HF_TOKEN"
    if isinstance(error, hub.errors.GatedRepoError):
        return f"access is restricted; ask for it on the repository's page, then {login}"
    if isinstance(error, hub.errors.RepositoryNotFoundError):
        return f"there is no such repository, or it is private; check the name, or {login}"
    if isinstance(error, hub.errors.RevisionNotFoundError):
        return f"has no revision {revision}"
    if isinstance(error, hub.errors.LocalTokenNotFoundError):
        return f"needs a login; {login}"
    cause = " ".join(str(error).split())[:200] or type(error).__name__
    if _is_unreachable(hub, error):
        missing = ", and there is no copy on this machine" * repository.startswith(PREFIX)
        return f"the hub cannot be reached ({cause}){missing}"
    status = getattr(getattr(error, "response", None), "status_code", None)
    if status in (401, 403):
        return f"not allowed ({status}); {login}, with a token that may do this"
    return f"the hub refuses ({cause})" if status else cause


def _is_unreachable(hub: ModuleType, error: Exception) -> bool:
    """Whether there was no answer, or none that a working server would give."""
    if isinstance(error, hub.errors.HfHubHTTPError):
        return error.response.status_code >= 500
    offline = hub.errors.OfflineModeIsEnabled, hub.errors.LocalEntryNotFoundError
    return isinstance(error, (hub.errors.HTTPError, *offline))
