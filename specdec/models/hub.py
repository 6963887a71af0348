"""Models on the Hugging Face hub: which files of a repository make a model. These are fetched, and no others."""

from __future__ import annotations

import glob
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from huggingface_hub import HfApi, constants, hf_hub_download, snapshot_download
from huggingface_hub.errors import GatedRepoError, HFValidationError, RepositoryNotFoundError, RevisionNotFoundError

from specdec.errors import CheckpointError, SpecdecError, shown, told
from specdec.models.gguf_parts import models_among, parts_named, stem_of
from specdec.settings.files import read_object

__all__ = ["HubModel"]

_NAME = re.compile(
    r"(?:(?:https?://)?(?:hf\.co|huggingface\.co)/)?"
    r"(?P<repo>(?![.~])[\w.-]{1,96}(?:/[\w.-]{1,96})?)(?::(?P<tag>[^:]{1,256}))?"
)
_SETTINGS = re.compile(  # of a model and its tokenizer
    r"(?!.*\.bin\.index\.json)[^/]+\.(?:json|jinja|model|tiktoken)|(?:vocab|merges)\.txt|additional_chat_templates/[^/]+"
)
_INDEX, _WHOLE = "model.safetensors.index.json", "model.safetensors"
_PICKLES = (".bin", ".pt", ".pth", ".ckpt")
_LISTED = 12


@dataclass(frozen=True, kw_only=True)
class HubModel:
    """A model in a repository.

    Attributes:
        name: as it was written.
        repo: the repository.
        tag: which of its GGUF files is meant: the name of a quantisation, such as Q4_K_M, or of a file; or None.
        revision: a branch, a tag or a commit; None is the main branch.
        subfolder: of the repository, in which the model lies; empty for the repository itself.
    """

    name: str
    repo: str
    tag: str | None = None
    revision: str | None = None
    subfolder: str = ""

    @classmethod
    def named(cls, name: str, revision: str | None = None, subfolder: str | None = None) -> HubModel | None:
        """The model that a name such as ``me/repo`` or ``me/repo:Q4_K_M`` stands for; None for another kind of name."""
        found = _NAME.fullmatch(name)
        if found is None or (found["tag"] is not None and "/" not in found["repo"]):
            return None
        top = (subfolder or "").strip("/")
        return cls(name=name, repo=found["repo"], tag=found["tag"], revision=revision, subfolder=top)

    def fetched(self, *, weights: bool = True, code: bool = False, local_files_only: bool = False) -> Path:
        """The folder of the model's files, or its GGUF file, in the hub's cache; what is not there is fetched.

        Args:
            weights: whether they are wanted, or settings and tokenizer alone.
            code: whether the repository's Python files are wanted, too.
            local_files_only: whether nothing may be fetched.

        Raises:
            CheckpointError: no such model there, or none that can be fetched.
        """
        failed: Exception | None = None
        if not local_files_only and not constants.HF_HUB_OFFLINE:
            try:
                files = HfApi().model_info(self.repo, revision=self.revision).siblings or []
                place, names = self._chosen([file.rfilename for file in files], self._download, weights, code)
                wanted = [glob.escape(name) for name in names]
                return Path(snapshot_download(self.repo, revision=self.revision, allow_patterns=wanted), place)
            except SpecdecError:
                raise
            except Exception as error:  # the hub's client raises errors of several libraries
                failed = error
        return self._cached(failed, weights, code)

    def _download(self, name: str) -> Path:
        return Path(hf_hub_download(self.repo, name, revision=self.revision))

    def _cached(self, failed: Exception | None, weights: bool, code: bool) -> Path:
        """The same out of the cache alone, as the hub could not be asked."""
        why = self._cause(failed)
        try:
            folder = Path(
                snapshot_download(self.repo, revision=self.revision, local_files_only=True, ignore_patterns="*")
            )
        except Exception as error:  # as above
            raise self._refused(f"there is no such folder, and {why}") from (failed or error)
        there = [path.relative_to(folder).as_posix() for path in folder.rglob("*") if path.is_file()]
        try:
            place, _ = self._chosen(there, folder.joinpath, weights, code)
        except CheckpointError as error:
            raise CheckpointError(f"{error}. Only the hub's cache was looked at, as {why}") from failed
        return folder / place

    def _chosen(
        self, names: Collection[str], path_of: Callable[[str], Path], weights: bool, code: bool
    ) -> tuple[str, list[str]]:
        """The folder or file that is loaded, as a path in the repository, and the files that it needs.

        Raises:
            CheckpointError: none, or several.
        """
        top = f"{self.subfolder}/" if self.subfolder else ""
        below = [name.removeprefix(top) for name in names if name.startswith(top)]
        if not below:
            raise self._refused(f"it has no folder {self.subfolder!r}; it has {_listed(_folders(names))}")
        models = models_among(below)
        dense = [name for name in below if "/" not in name and name.endswith(".safetensors")]
        if self.tag is not None or (models and not dense and (weights or "tokenizer.json" not in below)):
            first, parts = self._gguf(models)
            return top + first, [top + part for part in parts]
        wanted = [name for name in below if _SETTINGS.fullmatch(name) or (code and name.endswith(".py"))]
        if weights:
            if "config.json" not in below or not dense:
                raise self._refused(_lacking(below, names))
            wanted += self._weights(below, dense, lambda: path_of(f"{top}{_INDEX}"))
        return top, [top + name for name in wanted]

    def _weights(self, below: Collection[str], dense: list[str], index: Callable[[], Path]) -> list[str]:
        """The files of weights: those that an index names, or the one file; all where there is neither."""
        found = {name for name in dense if name == _WHOLE or name.startswith("mtp")}
        if _INDEX in below:
            places = read_object(index()).get("weight_map")
            named = set(map(str, places.values())) if isinstance(places, dict) else set[str]()
            if not named or (lost := sorted(named - {*below})):
                what = "names no files" if not named else f"names {lost[0]!r}, which is not there"
                raise self._refused(f"its {_INDEX} {what}; it was not uploaded or fetched whole")
            found |= named
        return sorted(found if _INDEX in below or _WHOLE in found else dense)

    def _gguf(self, models: dict[str, list[str]]) -> tuple[str, list[str]]:
        """The one model in GGUF that is meant: the name of its first part, and all its parts."""
        meant = {first: parts for first, parts in models.items() if self.tag is None or _means(self.tag, first, parts)}
        exact = [first for first in meant if self.tag in (first, PurePosixPath(first).name)]
        if not meant:
            raise self._refused(f"none of its GGUF files is {self.tag!r}; it has {_listed(models)}")
        if len(exact or meant) > 1:
            which = "it has" if self.tag is None else f"{self.tag!r} can be"
            example = f"{self.repo}:{next(iter(meant))}"
            raise self._refused(f"{which} {len(meant)} models in GGUF, {_listed(meant)}: give one, such as {example!r}")
        first = (exact or [*meant])[0]
        if lost := [part for part in parts_named(first) if part not in meant[first]]:
            raise self._refused(f"{len(lost)} of the parts of {first!r} are not there, such as {lost[0]!r}")
        return first, meant[first]

    def _cause(self, failed: Exception | None) -> str:
        """Why the hub gave nothing, and the remedy."""
        page = f"{constants.ENDPOINT}/{self.repo}"
        if failed is None:
            return (
                "the hub's cache does not hold it and is all that may be used (HF_HUB_OFFLINE): unset that, and "
                "run this once where there is a network"
            )
        if isinstance(failed, GatedRepoError):
            return f"{page} is gated: accept its terms there, and log in with `hf auth login` or by HF_TOKEN"
        if isinstance(failed, RepositoryNotFoundError):
            return (
                f"there is no {page} that you may read: see that its name is right; if it is private, log in with "
                "`hf auth login` or by HF_TOKEN"
            )
        if isinstance(failed, RevisionNotFoundError):
            return f"{page} has no revision {shown(self.revision)}: give one of its branches, tags or commits"
        if isinstance(failed, HFValidationError):
            return f"that is no name on the hub: {told(failed)}"
        return f"{page} cannot be fetched: {told(failed)}: see that the network reaches it and that the disk has room"

    def _refused(self, why: str) -> CheckpointError:
        return CheckpointError(f"cannot load a model from {shown(self.name, 400)}: {why}")


