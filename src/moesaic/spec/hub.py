"""Models in the local Hugging Face cache, found offline: a repository name becomes a snapshot's folder.

models--ORG--NAME/refs/main             the commit that "main" was at the last download
models--ORG--NAME/snapshots/COMMIT/...  the files, as links into
models--ORG--NAME/blobs/...             their content; what ends in .incomplete is a download cut short
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from moesaic.errors import ConfigError, nearest

_NAME = re.compile(r"([A-Za-z0-9][\w.-]*/[A-Za-z0-9][\w.-]*?)(?:@([\w./-]+))?")
MAX_NAME = 160  # a repository has at most 96 characters (huggingface_hub's rule), a revision adds some
_COMMIT = re.compile(r"[0-9a-f]{7,40}")


@dataclass(frozen=True, kw_only=True, slots=True)
class RepoName:
    """ORG/NAME, or ORG/NAME@REVISION."""

    repo: str
    revision: str  # a branch, a tag, or a commit of at least 7 digits

    @property
    def fetch(self) -> str:
        """The command that downloads it."""
        revision = "" if self.revision == "main" else f" --revision {self.revision}"
        return f"hf download {self.repo}{revision}"


def hub_cache(environ: Mapping[str, str]) -> Path:
    """The cache folder that Hugging Face's own tools use under these environment variables."""
    for name in ("HF_HUB_CACHE", "HUGGINGFACE_HUB_CACHE"):
        if environ.get(name):
            return Path(environ[name]).expanduser()
    if environ.get("HF_HOME"):
        return Path(environ["HF_HOME"]).expanduser() / "hub"
    root = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(root).expanduser() / "huggingface" / "hub"


def parse_repo(name: str) -> RepoName | None:
    """The parts of a repository name; None for what cannot be one."""
    match = _NAME.fullmatch(name)
    if match is None or ".." in name or len(name) > MAX_NAME:
        return None
    return RepoName(repo=match[1], revision=match[2] or "main")


def find_snapshot(name: RepoName, cache: Path) -> Path | None:
    """The folder of a cached revision; None when the cache has nothing of the repository.

    Raises: ConfigError when it has the repository but not that revision, or only a part of its files.
    """
    folder = cache / ("models--" + name.repo.replace("/", "--"))
    if not folder.is_dir():
        return None
    snapshot = _snapshot(folder, name)
    if snapshot is None:
        if name.revision == "main" and not _listed(folder / "snapshots"):
            raise ConfigError(
                f"{name.repo} in {cache} has no files ({_cut_short(folder)}): run `{name.fetch}` again"
            )
        known = [*_listed(folder / "refs"), *_listed(folder / "snapshots")]
        raise ConfigError(
            f"the cache {cache} has {name.repo}, but no revision {name.revision!r} of it "
            f"({nearest(name.revision, known)}): run `{name.fetch}`"
        )
    for path in sorted(snapshot.rglob("*")):
        if path.is_symlink() and not path.exists():
            raise ConfigError(
                f"{name.repo} in {cache} is incomplete: {path.relative_to(snapshot)} of snapshot "
                f"{snapshot.name[:12]} is a link to {path.readlink().name}, which is not there "
                f"({_cut_short(folder)}): run `{name.fetch}` again"
            )
    if not (snapshot / "config.json").is_file():
        raise ConfigError(
            f"{name.repo} in {cache} is incomplete: snapshot {snapshot.name[:12]} has no config.json "
            f"({_cut_short(folder)}): run `{name.fetch}` again"
        )
    return snapshot


def explain_absent(name: RepoName, cache: Path) -> str:
    """Where was looked, what is called alike there, and how to fetch it."""
    if not cache.is_dir():
        return (
            f"{name.repo} is no folder here and not in the Hugging Face cache: {cache} does not exist; "
            f"fetch it with `{name.fetch}`"
        )
    known = [entry[8:].replace("--", "/") for entry in _listed(cache) if entry.startswith("models--")]
    alike = f"which is empty of models; fetch it with `{name.fetch}`"
    if known:
        alike = f"{nearest(name.repo, known)}; fetch it with `{name.fetch}`"
    return f"{name.repo} is no folder here and not in the Hugging Face cache {cache} ({alike})"


def explain_incomplete(snapshot: Path, missing: tuple[str, ...], name: RepoName) -> str:
    """The message for a snapshot that lacks weight files."""
    return (
        f"{name.repo} in the Hugging Face cache is incomplete: snapshot {snapshot.name[:12]} lacks "
        f"{', '.join(missing[:3])}{f' and {len(missing) - 3} more' if len(missing) > 3 else ''} "
        f"({_cut_short(snapshot.parents[1])}): run `{name.fetch}` again"
    )


def _snapshot(folder: Path, name: RepoName) -> Path | None:
    ref = folder / "refs" / name.revision
    commit = ref.read_text(errors="replace").strip() if ref.is_file() else name.revision
    exact = folder / "snapshots" / commit
    if exact.is_dir():
        return exact
    if _COMMIT.fullmatch(commit):
        found = [one for one in _listed(folder / "snapshots") if one.startswith(commit)]
        if len(found) == 1:
            return folder / "snapshots" / found[0]
    return None


def _cut_short(folder: Path) -> str:
    count = sum(entry.endswith(".incomplete") for entry in _listed(folder / "blobs"))
    if not count:
        return "no download is under way"
    return f"{count} downloads in blobs/ were cut short or are under way"


def _listed(folder: Path) -> list[str]:
    return sorted(entry.name for entry in folder.iterdir()) if folder.is_dir() else []
