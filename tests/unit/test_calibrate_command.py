"""`kvrt calibrate --codec FORMAT` on the command line: what it writes and says, and refuses."""

import json
import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from kvrt.calibrate import calibrate
from kvrt.calibration import Calibration
from kvrt.cli.main import run
from tests.helpers import codebook_trainer
from tests.helpers.codebook_trainer import Call
from tests.helpers.tiny_model import write_tiny_model

TEXT = "Call me Ishmael. Some years ago, never mind how long precisely. " * 8
PLAIN = "k=rvq2x256,v=rvq1x256"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, rope_theta=500.0)  # 2 layers, 2 KV heads of 16
    return folder


@pytest.fixture(autouse=True)
def calls(monkeypatch: pytest.MonkeyPatch) -> list[Call]:
    return codebook_trainer.install(monkeypatch)


@pytest.fixture
def text(tmp_path: Path) -> str:
    path = tmp_path / "text.txt"
    path.write_text(TEXT, encoding="utf-8")
    return str(path)


SMALL = ("--tokens", "256", "--context", "128", "-t", "1")


def command(folder: Path, text: str, path: Path, *more: str) -> Sequence[str]:
    return ["calibrate", str(folder), "--text", text, "-o", str(path), *SMALL, *more]


def test_a_good_run_writes_the_file(
    folder: Path, text: str, tmp_path: Path, capsys: Any, calls: list[Call]
) -> None:
    path = tmp_path / "out.safetensors"
    assert run([*command(folder, text, path, "--codec", PLAIN, "--seed", "7", "--json")]) == 0
    out, err = capsys.readouterr()
    made = Calibration.open(path)
    told = json.loads(out)
    books = told.pop("codebooks")
    assert told == {
        "path": str(path),
        "tokens": 256,
        "fingerprint": made.fingerprint,
        "bytes": path.stat().st_size,
    }
    assert [book["name"] for book in books] == ["k.rvq256.post", "v.rvq256"]
    assert [len(book["errors"]) for book in books] == [len(book["used"]) for book in books]
    assert f"kvrt: k.rvq256.post: error {books[0]['errors'][0]:.4f} after 1" in err
    assert "% of the entries used" in err
    assert {call.seed for call in calls} == {7}


