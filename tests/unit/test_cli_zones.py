"""Chat, generate, info and notes with formats that compress prompts."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import kvrt
from kvrt.chat import Chat
from kvrt.cli.chat import Talk, banner, converse
from kvrt.cli.chat_commands import run_command
from kvrt.cli.kv_options import Format, note_unpacked, resolve_formats, split_formats
from kvrt.cli.line_reader import Message
from kvrt.cli.main import run
from kvrt.cli.widths import width_lines
from kvrt.errors import StorageError
from kvrt.generate import Model
from kvrt.kvstore import Geometry, KVSpec, bits_per_element, bytes_per_token, estimate, fixed_bytes
from kvrt.saved_conversation import is_saved, read_saved
from kvrt.tensor_file import Tensor, TensorFile, write_tensors
from kvrt.trizone.segment import Widths
from kvrt.trizone.store import ZoneStore
from tests.helpers.tiny_model import write_tiny_model

ONLY_A = ("-l", "65+1000", "-n", "3", "-t", "1")
LONG = "one " * 40


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("models") / "tiny"
    write_tiny_model(folder, tokenizer=True, head_dim=64, max_context=2000)
    return str(folder)


@pytest.fixture(scope="module")
def model(folder: str) -> Model:
    return kvrt.load(folder, kv="rdkv:64", threads=1)


@pytest.fixture
def talk(model: Model) -> Talk:
    talk = Talk(model.chat(), verbose=False, colour=False, interactive=True)
    talk.chat.max_tokens = 4
    return talk


# --- conversations ---


class Lines:
    """A reader of given lines."""

    def __init__(self, *lines: str) -> None:
        self._lines = list(lines)

    def read(self) -> Message:
        if not self._lines:
            raise EOFError
        return Message(self._lines.pop(0), False)


def test_a_conversation_goes_on_whatever_is_asked_of_it(
    talk: Talk, tmp_path: Path, capsys: Any
) -> None:
    file, text = tmp_path / "c.kv", tmp_path / "c.json"
    lines = (
        LONG, "/stats", "and", f"/save {file}", f"/save {text}", "/regen", "/system be brief",
        LONG, f"/load {file}", "more", f"/load {text}", "more", "/clear", "hi", "/stats",
    )  # fmt: skip
    converse(talk, Lines(*lines), after_turn=lambda: None)
    out, err = capsys.readouterr()
    assert "error" not in err
    assert out.count("\n") >= 7
    assert [message["role"] for message in talk.chat.messages] == ["user", "assistant"]


def test_regen_reads_a_compressed_prompt_again(talk: Talk) -> None:
    """A cut among compressed tokens cannot be: the answer is that of a fresh conversation."""
    first = "".join(talk.chat.send(LONG))
    assert talk.chat.session.timings.reused_tokens == 0
    again = "".join(talk.chat.regen())
    assert talk.chat.session.timings.reused_tokens == 0
    assert again and len(talk.chat.messages) == 2 and first
    list(talk.chat.send("more"))
    assert talk.chat.session.timings.reused_tokens > 160


def test_an_interrupted_prompt_leaves_the_conversation_as_it_was(talk: Talk) -> None:
    list(talk.chat.send(LONG))
    before, tokens = list(talk.chat.messages), list(talk.chat.session.tokens)
    layers = []

    def cancel() -> bool:
        layers.append(1)
        return len(layers) == 2  # behind a layer of the prefill

    assert list(talk.chat.send(LONG, cancel=cancel)) == []
    assert talk.chat.finish_reason == "interrupted" and talk.chat.messages == before
    assert talk.chat.session.tokens == tokens[: len(talk.chat.session.tokens)]
    assert len(talk.chat.session.store) == len(talk.chat.session.tokens)
    assert "".join(talk.chat.send("more")) and len(talk.chat.messages) == len(before) + 2


def test_a_session_file_keeps_a_compressed_cache(folder: str, tmp_path: Path, capsys: Any) -> None:
    path = tmp_path / "s.kv"
    args = ["chat", "-m", folder, *ONLY_A, "--session", str(path), "-v", "--kv", "rdkv:64"]
    assert run([*args, "-p", LONG]) == 0
    assert ", 0 from the cache" in capsys.readouterr().err
    assert run([*args, "-p", "two"]) == 0
    assert "181 from the cache" in capsys.readouterr().err
    whole = path.read_bytes()
    assert run([*args, "-p", "three", "--kv", "rdkv:128"]) == 2
    out, err = capsys.readouterr()
    assert out == "" and err.count("\n") == 1
    assert 'got "rdkv:64", expected "rdkv:128"; start with --kv rdkv:64' in err
    assert path.read_bytes() == whole


@pytest.mark.parametrize("kv", ["rdkv:8", "snapkv:10%", "adakv:64", "h2o:64", "rdkv:paper:64"])
def test_generate_takes_every_policy(folder: str, kv: str, capsys: Any) -> None:
    args = ["generate", "-m", folder, *ONLY_A, "--kv", kv]
    assert run([*args, "-p", "x" * 150]) == 0
    out, _ = capsys.readouterr()
    assert out.strip() == "AAA"


def test_a_banner_says_when_prompts_are_compressed(model: Model) -> None:
    text = banner(model, model.chat(), interactive=False)
    assert (
        "cache rdkv:64: prompts are compressed at their end, one that fills the context to" in text
    )
    assert "per token" not in text


# --- widths ---


def test_stats_show_what_each_layer_keeps(talk: Talk, capsys: Any) -> None:
    run_command(talk, "/stats")
    assert "kept:" not in capsys.readouterr().err
    list(talk.chat.send(LONG))
    run_command(talk, "/stats")
    err = capsys.readouterr().err
    (at,) = (i for i, line in enumerate(err.splitlines()) if line.startswith("kept: "))
    head, *rows = (line.split() for line in err.splitlines()[at + 1 :])
    assert head[0] == "layer" and [row[0] for row in rows] == ["0", "1", "all"]
    store = talk.chat.session.store
    assert isinstance(store, ZoneStore)
    names = list(zip(head[1::2], head[2::2]))
    for number, row in enumerate(rows[:2]):
        widths = store.widths(number)
        got = {(side, int(bits)): int(count) for (side, bits), count in zip(names, row[1:])}
        want = {("V", bits): count for bits, count in widths.tokens.items()}
        want |= {("K", bits): count for bits, count in widths.channels.items()}
        assert got == {key: count for key, count in want.items() if key in got}
        assert sum(got.values()) == sum(want.values())
        assert sum(widths.channels.values()) == 2 * 64


def test_a_table_of_widths_keeps_to_a_terminal() -> None:
    layer = Widths(
        {16: 100_000, 8: 200_000, 4: 300_000, 2: 400_000, 0: 7_388_608},
        {16: 24, 8: 100, 4: 300, 2: 500, 0: 100},
    )
    lines = width_lines([layer] * 32)
    assert len(lines) == 1 + 1 + 32 + 1
    assert len({len(line) for line in lines[1:]}) == 1 and len(lines[-1]) <= 100
    assert lines[0].startswith("kept: 11.9 % of what was compressed, 90.2 % of the channels")
    assert width_lines([]) == []
    evicted = Widths({16: 3, 8: 0, 4: 0, 2: 0, 0: 5}, {16: 64, 8: 0, 4: 0, 2: 0, 0: 0})
    assert width_lines([evicted])[1].split() == ["layer", "V", "16", "V", "0", "K", "16"]


# --- info ---


def saved(chat: Chat, path: Path) -> Path:
    list(chat.send(LONG))
    chat.save(path)
    return path


def test_info_of_a_saved_conversation(talk: Talk, folder: str, tmp_path: Path, capsys: Any) -> None:
    path = saved(talk.chat, tmp_path / "c.kv")
    again = talk.chat.model.chat()
    again.load(path)
    tokens = len(again.session.tokens)  # without those that no message has
    assert run(["info", str(path), "--json"]) == 0
    data = json.loads(capsys.readouterr().out)
    store = talk.chat.session.store
    assert isinstance(store, ZoneStore)
    widths = [store.widths(layer) for layer in range(2)]
    assert data == {
        "kv": "rdkv:64", "tokens": tokens, "model": folder, "file_bytes": path.stat().st_size,
        "messages": 2, "num_layers": 2, "num_kv_heads": 2, "head_dim": 64,
        "widths": [
            {
                "layer": layer,
                "tokens": {str(bits): count for bits, count in one.tokens.items()},
                "channels": {str(bits): count for bits, count in one.channels.items()},
            }
            for layer, one in enumerate(widths)
        ],
    }  # fmt: skip
    assert run(["info", str(path)]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "cache        rdkv:64" and f"tokens       {tokens}" in lines
    assert lines[-4:] == width_lines(widths)[1:]


def test_info_of_what_was_not_compressed(folder: str, tmp_path: Path, capsys: Any) -> None:
    chat = kvrt.load(folder, kv="q8_0", threads=1).chat()
    chat.max_tokens = 2
    path = saved(chat, tmp_path / "c.kv")
    found = read_saved(path)
    assert (found.kv, found.widths, found.messages) == ("q8_0", [], 2)
    assert run(["info", str(path)]) == 0
    assert "compressed   no prompt" in capsys.readouterr().out
    assert run(["info", str(path), "--kv", "f16"]) == 2
    assert "--kv is for a model" in capsys.readouterr().err


def test_info_refuses_other_files_on_one_line(
    talk: Talk, folder: str, tmp_path: Path, capsys: Any
) -> None:
    path = saved(talk.chat, tmp_path / "c.kv")
    whole = path.read_bytes()
    other = bytearray(whole)
    at = whole.index(b'"model_name":"') + 14
    other[at] ^= 1
    (tmp_path / "x.kv").write_bytes(other)
    os.truncate(path, len(whole) - 5)
    weights = Path(folder) / "model.safetensors"
    for file, words in (
        (path, "truncated"),
        (tmp_path / "x.kv", "damaged: its texts are not those that were saved"),
        (weights, "safetensors, but no saved cache"),
    ):
        assert is_saved(file)
        assert run(["info", str(file)]) == 1
        out, err = capsys.readouterr()
        assert out == "" and err.count("\n") == 1 and words in err
    (tmp_path / "m.gguf").write_bytes(b"GGUF\3\0\0\0")
    (tmp_path / "c.json").write_text("{}", encoding="utf-8")
    assert not any(is_saved(tmp_path / name) for name in ("m.gguf", "c.json", "", "none\0"))


def test_widths_that_no_block_has_are_refused(talk: Talk, tmp_path: Path) -> None:
    path = saved(talk.chat, tmp_path / "c.kv")
    with TensorFile(path) as file:
        name = "layers.1.blocks.0"
        blocks = file.read(name, np.dtype(np.int64), file.shape(name))
        texts = dict(file.metadata)
        tensors = {}
        for layer in range(2):
            for kind in ("blocks", "channels"):
                where = f"layers.{layer}.{kind}.0"
                read = file.read(where, np.dtype(np.int64), file.shape(where))
                tensors[where] = Tensor.of(read)
    blocks[0, 1] = -1
    write_tensors(path, texts, tensors | {name: Tensor.of(blocks)})
    with pytest.raises(StorageError, match="layer 1: block 0: tokens by width"):
        read_saved(path)


@pytest.mark.parametrize("kv", ["rdkv:100", "rdkv:2.5%", "adakv:0", "snapkv:100%", "h2o:0%"])
def test_what_a_budget_costs_is_fixed_or_a_share(kv: str) -> None:
    geometry, spec = Geometry(3, 2, 64), KVSpec.parse(kv)
    for tokens in (10_000, 1 << 20):
        most = fixed_bytes(geometry, spec) + bytes_per_token(geometry, spec) * tokens
        found = estimate(geometry, spec, tokens)
        if kv == "snapkv:100%":  # all of it stays exact, where there is room for some more
            assert most <= found <= 1.125 * most
        else:
            assert found == pytest.approx(most, abs=64 * 4 * 64 * 6)
    assert bits_per_element(geometry, spec, 20) == 16.0
    if kv == "rdkv:100":
        assert bytes_per_token(geometry, spec) == 0.0
        assert bits_per_element(geometry, spec, 10_000) == pytest.approx(16 * 64 / 9964, rel=0.01)


def test_info_explains_budgets(folder: str, capsys: Any) -> None:
    assert run(["info", folder, "--kv", "f16,rdkv:100,rdkv:2.5%", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)["kv"]
    assert [row["bytes_per_token"] for row in rows] == [1024.0, 0.0, 25.6]
    geometry = Geometry(2, 2, 64)
    assert rows[1]["fixed_bytes"] == estimate(geometry, KVSpec.parse("rdkv:100"), 2000)
    assert rows[1]["bits_per_element"] < 1.0
    assert run(["info", folder, "--kv", "rdkv:100"]) == 0
    assert "a budget in tokens is fixed" in capsys.readouterr().out
    assert run(["info", folder, "--kv", "f16"]) == 0
    assert "budget" not in capsys.readouterr().out


# --- lists and notes ---


@pytest.mark.parametrize(
    ("text", "parts"),
    [
        ("f16,rdkv:1024,recompress=512", ["f16", "rdkv:1024,recompress=512"]),
        ("rdkv:64:shared,sink=0,window=8,h2o:5%", ["rdkv:64:shared,sink=0,window=8", "h2o:5%"]),
        ("rdkv:64,k=q8_0,v=f16", ["rdkv:64", "k=q8_0,v=f16"]),
        ("snapkv:1.5%,adakv:1.5%", ["snapkv:1.5%", "adakv:1.5%"]),
    ],
)
def test_lists_of_formats_with_budgets_split_right(text: str, parts: list[str]) -> None:
    assert split_formats(text) == parts
    assert [chosen.name for chosen in resolve_formats([text], None, None, [])] == parts


def test_one_side_of_a_budget_is_refused(folder: str, capsys: Any) -> None:
    assert run(["info", folder, "--kv", "rdkv:64", "--kv-k", "q8_0"]) == 2
    err = capsys.readouterr().err
    assert "--kv-k: cache format rdkv:64" in err and "cannot go with it" in err


def test_notes_say_what_is_not_compressed(capsys: Any) -> None:
    formats = [Format(name, KVSpec.parse(name)) for name in ("rdkv:64", "f16")]
    note_unpacked(formats, 1024)
    err = capsys.readouterr().err
    assert (
        err.count("\n") == 1
        and "rdkv:64 packs nothing in windows without a prompt: --prompt" in err
    )
    note_unpacked(formats, 1024, prompt=512)
    assert capsys.readouterr().err == ""
    note_unpacked(formats, 1024, prompt=64)
    assert "rdkv:64 packs nothing of a prompt of 64 tokens" in capsys.readouterr().err


def test_a_bench_refuses_batches_that_cut_a_prompt(folder: str, capsys: Any) -> None:
    args = ["bench", "-m", folder, "--kv", "f16,rdkv:64", "-p", "64", "-n", "1", "-r", "1"]
    assert run([*args, "-b", "32"]) == 2
    err = capsys.readouterr().err
    assert "-b: rdkv:64 compresses a prompt as a whole" in err and "with -b 64" in err
    assert run([*args, "-b", "64", "-o", "json"]) == 0
    assert len(json.loads(capsys.readouterr().out)) == 4