def _means(tag: str, first: str, parts: list[str]) -> bool:
    """Whether a tag is the name of a file, or of a quantisation that stands in it as a word of its own."""
    if tag in parts or tag in (PurePosixPath(part).name for part in parts):
        return True
    return re.search(rf"(?:^|[-._/]){re.escape(tag)}(?:[-./]|$)", stem_of(first), re.IGNORECASE) is not None


def _listed(names: Collection[str]) -> str:
    more = f" and {len(names) - _LISTED} more" if len(names) > _LISTED else ""
    return f"{', '.join(sorted(names)[:_LISTED]) or 'none'}{more}"


def _folders(names: Collection[str]) -> set[str]:
    return {str(PurePosixPath(name).parent) for name in names if "/" in name}


def _lacking(below: Collection[str], names: Collection[str]) -> str:
    """What a repository without a model lacks, and what to do."""
    what = "no config.json" if "config.json" not in below else "no *.safetensors"
    if "adapter_config.json" in below:
        return (
            f"it is an adapter and has {what}; load base and adapter with peft and hand the model to TransformersTarget"
        )
    if elsewhere := sorted(_folders([name for name in names if name.endswith(".safetensors")])):
        return f"it has {what} there; its folders {_listed(elsewhere)} have weights: give one as subfolder"
    if pickles := [name for name in below if name.endswith(_PICKLES)]:
        return (
            f"it has {what}, and {pickles[0]!r} is a pickle, which is never loaded: give a repository or a revision "
            "with safetensors or GGUF"
        )
    return f"it has {what}; give the repository of a language model, in safetensors or GGUF"