def test_half_is_made_up_unless_prose_is_asked_for(
    folder: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[Sequence[int]] = []

    def record(*arguments: Any, lookup: Sequence[int], **more: Any) -> Calibration:
        given.append(lookup)
        return calibrate(*arguments, lookup=lookup, **more)

    monkeypatch.setattr("kvrt.calibrate.calibrate", record)
    made = []
    for more in ((), (), ("--seed", "1"), ("--prose",)):
        path = tmp_path / "out.safetensors"
        assert run([*command(folder, text, path, "--codec", PLAIN, *more)]) == 0
        made.append(Calibration.open(path).fingerprint)
    assert made[0] == made[1] and len(set(made)) == 3
    assert given[0] == given[1] != given[2] and given[3] == []
    assert len(given[0]) >= 2 * 256  # a token of this model is a byte
    for number, more in enumerate(((), ("--codec", "kvquant2"))):
        nuq = ["calibrate", str(folder), "--text", text, "-o", str(tmp_path / "nuq"), *SMALL, *more]
        assert run(nuq) == 0 and given[4 + number] == []


def test_one_window_is_of_the_text_and_that_is_said(
    folder: Path, text: str, tmp_path: Path, capsys: Any
) -> None:
    made = []
    for more in ((), ("--prose",)):
        path = tmp_path / "out.safetensors"
        asked = command(folder, text, path, "--codec", PLAIN, "--context", "256", *more)
        assert run([*asked]) == 0
        said = "one window is read, and it is of the texts" in capsys.readouterr().err
        assert said is not bool(more)
        made.append(Calibration.open(path).fingerprint)
    assert made[0] == made[1]


def test_its_flags_reach_the_trainer(
    folder: Path, text: str, tmp_path: Path, calls: list[Call]
) -> None:
    path = tmp_path / "out.safetensors"
    assert run([*command(folder, text, path, "--codec", PLAIN, "--simvq", "--even")]) == 0
    assert {call.mode for call in calls} == {"simvq"}
    assert all(call.weights is None for call in calls)
    assert Calibration.open(path).seeds


@pytest.mark.parametrize(
    ("more", "said"),
    [
        (["--codec", "f16"], "--codec: 'f16' needs no calibration; nuq does, and formats such as"),
        (["--codec", "vq9"], "--codec: expected nuq or a cache format: unknown cache format 'vq9'"),
        (["--codec", "k=pq8x256,v=f16"], "pq8x256 needs its stages (r1|r2|r3)"),
        (["--codec", "vq2"], "needs a head_dim that is a multiple of 64, this cache has 16"),
        (["--simvq"], "--simvq is for codebooks, and --codec nuq has none"),
        (["--even"], "--even is for codebooks, and --codec nuq has none"),
        (["--prose"], "--prose is for codebooks, and --codec nuq has none"),
        (["--codec", "nuq", "--prose"], "--prose is for codebooks, and --codec nuq has none"),
        (["--codec", "kvquant2", "--simvq"], "--simvq is for codebooks, and --codec kvquant2 has"),
        (["--codec", PLAIN, "--seed", "-1"], "--seed"),
        (["--codec", "k=nuq2,v=nuq2,layers[99]=f16"], "layers[99]"),
    ],
)
def test_wrong_requests_are_refused(
    folder: Path, text: str, tmp_path: Path, capsys: Any, more: list[str], said: str
) -> None:
    path = tmp_path / "out.safetensors"
    assert run([*command(folder, text, path, *more)]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1 and said in err, err
    assert not path.exists()


def test_what_the_refusal_says_makes_what_is_missing(
    folder: Path, text: str, tmp_path: Path, capsys: Any
) -> None:
    talk = ["generate", "-m", str(folder), "-p", "a", "-n", "2", "-t", "1", "--kv", PLAIN]
    assert run(talk) == 2
    message = capsys.readouterr().err
    assert message.count("\n") == 1 and "k.rvq256.post, v.rvq256" in message
    advised = re.findall(r"`kvrt (calibrate [^`]+)`", message)[0]
    places = {"MODEL": str(folder), "FILE": text}
    words = [places.get(word, word) for word in shlex.split(advised)]
    own = Path(words[words.index("-o") + 1])
    try:
        assert run([*words, *SMALL]) == 0
        assert run(talk) == 0
    finally:
        own.unlink()


def test_a_device_is_not_written_over(
    folder: Path, text: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setattr("kvrt.cli.calibrate.open_model", lambda *_: pytest.fail("too late"))
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    assert run([*command(folder, text, pipe)]) == 2
    assert f"kvrt: error: -o: {pipe} is no regular file, expected" in capsys.readouterr().err
    assert pipe.is_fifo()


def test_a_text_is_not_written_over(folder: Path, text: str, tmp_path: Path, capsys: Any) -> None:
    other = tmp_path / "link"
    other.symlink_to(text)
    for path in (Path(text), other, Path(text).parent / "." / Path(text).name):
        assert run([*command(folder, text, path)]) == 2
        err = capsys.readouterr().err
        assert f"-o: {path} is a --text, expected another name" in err and err.count("\n") == 1
    assert Path(text).read_text(encoding="utf-8") == TEXT


def test_a_folder_that_cannot_be_written_is_found_before_anything_is_read(
    folder: Path, text: str, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    def refuse(dir: Path) -> Any:
        raise PermissionError(13, "Permission denied", str(dir / "tmp123"))

    monkeypatch.setattr("kvrt.cli.calibrate.TemporaryFile", refuse)
    monkeypatch.setattr("kvrt.cli.calibrate.open_model", lambda *_: pytest.fail("too late"))
    args = ["calibrate", str(folder), "--text", text, "--codec", "vq1", "-o", "a.safetensors"]
    assert run(args) == 1
    out, err = capsys.readouterr()
    assert out == "" and err.startswith("kvrt: error: a.safetensors: ") and err.count("\n") == 1
